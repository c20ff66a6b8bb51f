"""Targets whose linear-attention or Mamba layers keep a recurrent state instead of KV.

A verify pass leaves that state unchanged and keeps the state after each row of a block; afterwards
the one after the last committed row becomes the request's (`glue/step/recurrent_states.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.glue import compat, seams

# layers of these kinds have been tested; others would be advanced by other code of SGLang
SERVED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def recurrent_config(config: Any) -> Any:
    """Return the config of a target's recurrent layers; None if it has none. SGLang decides, from
    the target's config alone."""
    asked = SimpleNamespace(
        hf_config=config,
        is_draft_model=False,
        linear_attn_registry_result=compat.get_linear_attn_config(config),
    )
    return compat.mambaish_config(asked)


def refuse_unknown_states(config: Any, *, name: str) -> None:
    """Raise ValueError for a target with recurrent layers that are not known to be rolled back to
    the accepted tokens."""
    found = recurrent_config(config)
    if found is None or found.model_type in SERVED:
        return
    raise ValueError(
        f"The target {name} ({', '.join(config.architectures)}) has linear-attention or Mamba "
        f"layers ({type(found).__name__}), and rolling their state back to the accepted tokens has "
        f"not been tested; of such targets, sglang_dflash serves {', '.join(SERVED)}. Serve it "
        "without --speculative-algorithm DFLASH, or set SGLANG_DFLASH=off to use SGLang's own "
        "DFLASH."
    )


def refuse_release(config: Any, *, name: str) -> None:
    """Raise ValueError for a target with recurrent layers and a release that would snapshot states
    of other requests while blocks are verified."""
    if recurrent_config(config) is not None and not seams.chooses_snapshots:
        raise ValueError(
            f"The target {name} ({', '.join(config.architectures)}) has linear-attention layers, "
            "and the installed SGLang does not choose the snapshots of their states for verify "
            "passes. Install the newest SGLang that sglang_dflash serves (README.md), or serve the "
            "target without --speculative-algorithm DFLASH."
        )


def refuse_other_states(server_args: Any, model_config: Any) -> None:
    """Raise ValueError for arguments with which the states of a target with recurrent layers would
    be kept, moved or rounded otherwise."""
    if recurrent_config(model_config.hf_config) is None:
        return
    asked = {
        "--enable-linear-replayssm, which keeps recent tokens instead of states": (
            server_args.enable_linear_replayssm
        ),
        "--enable-linear-replayssm-spec, which keeps recent tokens instead of states": (
            server_args.enable_linear_replayssm_spec
        ),
        f"--disaggregation-mode {server_args.disaggregation_mode}, which is not tested to transfer "
        "their states": server_args.disaggregation_mode != "null",
    }
    named = [name for name, given in asked.items() if given]
    if named:
        raise ValueError(
            f"With a target that has linear-attention layers, DFLASH does not support "
            f"{', '.join(named)}. Drop it, or serve without --speculative-algorithm DFLASH."
        )
    kept, dtype = compat.mamba_state_dtype(None).conv, model_config.dtype
    if torch.promote_types(kept, dtype) != kept:
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"SGLang would round the inputs of this target's convolutions from {wanted} to "
            f"{str(kept).removeprefix('torch.')} between steps, but not within a block, so its "
            f"answers would differ from plain decoding. Set SGLANG_MAMBA_CONV_DTYPE={wanted}, or "
            "pass --dtype bfloat16."
        )
