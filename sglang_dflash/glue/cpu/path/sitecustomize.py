"""Let the published torchvision import beside a CPU build of torch.

Its compiled half needs CUDA and stays unloaded, which it tolerates, but it registers fake kernels
for operators that then do not exist. Declare the operators just before the import.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")


class DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    library = None  # must outlive the import

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                kind = type(self)
                kind.library = torch.library.Library("torchvision", "FRAGMENT")
                for op in OPERATORS:
                    kind.library.define(f"{op}(Tensor dets, Tensor scores, float iou) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareTorchvisionOperators())
