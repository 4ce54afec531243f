"""The base of all ranks."""

import subprocess
import sys

import pytest

# Ten rounds of tensors of 160 MiB together; prints the page faults of the last eight.
ROUNDS = """
import resource, torch
from workers.base import Worker
from workers.dispatch import RankCoordinates

{begin}
faults = []
for _ in range(10):
    tensors = [torch.ones(2**22) for _ in range(10)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[1])
"""
WORKER = 'Worker("policy", RankCoordinates(index=0, dp=0, cp=0, tp=0, pp=0), 1)'


def faults(begin: str) -> int:
    run = [sys.executable, "-c", ROUNDS.format(begin=begin)]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
def test_a_rank_uses_the_memory_of_freed_tensors_again() -> None:
    assert faults("") > 1000  # glibc by itself
    assert faults(WORKER) < 100
