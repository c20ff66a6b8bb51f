"""SGLang without a GPU: everything that stands in for what it lacks there, in one folder.

`path/` goes on Python's path (launch/cpu.sh does it, and the environment of `make`) because SGLang
imports those names before it loads plug-ins; it turns CPU mode on. The rest is installed by the
plug-in, in CPU mode only.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any


def is_cpu_mode() -> bool:
    """Tell whether this process was started for a CPU."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def install_if_cpu() -> None:
    """In CPU mode, give SGLang attention, products, experts and sampling; lift two checks."""
    if not is_cpu_mode():
        return
    from sglang_dflash.glue import compat
    from sglang_dflash.glue.cpu import experts, products, sampling
    from sglang_dflash.glue.cpu.attention import CpuAttention
    from sglang_dflash.glue.plugin import attach

    compat.register_attention_backend("torch_native")(CpuAttention)
    experts.install()
    products.install()
    sampling.install()
    _let_tensors_meet_streams()
    attach(
        {
            "model_specific_adjustments": _accept_torch_native,
            "update_intermediate_size": _skip_absent_size,
            "set_envs_and_config": _fork_children,
            "init_cpu_threads": _leave_threads_alone,
        }
    )


def _let_tensors_meet_streams() -> None:
    """torch has streams for a CPU, which do nothing, but its tensors refuse to be seen by one."""
    import torch

    setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)  # noqa: B010


def _fork_children(original: Any, server_args: Any) -> None:
    """Let SGLang's processes inherit what is imported: a spawned one spends ten seconds on it.

    Only while there is one thread, as with OMP_NUM_THREADS=1: others would be missing in a child.
    """
    original(server_args)
    if len(os.listdir("/proc/self/task")) == 1:
        multiprocessing.set_start_method("fork", force=True)


def _leave_threads_alone(_original: Any, **_settings: Any) -> None:
    """Let OpenMP place its threads, as SGLang does on most CPUs: on an Arm one it would call a
    kernel that the package index has no build of."""


def _accept_torch_native(original: Any, server_args: Any) -> None:
    """Let Gemma 4 pass its backend check, which lists GPU backends only."""
    resolved = server_args._resolved_attention_backends

    def as_triton() -> tuple[str, ...]:
        return tuple("triton" if name == "torch_native" else name for name in resolved())

    server_args.__dict__["_resolved_attention_backends"] = as_triton
    try:
        original(server_args)
    finally:
        del server_args.__dict__["_resolved_attention_backends"]


def _skip_absent_size(
    original: Any, model_config: Any, attr_name: str, intermediate_padding_size: int
) -> Any:
    """Leave alone a size that the model does not have (dense Gemma 4: moe_intermediate_size)."""
    for config in (model_config.hf_config, getattr(model_config.hf_config, "text_config", None)):
        if config is not None and getattr(config, attr_name, 0) is None:
            return model_config
    return original(model_config, attr_name, intermediate_padding_size)
