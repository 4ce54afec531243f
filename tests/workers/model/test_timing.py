import time

import pytest
import torch

from balancing.basics.windows import Window
from tests.workers.model.cpu_engine import backward, build_engine
from tests.workers.model.tiny import random_sequences
from workers.model.timing import MicroStepClock


def test_a_micro_step_is_recorded_with_its_tokens_and_its_place_in_time() -> None:
    clock = MicroStepClock(torch.device("cpu"))
    before = time.time()
    with clock.micro_step("update", torch.tensor([3, 5]), [2, 1]):
        time.sleep(0.01)
    with clock.micro_step("update", torch.tensor([], dtype=torch.int64)):
        pass
    after = time.time()
    first, second = clock.take()
    assert (first.name, first.tokens, first.squared_tokens) == ("update", 8, 34)
    assert first.sums == (8, 34, 3, 5)
    assert second.sums == (0, 0, 0, 0)
    assert (
        before - 1e-3 <= first.start <= first.start + first.seconds <= second.start + 1e-6
    )
    assert second.start + second.seconds <= after + 1e-3
    assert first.seconds >= 0.01


def test_squared_tokens_are_those_that_layers_see() -> None:
    clock = MicroStepClock(torch.device("cpu"), (Window(4, 0.5),))
    with clock.micro_step("update", torch.tensor([3, 10])) as step:
        step.leave_out([8])
    squared = 3**2 + 10**2 - 6**2 / 2 - (8**2 - 4**2 / 2)
    assert [found.squared_tokens for found in clock.take()] == [squared]


def test_a_micro_step_is_taken_once_and_not_recorded_if_it_raises() -> None:
    clock = MicroStepClock(torch.device("cpu"))
    assert clock.take() == []
    with clock.micro_step("values", torch.tensor([1])):
        pass
    assert len(clock.take()) == 1
    with pytest.raises(ZeroDivisionError), clock.micro_step("update", torch.tensor([1])):
        raise ZeroDivisionError
    assert clock.take() == []


def test_every_micro_batch_of_every_pass_of_the_engine_is_measured(model) -> None:
    engine = build_engine(model, dtype="float32")
    sequences = random_sequences()
    engine.log_probs(sequences, [(0, 6), (6, 11)])
    backward(engine, sequences, [(0, 3), (3, 11), (0, 0)])
    times = engine.clock.take()
    assert [found.name for found in times] == ["log_probs"] * 2 + ["update"] * 3
    cuts = [(0, 6), (6, 11), (0, 3), (3, 11), (0, 0)]
    assert [found.tokens for found in times] == [
        int(sequences.lengths[start:stop].sum()) for start, stop in cuts
    ]
    squares = sequences.lengths**2
    assert [found.squared_tokens for found in times] == [
        int(squares[start:stop].sum()) for start, stop in cuts
    ]
    assert all(found.seconds > 0 for found in times[:4])
