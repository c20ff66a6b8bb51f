"""The attention backends of SGLang that can run a drafter, and which one a server uses by default.

A drafter reads its KV from pages, and its full_attention layers have no causal mask within a block.
Not every backend can do both on every card.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sglang_dflash.config import NON_CAUSAL_SLIDING, DrafterSpec
from sglang_dflash.drafter_config import SLIDING, SUPPORTED_LAYER_TYPES

ALL_KINDS = (*SUPPORTED_LAYER_TYPES, NON_CAUSAL_SLIDING)


@dataclass(frozen=True)
class Backend:
    """What a backend can run a drafter with."""

    kinds: tuple[str, ...] = ALL_KINDS  # of attention
    majors: tuple[int, ...] | None = None  # of the compute capability; None for any
    runs_fp32: bool = False
    # KV in FP8, though the target's may be in another type
    reads_fp8: bool = False


# in order of preference. FA4 is the fastest where it was measured, on Hopper. SGLang 0.5.17's has
# no paged KV on 8.x and 12.x. Triton compiles for any card and plans on the GPU, FlashInfer on the
# host. FA3 on 8.x was never run with a drafter, so Triton comes before it, but it may be asked for
CUDA = {
    "fa4": Backend(majors=(9, 10)),
    "triton": Backend(runs_fp32=True, reads_fp8=True),
    "fa3": Backend(majors=(8, 9)),
    "flashinfer": Backend(SUPPORTED_LAYER_TYPES),
    "trtllm_mha": Backend((SLIDING,), majors=(9, 10, 12)),
}
BY_DEVICE: Mapping[str, Mapping[str, Backend]] = {
    "cuda": CUDA,
    "cpu": {"torch_native": Backend(runs_fp32=True)},
}


@dataclass(frozen=True)
class Place:
    """Where a drafter runs."""

    device: str
    capability: tuple[int, int] | None  # None on a CPU
    is_fp32: bool
    kv_dtype: str | None = None  # asked for, for the drafter alone

    @property
    def has_fp8_kv(self) -> bool:
        return (self.kv_dtype or "").startswith("fp8")

    def __str__(self) -> str:
        parts = [self.device]
        if self.capability is not None:
            parts.append("compute capability {}.{}".format(*self.capability))
        parts += ["fp32"] if self.is_fp32 else []
        parts += [f"draft KV in {self.kv_dtype}"] if self.has_fp8_kv else []
        return ", ".join(parts)


def able_backends(kinds: Collection[str], place: Place) -> list[str]:
    """Return the backends that can run these kinds of attention there, the default first."""
    return [
        name
        for name, backend in BY_DEVICE[place.device].items()
        if set(kinds) <= set(backend.kinds)
        and (backend.runs_fp32 or not place.is_fp32)
        and (backend.reads_fp8 or not place.has_fp8_kv)
        and (
            place.capability is None
            or backend.majors is None
            or place.capability[0] in backend.majors
        )
    ]


def choose_draft_backend(drafter: DrafterSpec, place: Place, *, asked: str | None) -> str:
    """Return the backend that was asked for, if it can run the drafter, or the default."""
    able = able_backends(drafter.attention_kinds(), place)
    if asked is None:
        return able[0]
    if asked not in able:
        raise ValueError(
            f"The draft attention backend {asked} cannot run the drafter {drafter.name} on {place} "
            f"(layers: {', '.join(sorted(drafter.attention_kinds()))}). "
            f"Pass --speculative-draft-attention-backend {' or '.join(able)}, or drop it for "
            f"{able[0]}."
        )
    return asked
