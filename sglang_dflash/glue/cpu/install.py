"""The plug-in's changes to SGLang in CPU mode."""

from __future__ import annotations

import functools
import multiprocessing
import os
from typing import Any

from sglang_dflash.environment import Environment
from sglang_dflash.glue import changes, seams
from sglang_dflash.glue.changes import Hook


def install_if_cpu() -> None:
    """In CPU mode, install attention, GEMMs, experts, norms and sampling, lift checks, and adapt
    streams, devices, child processes and threads."""
    if not Environment().is_cpu_mode:
        return
    from sglang_dflash.glue.cpu import (
        experts,
        linear_attention,
        norms,
        products,
        quantised,
        sampling,
    )
    from sglang_dflash.glue.cpu.attention import CpuAttention

    attention = changes.register(
        "register_attention_backend",
        "torch_native",
        why="SGLang's own backend does not support draft blocks",
    )
    attention(CpuAttention)
    experts.install()
    if seams.chooses_snapshots:
        # otherwise such targets are refused
        linear_attention.install()
    norms.install()
    products.install()
    quantised.install()
    sampling.install()
    _stub_record_stream()
    _default_to_the_cpu()
    changes.attach(
        {
            "model_specific_adjustments": Hook(
                _accept_torch_native, "lets Gemma 4 use an attention backend that needs no GPU"
            ),
            "update_intermediate_size": Hook(
                _skip_absent_size, "skips padding a size that the model does not have"
            ),
            "set_envs_and_config": Hook(_fork_children, "child processes inherit imported modules"),
            "init_cpu_threads": Hook(_leave_threads_alone, "leaves thread placement to OpenMP"),
            "find_nccl_library": Hook(_find_no_nccl, "ranks on a CPU communicate without NCCL"),
        }
    )


def _stub_record_stream() -> None:
    """Make `record_stream` a no-op, like torch's CPU streams: CPU tensors reject it."""
    import torch

    changes.replace(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: None,
        why="CPU tensors have no streams",
    )


def _default_to_the_cpu() -> None:
    """Let code that names no device synchronise the CPU: a CUDA build of torch would look for a
    driver, and a server that finds none ends."""
    import torch

    of_device = torch.get_device_module

    # cached as torch's own is: its compiler looks behind the cache
    @functools.cache
    def or_of_cpu(device: Any = None) -> Any:
        return of_device("cpu" if device is None else device)

    changes.replace(
        torch,
        "get_device_module",
        or_of_cpu,
        why="there is no other device, whatever torch was built for",
    )


def _fork_children(original: Any, server_args: Any) -> None:
    """Fork SGLang's processes, so that they inherit imports: a spawned one takes ten seconds.

    Only while there is one thread, as with OMP_NUM_THREADS=1: a fork loses all other threads.
    """
    original(server_args)
    if len(os.listdir("/proc/self/task")) == 1:
        multiprocessing.set_start_method("fork", force=True)


def _leave_threads_alone(_original: Any, **_settings: Any) -> None:
    """Let OpenMP place its threads, as SGLang does on most CPUs: on Arm it would call a kernel
    that the package index has no build of."""


def _find_no_nccl(_original: Any) -> str:
    """Raise, as without CUDA: a CUDA build of torch brings the library, but there is no device."""
    raise ValueError("there is no NCCL on a CPU")


def _accept_torch_native(original: Any, server_args: Any) -> None:
    """Let Gemma 4 pass its backend check, which lists GPU backends only."""
    owner, name = seams.backends_for_model_checks(server_args)
    resolved = getattr(owner, name)

    def as_triton(*given: Any) -> tuple[str, ...]:
        return tuple("triton" if name == "torch_native" else name for name in resolved(*given))

    why = "passes a check that lists GPU backends only"
    with changes.replaced(owner, name, as_triton, why=why):
        original(server_args)


def _skip_absent_size(
    original: Any, model_config: Any, attr_name: str, intermediate_padding_size: int
) -> Any:
    """Skip a size that the model does not have (dense Gemma 4: moe_intermediate_size). Also called
    with the config of a vision tower itself."""
    whole = getattr(model_config, "hf_config", model_config)
    for config in (whole, getattr(whole, "text_config", None)):
        if config is not None and getattr(config, attr_name, 0) is None:
            return model_config
    return original(model_config, attr_name, intermediate_padding_size)
