"""Targets with gated delta nets without a GPU: what SGLang's stand-in kernel package cannot reach.

The recurrence itself is in `path/sgl_kernel/mamba.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from sglang_dflash.glue import changes
from sglang_dflash.glue.changes import Hook


def install() -> None:
    """Make gated norms, and the commit and the snapshots of recurrent states, run on a CPU."""
    changes.attach(
        {
            "gated_norm": Hook(_gated_norm, "its kernel needs a GPU"),
            "gated_layer_norm": Hook(_gated_layer_norm, "its kernel needs a GPU"),
            "scatter_states": Hook(_scatter_states, "its kernels need a GPU"),
            "track_states": Hook(_track_states, "its kernel needs a GPU"),
            "has_state_snapshots": Hook(
                _has_state_snapshots, "the stand-ins keep snapshots of the states"
            ),
        }
    )


def _gated_norm(_original: Any, norm: Any, x: Tensor, g: Tensor) -> Tensor:
    rows = functional.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.eps)
    gate = g.float().sigmoid() if norm.activation == "sigmoid" else functional.silu(g.float())
    return (rows * gate).to(x.dtype)


def _gated_layer_norm(original: Any, norm: Any, x: Tensor, z: Tensor) -> Tensor:
    assert norm.group_size is None and norm.norm_before_gate, "a norm without groups, then the gate"
    return _gated_norm(original, norm, x, z)


# states


def _scatter_states(
    _original: Any,
    caches: Any,
    slots: Tensor,
    steps: Tensor,
    tracked_slots: Tensor | None,
    tracked_steps: Tensor | None,
    **_unused: Any,
) -> None:
    """Copy the states after the given steps of a block to the requests' slots, and to those of
    their snapshots; a negative step or slot means none."""
    pairs = [(caches.temporal, caches.intermediate_ssm)]
    pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for where, which in ((slots, steps), (tracked_slots, tracked_steps)):
        if where is None or which is None:
            continue
        [rows] = ((which >= 0) & (where >= 0)).nonzero(as_tuple=True)
        for states, kept in pairs:
            states.index_copy_(1, where[rows].long(), kept[:, rows, which[rows].long()])


def _track_states(
    _original: Any,
    conv_states: Tensor,
    states: Tensor,
    slots: Tensor,
    mask: Tensor,
    tracked_slots: Tensor,
    *_unused: Any,
    **_settings: Any,
) -> None:
    """Copy the states of the masked requests to their snapshots, in all layers."""
    rows = mask.nonzero(as_tuple=True)[0]
    for each in (conv_states, states):
        each.index_copy_(1, tracked_slots[rows].long(), each[:, slots[rows].long()])


def _has_state_snapshots(_original: Any) -> bool:
    return True
