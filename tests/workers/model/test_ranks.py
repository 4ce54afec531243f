"""The pool that the multi-process tests run on must not hide a failure."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers.model.cpu_engine import backward, build_engine
from tests.workers.model.ranks import RankError, RankPool, gloo_loops
from tests.workers.model.tiny import random_sequences, save_tiny_model


def sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no good")
    dist.barrier()


def fault(marks: Path, times: int) -> int:
    """A segmentation fault on rank 1 in the first `times` calls."""
    if dist.get_rank() == 1 and len(list(marks.iterdir())) < times:
        (marks / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return dist.get_rank()


def train(path: str) -> int:
    """One step; process groups' threads before it."""
    known, engine, sequences = gloo_loops(), build_engine(path), random_sequences()
    backward(engine, sequences)
    engine.optimizer_step()
    return known


def test_a_process_keeps_no_threads_of_earlier_calls(tmp_path):
    path, pool = save_tiny_model(tmp_path / "model"), RankPool(size=2)
    assert {loops for _ in range(3) for loops in pool.run(train, 2, path)} == {1}
    pool.stop()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_call_sees_a_group_of_its_own_size(ranks: RankPool, count: int):
    results = ranks.run(sum_of_ranks, count, 10)
    assert [result[:2] for result in results] == [(rank, count) for rank in range(count)]
    assert {int(total) for _, _, total in results} == {sum(range(10, 10 + count))}


def test_a_rank_that_fails_is_named_though_the_others_wait_for_it():
    pool = RankPool(size=2)
    with pytest.raises(RankError, match=r"rank 1 of 2:(.|\n)*ValueError: no good"):
        pool.run(fail_on_rank_one, 2)
    pool.stop()


def test_a_segmentation_fault_is_forgiven_once_and_told(tmp_path):
    pool = RankPool(size=2)
    with pytest.warns(UserWarning, match="segmentation fault"):
        assert pool.run(fault, 2, tmp_path, 1) == [0, 1]
    with (
        pytest.warns(UserWarning),
        pytest.raises(RankError, match=r"rank 1 of 2:\nthe process.* -11"),
    ):
        pool.run(fault, 2, tmp_path, 3)
    pool.stop()
