"""Torch twins of what chooses tokens from logits: the specification, and a CPU's path.

Rejection is by the block. A draft X that was drawn from q is kept or dropped by the target's
p so that what is committed is distributed as p alone would draw it. Token by token that is done
with probability min(1, p / q) each. `reject_by_block` looks at the whole prefix instead: one factor
above 1 makes up for one below, so that more tokens are kept, and it is as exact (Sun et al., Block
Verification Accelerates Speculative Decoding, 2024).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.kernels.reference import COUNT_MATCHES

# tells the target's noise from that of the drafts with the same key
SALT = 0x5851F42D4C957F2D
# what remains of p where nothing is left of it by rounding
FLOOR = 1e-10


class Noise(NamedTuple):
    """What a draft and the target's choice of the same token share; see `noise`."""

    keys: Tensor  # [b, at least the rows of a request] int64, one for each row
    scales: Tensor  # [b] fp32: the temperature, or 0 for a request that is to have no noise


def gumbel(
    keys: Tensor,  # [n] int64
    width: int,
) -> Tensor:
    """Return Gumbel noise that depends on its row's key and its column alone, [n, width] fp32.

    In words of 32 bits, whose products and sums wrap round.
    """
    low, high = (_word(keys >> shift)[:, None] for shift in (0, 32))
    h = torch.arange(width, dtype=torch.int32, device=keys.device) * FACTORS[0] + low
    _mix(h, 16, FACTORS[1])
    _mix(h, 13, FACTORS[2])
    _mix(h, 16).add_(high)
    _mix(h, 15, FACTORS[3])
    _mix(h, 12, FACTORS[4])
    _mix(h, 15)
    u = (h.long() & 2**32 - 1).float().mul_(2**-32).add_(2**-33).clamp_(max=1 - 2**-24)
    # small u are the ones that win, and log1p keeps them
    return u.neg_().log1p_().neg_().log_().neg_()


def _word(x: Tensor | int) -> Any:
    """Return the lowest 32 bits as a signed number."""
    word = ((x & 2**32 - 1) ^ 2**31) - 2**31
    return word.int() if isinstance(word, Tensor) else word


FACTORS = [_word(x) for x in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D, 0x297A2D39)]


def _mix(h: Tensor, shift: int, factor: int = 1) -> Tensor:
    """Fold the high bits into the low ones and multiply, in place."""
    h ^= (h >> shift) & 2 ** (32 - shift) - 1
    h *= factor
    return h


