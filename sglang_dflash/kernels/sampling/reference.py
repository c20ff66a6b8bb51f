"""Tokens from logits in torch: the specification, and the CPU path.

Speculative sampling accepts a draft that was sampled from q, or rejects it and samples from the
residual distribution, such that the committed tokens follow the target's p. Token-wise rejection
sampling accepts a draft with probability min(1, p / q). `reject_by_block` is block verification: it
considers the whole prefix, where a ratio above 1 compensates for one below, so that more drafts are
accepted, and is just as exact (Sun et al., Block Verification Accelerates Speculative Decoding,
2024).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.kernels.accept.reference import COUNT_MATCHES
from sglang_dflash.kernels.logits.reference import Noise, capped, gumbel, noise_of_rows
from sglang_dflash.kernels.packing import num_rows_of, places, unpack

# the largest top_k that the `sample_rows` kernel supports
MAX_TOP_K = 128
# XORed into keys: the residual draw must not reuse the drafts' noise
SALT = 0x5851F42D4C957F2D
# lower bound of the residual, as a fraction of p: rounding can leave the residual empty
FLOOR = 1e-10


def argmax_rows(
    logits: Tensor,  # [n, V]
    logit_cap: float = 0.0,
    noise: Noise | None = None,  # for n / b rows of each request
) -> Tensor:
    """Return the argmax of each row in fp32, after the logit cap; [n] int64.

    With noise it is a draw at the temperature given by the scale (Gumbel-max). Ties go to the first
    column.
    """
    logits = capped(logits, logit_cap)
    if noise is not None:
        added, scales = noise_of_rows(noise, *logits.shape)
        logits = torch.addcmul(logits, scales, added)
    return torch.argmax(logits, dim=-1)


def argmax_and_sample(
    logits: Tensor,  # [n, V]
    logit_cap: float,
    noise: Noise,  # for n / b rows of each request
) -> Tensor:
    """Return each row's argmax and a column sampled with noise, [2, n] int64; at scale 0 the argmax
    twice. The logit cap changes the sampled distribution, but not its argmax."""
    highest = argmax_rows(logits)
    per_request = logits.shape[0] // noise.scales.shape[0]
    is_sampled = noise.scales.repeat_interleave(per_request) > 0
    sampled = torch.where(is_sampled, argmax_rows(logits, logit_cap, noise), highest)
    return torch.stack([highest, sampled])


def peak_probabilities(
    logits: Tensor,  # [n, V]
    logit_cap: float = 0.0,
) -> Tensor:
    """Return the highest probability of each row, after the logit cap; [n] fp32.

    NaN has no mass; 0 for a row without any.
    """
    return _probabilities(logits, torch.ones((), device=logits.device), logit_cap).amax(dim=-1)


def sample_rows(
    logits: Tensor,  # [n, V]
    noise: Noise,  # for n / b rows of each request
    *,
    temperatures: Tensor,  # [b], each for n / b rows
    top_ks: Tensor,  # [b]
    top_ps: Tensor,  # [b]
    logit_cap: float = 0.0,
) -> Tensor:
    """Return a draw from each row, after the logit cap; [n] int64.

    A token is kept if fewer than top_k tokens are likelier and these hold less than top_p of the
    mass, so all tokens tied with the k-th are kept, however many. The draw is the argmax of the
    kept tokens after adding noise; for a greedy request, the first maximum.
    """
    per_request = logits.shape[0] // temperatures.shape[0]
    temperatures, top_ks, top_ps = (
        each.repeat_interleave(per_request) for each in (temperatures, top_ks, top_ps)
    )
    logits = capped(logits, logit_cap) / temperatures[:, None]
    probs = torch.softmax(logits, dim=-1)
    ordered, index = probs.sort(dim=-1, descending=True)
    # tied tokens share the rank of the first of them
    begins = torch.searchsorted(-ordered, -ordered, side="left")
    mass = (ordered.cumsum(dim=-1) - ordered).gather(-1, begins)
    kept_ordered = (begins < top_ks[:, None]) & (mass < top_ps[:, None])
    kept = torch.zeros_like(kept_ordered).scatter(-1, index, kept_ordered)
    added, scales = noise_of_rows(noise, *logits.shape)
    reached = logits + torch.where(scales > 0, added, 0.0)
    return torch.where(kept, reached, float("-inf")).argmax(dim=-1)


def reject_by_block(
    logits: Tensor,  # [b, B, V], the target's; [N, V] if the requests share N rows
    draft_logits: Tensor,  # [b, B - 1, V]
    drafts: Tensor,  # [b, B - 1] int64
    argmax_drafts: Tensor,  # [b, B - 1] int64
    noise: Noise,  # the noise of the sampled drafts
    uniforms: Tensor,  # [b, B - 1] fp32, in [0, 1)
    *,
    is_sampled: Tensor,  # [b] bool, whether drafts were sampled from draft_logits with the noise
    logit_cap: float = 0.0,
    bounds: Tensor | None = None,  # [b + 1] int64, of each request's rows if they are shared
    requests: Tensor | None = None,  # [N] int64, the request of each shared row
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept or reject drafts such that the committed tokens are a draw from the target's
    distribution, or greedy for a request without noise.

    Return the kept drafts followed by the target's own token [b, B] int64; the number of drafts
    kept [b] int32, COUNT_MATCHES where the drafts are not sampled ones; and the advantage
    [b, B - 1] fp32, acceptance probability of a sampled draft minus that of an argmax draft.

    For each prefix, a = min(1, a of the prefix one shorter * p / q), and s is the mass of the
    residual max(a p - q, 0) after it. The prefix is accepted with probability s / (s + 1 - a), and
    the longest accepted one is kept. The token after it is sampled from the normalised residual.

    With `bounds` the requests share N rows: each verifies only its first drafts, one fewer than its
    rows, as if it had no others. Choices are then packed too, [N], and the advantage of the other
    drafts is 0.
    """
    number = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    is_verified = torch.ones_like(drafts, dtype=torch.bool)
    if bounds is not None:
        logits = unpack(logits, bounds, drafts.shape[1] + 1)
        is_verified = number < num_rows_of(bounds)[:, None]
    temperatures = torch.where(noise.scales > 0, noise.scales, 1.0)[:, None, None]
    p, q = (_probabilities(x, temperatures, logit_cap) for x in (logits, draft_logits))
    # an all-NaN draft row has no distribution to reject against
    known = is_sampled[:, None] & (q.sum(-1) > 0) & is_verified
    ratios = torch.where(known, _likelihood(p, drafts) / _likelihood(q, drafts), 0.0)
    a = torch.where(is_sampled[:, None], _prefix_acceptance(ratios), 1.0)
    known_q = F.pad(q * known[..., None], (0, 0, 0, 1))
    residual = (a[..., None] * p - known_q).clamp(min=0.0)
    s = residual.sum(-1)
    keep = torch.where(a < 1, s / (s + 1 - a), 1.0)[:, 1:] > uniforms
    last_kept = torch.where(keep, number, 0).amax(dim=1)

    keys = noise.keys[:, : p.shape[1]] ^ SALT
    added = gumbel(keys.flatten(), p.shape[2]).view_as(p)
    choices = (torch.maximum(residual, FLOOR * p).log() + added).argmax(-1)
    is_greedy = noise.scales <= 0
    choices = torch.where(is_greedy[:, None], _numbers(logits, logit_cap).argmax(-1), choices)
    by_block = is_sampled & ~is_greedy
    num_correct = torch.where(by_block, last_kept, COUNT_MATCHES)
    kept = by_block[:, None] & (number <= num_correct[:, None])
    choices[:, :-1] = torch.where(kept, drafts, choices[:, :-1])
    overlap_mass = torch.minimum(p[:, :-1], q).sum(-1)
    advantage = (overlap_mass - _likelihood(p, argmax_drafts)).where(is_verified, 0.0)
    if bounds is not None and requests is not None:
        choices = choices[places(bounds, requests.shape[0])]
    return choices, num_correct.int(), advantage


def _likelihood(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability of each token [b, n] in its row of [b, at least n, V]."""
    return probabilities[:, : tokens.shape[1]].gather(-1, tokens[..., None])[..., 0]


def _prefix_acceptance(ratios: Tensor) -> Tensor:
    """Return `a` of each prefix [b, B], the empty one first, from the ratios p / q [b, B - 1]."""
    prefix = [ratios.new_ones(ratios.shape[0])]
    for ratio in ratios.unbind(1):
        prefix.append((prefix[-1] * ratio).clamp(max=1.0))
    return torch.stack(prefix, dim=1)


def _numbers(logits: Tensor, logit_cap: float) -> Tensor:
    """Return logits in fp32, capped; -inf for NaN."""
    logits = capped(logits, logit_cap)
    return torch.where(logits.isnan(), float("-inf"), logits)


def _probabilities(logits: Tensor, temperatures: Tensor, logit_cap: float) -> Tensor:
    """Return the distribution of each row; NaN has no mass, an all-NaN row none at all."""
    logits = _numbers(logits, logit_cap)
    return torch.softmax(logits / temperatures, dim=-1).nan_to_num(0.0)
