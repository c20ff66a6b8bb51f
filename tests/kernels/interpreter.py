"""Running Triton kernels in tests: compiled on a GPU, interpreted without one.

Triton reads TRITON_INTERPRET when it is first imported, so interpreting needs a separate process:
`hold_in_the_interpreter` reruns a test file with the variable set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def runs_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that launches a kernel: without the interpreter it needs a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


if INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
        """Widen bf16, which the interpreter stores as bits and would multiply as integers."""
        wide = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        ]
        return plain_dot(self, *wide, *rest)

    interpreter.InterpreterBuilder.create_dot = dot

    plain_launch = interpreter.GridExecutor.__call__
    patch_lang = interpreter._patch_lang
    patched: set[int] = set()

    def launch(self, *args, **options):  # type: ignore[no-untyped-def]
        patched.clear()
        return plain_launch(self, *args, **options)

    def patch_once(function):  # type: ignore[no-untyped-def]
        """Patch the language once per module and launch, not at every call of a jitted function,
        where it takes most of the time."""
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            return patch_lang(function)
        return None

    interpreter.GridExecutor.__call__ = launch
    interpreter._patch_lang = patch_once


def hold_in_the_interpreter(test_file: str) -> None:
    """Run a file's kernel tests interpreted. CI has no GPU, so this is its only kernel coverage."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels themselves")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test_file]
    root = Path(test_file).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-2000:]
