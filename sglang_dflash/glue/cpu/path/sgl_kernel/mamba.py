"""The gated delta rule and its convolution in plain torch, token by token.

The names, arguments and effects on states are those of SGLang's compiled kernels, which have no CPU
build on the package index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# tokens between the states that a prefill returns beside the last one; SGLang assumes this number
CHUNK = 64


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *_unused: Any
) -> tuple[Tensor, Tensor]:
    """Return each token's log decay and write strength, both [1, n, Hv] fp32."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,  # [1, n, H, K]
    k: Tensor,
    v: Tensor,  # [1, n, Hv, V]
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,  # [slots, Hv, V, K]
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,  # [rows, W, Hv, V, K]
    intermediate_state_indices: Tensor | None = None,
    **_unused: Any,
) -> Tensor:
    """Run blocks of equal length, and keep the state after each of their tokens if asked."""
    requests = cu_seqlens.shape[0] - 1
    gate, strength = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    rows = [x[0].unflatten(0, (requests, -1)) for x in (q, k, v, gate, strength)]
    slots = initial_state_indices[:requests].long()
    out, states = _delta_rule(initial_state_source[slots].float(), *rows)
    if intermediate_states_buffer is not None:
        assert intermediate_state_indices is not None
        kept = intermediate_state_indices[:requests].long()
        intermediate_states_buffer[kept, : states.shape[1]] = states.to(
            intermediate_states_buffer.dtype
        )
    if not disable_state_update:
        initial_state_source[slots] = states[:, -1].to(initial_state_source.dtype)
    return out.flatten(0, 1)[None].to(v.dtype)


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_unused: Any,
) -> tuple[Tensor, None, Tensor]:
    """Prefill sequences from their slots' states, which it advances. Return the output and the
    states before every chunk of a sequence, [1, chunks, Hv, V, K]."""
    out, befores = torch.empty_like(v), []
    for begin, end, slot in _sequences(cu_seqlens, initial_state_indices):
        rows = [x[:, begin:end] for x in (q, k, v, g, beta)]
        first = initial_state[slot][None].float()
        found, states = _delta_rule(first, *rows)
        out[:, begin:end] = found.to(v.dtype)
        before = torch.cat([first, states[0, :-1]])
        befores.append(before[::CHUNK])
        initial_state[slot] = states[0, -1].to(initial_state.dtype)
    return out, None, torch.cat(befores)[None]


def _delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output after each token, [b, T, Hv, V], and the state, [b, T, Hv, V, K].

    A state maps keys to values. A token lets it decay, and replaces a part of the value that it has
    for the token's key by the token's own.
    """
    group = v.shape[2] // k.shape[2]
    q, k = (_unit(x.float()).repeat_interleave(group, 2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, decay = v.float(), gate.exp()[..., None, None]
    outs, states = [], []
    for t in range(v.shape[1]):
        state = state * decay[:, t]
        missing = v[:, t] - (state * k[:, t, :, None]).sum(-1)
        state = state + (missing * strength[:, t, :, None])[..., None] * k[:, t, :, None]
        outs.append((state * q[:, t, :, None]).sum(-1))
        states.append(state)
    return torch.stack(outs, 1), torch.stack(states, 1)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _sequences(bounds: Tensor, slots: Tensor) -> list[tuple[int, int, int]]:
    ends = bounds.tolist()
    return list(zip(ends, ends[1:], slots.tolist(), strict=False))


# the convolution before it


def causal_conv1d_fn_cpu(
    x: Tensor,  # [D, n]
    weight: Tensor,  # [D, width]
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,  # [slots, D, width - 1]
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_unused: Any,
) -> Tensor:
    """Convolve sequences, each after the inputs that its slot holds, and keep its last ones."""
    out = torch.zeros_like(x)
    continues = has_initial_state.tolist()
    for i, (begin, end, slot) in enumerate(_sequences(query_start_loc, cache_indices)):
        before = conv_states[slot] if continues[i] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([before.to(x.dtype), x[:, begin:end]], -1)
        out[:, begin:end] = _convolve(inputs[None], weight, bias, activation)[0]
        conv_states[slot] = inputs[:, -before.shape[1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,  # [b, D] or [b, D, W]
    conv_state: Tensor,  # [slots, D, width - 1]
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,  # [rows, W, D, width - 1]
    intermediate_state_indices: Tensor | None = None,
    **_unused: Any,
) -> Tensor:
    """Convolve one token of each request, or a block, whose inputs are kept step by step instead:
    then the slots stay as they are."""
    slots = conv_state_indices.long()
    columns = x if x.dim() == 3 else x[..., None]
    inputs = torch.cat([conv_state[slots].to(x.dtype), columns], -1)
    kept = conv_state.shape[-1]
    if intermediate_conv_window is None:
        conv_state[slots] = inputs[..., -kept:].to(conv_state.dtype)
    else:
        assert intermediate_state_indices is not None
        rows = intermediate_state_indices.long()
        # [b, D, W + 1, kept]: what the convolution sees before each step, and after the last
        windows = inputs.unfold(-1, kept, 1)[:, :, 1:].transpose(1, 2)
        intermediate_conv_window[rows, : windows.shape[1]] = windows.to(
            intermediate_conv_window.dtype
        )
    # in the memory layout of the input, as the caller takes blocks apart
    return torch.empty_like(x).copy_(_convolve(inputs, weight, bias, activation).view(x.shape))


def _convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    out = functional.conv1d(inputs, weight[:, None], bias, groups=weight.shape[0])
    return functional.silu(out) if activation in ("silu", "swish") else out
