"""Let torchvision load beside a CPU torch. The registry's build contains operators that need CUDA's
libraries.

Image processors use none of these operators, but torchvision describes two of them at import, and fails where
they are missing. torch calls `install` at the end of its own import (entry point `torch.backends`), in vLLM's
processes too.
"""

import sys
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[Any] = []  # a library's operators end with the object


class _DefineMissingOperators:
    """An import hook: torchvision imports this module after it has loaded the operators, or failed to."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision._meta_registrations":
            import torch

            missing = [o for o in ("nms", "qnms") if not hasattr(torch.ops.torchvision, o)]
            if missing:
                _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
            for operator in missing:
                _libraries[-1].define(operator + _SCHEMA)


def install() -> None:
    """Install the import hook."""
    if _DefineMissingOperators not in sys.meta_path:
        sys.meta_path.insert(0, _DefineMissingOperators)