def _noise_of(noise: Noise, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the noise of rows [n, width], and what it is scaled by [n, 1]."""
    per_request = rows // noise.scales.shape[0]
    scales = noise.scales.repeat_interleave(per_request)[:, None]
    return gumbel(noise.keys[:, :per_request].flatten(), width), scales


def _capped(logits: Tensor, logit_cap: float) -> Tensor:
    logits = logits.float()
    return logit_cap * torch.tanh(logits / logit_cap) if logit_cap > 0 else logits


def argmax_rows(
    logits: Tensor,  # [n, V]
    logit_cap: float = 0.0,
    noise: Noise | None = None,  # for n / b rows of each request
) -> Tensor:
    """Return the column of each row's highest value in fp32, capped first; [n] int64.

    With noise that is a draw at the temperature which the noise is scaled by. Of equal values the
    first wins.
    """
    logits = _capped(logits, logit_cap)
    if noise is not None:
        added, scales = _noise_of(noise, *logits.shape)
        logits = torch.addcmul(logits, scales, added)
    return torch.argmax(logits, dim=-1)


def argmax_and_sample(
    logits: Tensor,  # [n, V]
    logit_cap: float,
    noise: Noise,  # for n / b rows of each request
) -> Tensor:
    """Return each row's likeliest column and one drawn with noise, [2, n] int64; without noise, at
    scale 0, the likeliest twice. The cap bends what is drawn from, and not which is likeliest."""
    argmax_drafts = argmax_rows(logits)
    per_request = logits.shape[0] // noise.scales.shape[0]
    is_sampled = noise.scales.repeat_interleave(per_request) > 0
    drawn = torch.where(is_sampled, argmax_rows(logits, logit_cap, noise), argmax_drafts)
    return torch.stack([argmax_drafts, drawn])


def sample_rows(
    logits: Tensor,  # [n, V]
    noise: Noise,  # for n / b rows of each request
    *,
    temperatures: Tensor,  # [b], each for n / b rows
    top_ks: Tensor,  # [b]
    top_ps: Tensor,  # [b]
    logit_cap: float = 0.0,
) -> Tensor:
    """Return a draw from each row, capped first; [n] int64.

    A token is kept while fewer than top_k tokens are likelier and while those hold less than top_p
    of the whole, so that all which equal the k-th remain, however many. Of what is kept the
    highest is taken after noise, or the first of the highest where a request has none.
    """
    per_request = logits.shape[0] // temperatures.shape[0]
    temperatures, top_ks, top_ps = (
        each.repeat_interleave(per_request) for each in (temperatures, top_ks, top_ps)
    )
    logits = _capped(logits, logit_cap) / temperatures[:, None]
    probs = torch.softmax(logits, dim=-1)
    ordered, index = probs.sort(dim=-1, descending=True)
    # equal ones begin where the first of them does
    begins = torch.searchsorted(-ordered, -ordered, side="left")
    mass = (ordered.cumsum(dim=-1) - ordered).gather(-1, begins)
    kept_ordered = (begins < top_ks[:, None]) & (mass < top_ps[:, None])
    kept = torch.zeros_like(kept_ordered).scatter(-1, index, kept_ordered)
    added, scales = _noise_of(noise, *logits.shape)
    reached = logits + torch.where(scales > 0, added, 0.0)
    return torch.where(kept, reached, float("-inf")).argmax(dim=-1)


def reject_by_block(
    logits: Tensor,  # [b, B, V], the target's
    draft_logits: Tensor,  # [b, B - 1, V], the drafter's
    drafts: Tensor,  # [b, B - 1] int64
    argmax_drafts: Tensor,  # [b, B - 1] int64, the drafter's
    noise: Noise,  # what drawn drafts were drawn with
    uniforms: Tensor,  # [b, B - 1] fp32, uniform from 0 to 1
    *,
    is_sampled: Tensor,  # [b] bool; other drafts are whatever they are
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep or drop drafts so that what is committed is a draw from the target's distribution, or
    greedy where a request has no noise.

    Return the kept drafts and behind them the target's own token [b, B] int64; how many drafts are
    kept [b] int32, COUNT_MATCHES where these are not sampled ones; and the advantage [b, B - 1]
    fp32, how much likelier a sampled draft is kept than an argmax draft.

    With a the chance that a prefix is reached, at most 1, its drafts are kept with the chance
    s / (s + 1 - a), where s is what is left of a p when q is taken away, and the longest kept
    prefix counts. The token behind it is drawn from what is left of a p there.
    """
    temperatures = torch.where(noise.scales > 0, noise.scales, 1.0)[:, None, None]
    p, q = (_probabilities(x, temperatures, logit_cap) for x in (logits, draft_logits))
    # drafts of a row without a number were not drawn from it
    known = is_sampled[:, None] & (q.sum(-1) > 0)
    at = drafts[..., None]
    steps = (p[:, :-1].gather(-1, at) / q.gather(-1, at))[..., 0]
    steps = torch.where(known, steps, 0.0)
    reached = [torch.ones_like(noise.scales)]
    for step in steps.unbind(1):
        reached.append((reached[-1] * step).clamp(max=1.0))
    a = torch.where(is_sampled[:, None], torch.stack(reached, dim=1), 1.0)
    taken = torch.zeros_like(p)
    taken[:, :-1] = q * known[..., None]
    left = (a[..., None] * p - taken).clamp(min=0.0)
    s = left.sum(-1)
    keep = torch.where(a < 1, s / (s + 1 - a), 1.0)[:, 1:] > uniforms
    number = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    last_kept = torch.where(keep, number, 0).amax(dim=1)

    keys = noise.keys[:, : p.shape[1]] ^ SALT
    added = gumbel(keys.flatten(), p.shape[2]).view_as(p)
    choices = (torch.maximum(left, FLOOR * p).log() + added).argmax(-1)
    is_greedy = noise.scales <= 0
    choices = torch.where(is_greedy[:, None], _numbers(logits, logit_cap).argmax(-1), choices)
    by_block = is_sampled & ~is_greedy
    num_correct = torch.where(by_block, last_kept, COUNT_MATCHES)
    kept = by_block[:, None] & (number <= num_correct[:, None])
    choices[:, :-1] = torch.where(kept, drafts, choices[:, :-1])
    alike = torch.minimum(p[:, :-1], q).sum(-1)
    advantage = alike - p[:, :-1].gather(-1, argmax_drafts[..., None])[..., 0]
    return choices, num_correct.int(), advantage


def _numbers(logits: Tensor, logit_cap: float) -> Tensor:
    """Return logits in fp32, capped; -inf for what is no number."""
    logits = _capped(logits, logit_cap)
    return torch.where(logits.isnan(), float("-inf"), logits)


def _probabilities(logits: Tensor, temperatures: Tensor, logit_cap: float) -> Tensor:
    """Return the distribution of each row; what is no number has no weight."""
    logits = _numbers(logits, logit_cap)
    return torch.softmax(logits / temperatures, dim=-1).nan_to_num(0.0)
