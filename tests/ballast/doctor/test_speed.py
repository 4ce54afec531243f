"""Figures of this machine, in the units that they name."""

import re

import torch

from ballast.doctor.report import Status
from ballast.doctor.speed import speed


def test_figures_are_in_their_units() -> None:
    threads = torch.get_num_threads()
    found = speed(cuda=False)
    numbers = re.findall(r"[\d.e+-]+(?= (?:TFLOP|GB|us))", found.text)
    tflops, gigabytes, microseconds = map(float, numbers)
    assert found.status is Status.OK
    assert torch.get_num_threads() == threads
    # A core multiplies at 1 GFLOP/s to 1 TFLOP/s, copies at 0.1 to 1,000 GB/s and calls in 0.1 us to 10 ms.
    assert 1e-3 < tflops < 1
    assert 0.1 < gigabytes < 1000
    assert 0.1 < microseconds < 1e4
