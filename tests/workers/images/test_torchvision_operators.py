"""torchvision loads beside a CPU torch, in a process that imports nothing of Ballast. Operators that exist
are kept.
"""

import subprocess
import sys

import pytest
import torch

LOAD = """
import torch
{before}
import torchvision
from torchvision.transforms.v2 import functional
picture = torch.arange(192, dtype=torch.uint8).view(3, 8, 8)
print(tuple(functional.resize(picture, [4, 6]).shape), "workers.model" in __import__("sys").modules)
print(str(torch.ops.torchvision.nms.default._schema))
"""
DEFINED = "operators = torch.library.Library('torchvision', 'DEF'); operators.define('nms(Tensor boxes) -> Tensor')"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("before", "schema"),
    [
        ("", "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        pytest.param(
            DEFINED,
            "torchvision::nms(Tensor boxes) -> Tensor",
            marks=pytest.mark.skipif(
                torch.version.cuda is not None, reason="torchvision's own operators load"
            ),
        ),
    ],
)
def test_loads_in_any_process(before: str, schema: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(before=before)], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["(3, 4, 6) False", schema], done.stderr[-2000:]
