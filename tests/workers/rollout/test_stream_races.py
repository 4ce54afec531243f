"""The stand-in for streams, where threads that receive work beside the one that is watched."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.workers.rollout.stream_races import StreamRaces

OPERATORS = 50
TENSORS = 100


@pytest.fixture
def threads_that_switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_that_switch_often")
def test_other_threads_record_streams_while_operators_are_watched() -> None:
    """A transfer's receivers did so, and its sender failed with "Set changed size during iteration"."""
    races = StreamRaces()
    tensors = [torch.zeros(1) for _ in range(TENSORS)]
    ended = threading.Event()

    def record() -> None:
        while not ended.is_set():
            stream = races.new_stream()
            for tensor in tensors:
                races.record_stream(tensor, stream)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        with races:
            total = torch.zeros(1)
            for _ in range(OPERATORS):
                total = total + 1
    finally:
        ended.set()
        thread.join()
    assert total.item() == OPERATORS
    assert races.races == []
