"""The base of all ranks: its memory, and what Ray's dashboard and logs call it."""

import gc
import subprocess
import sys

import pytest
import torch

from workers.batch.dispatch import RankCoordinates
from workers.roles.base import Worker

TENSORS, MIB = 12, 24
# Makes the tensors and frees them; prints the bytes that the process then has more than before.
PROGRAM = f"""
import psutil
import torch
from workers.roles.base import Worker
from workers.batch.dispatch import RankCoordinates

{{begin}}
resident = lambda: psutil.Process().memory_info().rss
before = resident()
tensors = [torch.ones({MIB} * 2**18) for _ in range({TENSORS})]
del tensors
print(resident() - before)
"""
WORKER = 'Worker("policy", RankCoordinates(index=0, dp=0, cp=0, tp=0, pp=0), 1)'


def kept(begin: str) -> float:
    """Of the tensors' memory, the share that a new process still has after `begin` and the tensors."""
    run = [sys.executable, "-c", PROGRAM.format(begin=begin)]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout) / (
        TENSORS * MIB * 2**20
    )


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
def test_a_rank_keeps_the_memory_of_freed_tensors_to_use_it_again() -> None:
    assert kept(WORKER) > 0.9
    assert kept("") < 0.2  # glibc by itself


def test_the_garbage_collector_does_not_walk_what_a_rank_has_imported() -> None:
    gc.unfreeze()
    imported = len(gc.get_objects())
    try:
        Worker("policy", RankCoordinates(index=0, dp=0, cp=0, tp=0, pp=0), 1)
        assert gc.get_freeze_count() >= imported
        assert len(gc.get_objects()) < imported / 100
    finally:
        gc.unfreeze()


def test_a_training_actor_says_its_role_and_its_place() -> None:
    place = RankCoordinates(index=3, dp=1, cp=1, tp=0, pp=0)
    assert (
        repr(Worker("critic", place, 4, threads=torch.get_num_threads()))
        == "critic dp=1 cp=1"
    )
