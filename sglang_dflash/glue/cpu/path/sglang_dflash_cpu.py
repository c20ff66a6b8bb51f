"""Put this Python process into CPU mode, the effect of having this folder on its path.

SGLang's CPU mode is turned on, and any GPU is hidden, because the stand-ins in this folder could
not serve it. `SGLANG_USE_CPU_ENGINE=0` takes the folder off the path instead.

This also makes the published torchvision importable with a CPU build of torch. Its compiled
extension needs CUDA and stays unloaded, which it tolerates, but it registers fake kernels for
operators that then do not exist. They are declared just before the import. So are the operators
that SGLang's models with linear attention look for when they are imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from typing import Any

MODE = "SGLANG_USE_CPU_ENGINE"
OPERATORS = ("nms", "qnms")


class DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    library: Any = None  # must outlive the import

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                kind = type(self)
                kind.library = torch.library.Library("torchvision", "FRAGMENT")
                for op in OPERATORS:
                    kind.library.define(f"{op}(Tensor dets, Tensor scores, float iou) -> Tensor")


class DeclareKernels(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "sglang.srt.layers":
            sys.meta_path.remove(self)
            importlib.import_module("sgl_kernel.torch_ops")


if os.environ.setdefault(MODE, "1") == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.meta_path[:0] = [DeclareTorchvisionOperators(), DeclareKernels()]
else:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
