from threading import Event

import pytest

from controller.lookahead import Lookahead


def test_a_step_that_was_not_begun_is_collected_when_it_is_taken() -> None:
    lookahead = Lookahead(lambda step, position: (step, position))
    lookahead.wait()
    assert lookahead.take(4, 30) == (4, 30)


def test_a_step_is_collected_while_the_caller_does_something_else() -> None:
    training, collected = Event(), []

    def collect(step: int, position: int) -> int:
        assert training.wait(timeout=60)
        collected.append((step, position))
        return position + 1

    lookahead = Lookahead(collect)
    lookahead.begin(2, 10)
    assert collected == []
    training.set()
    lookahead.wait()
    assert collected == [(2, 10)]
    assert lookahead.take(2, 10) == 11
    assert collected == [(2, 10)]
    lookahead.begin(3, 11)
    assert lookahead.take(3, 11) == 12


def test_what_goes_wrong_ahead_is_raised_to_who_waits_for_it() -> None:
    def collect(step: int, position: int) -> None:
        raise RuntimeError(f"no engine is left at step {step}")

    lookahead = Lookahead(collect)
    lookahead.begin(5, 0)
    with pytest.raises(RuntimeError, match="at step 5"):
        lookahead.wait()
    with pytest.raises(RuntimeError, match="at step 5"):
        lookahead.take(5, 0)
