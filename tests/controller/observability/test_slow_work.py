"""What lasts says so; no time is asserted: the rhythm is set so that every line comes, or none."""

import threading

from controller.observability.slow_work import count_if_slow, log_if_slow

NEVER = 3600.0


def test_a_block_that_lasts_says_what_it_is_and_for_how_long_until_it_ends() -> None:
    said: list[str] = []
    twice = threading.Event()

    def log(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    with log_if_slow(log, "loading x", delay=0.0, every=0.0):
        twice.wait()
    assert said[0] == "loading x"
    assert said[1] == "loading x, for 0 s so far"
    assert not any(thread.name == "slow work" for thread in threading.enumerate())


def test_what_is_quick_says_nothing() -> None:
    said: list[str] = []
    with log_if_slow(said.append, "loading x", delay=NEVER):
        pass
    assert list(count_if_slow(iter("abc"), "x", said.append, delay=NEVER)) == [
        "a",
        "b",
        "c",
    ]
    assert said == []


def test_items_are_counted_as_they_come() -> None:
    said: list[str] = []
    assert list(
        count_if_slow("ab", "prompts", said.append, total=2, delay=0.0, every=0.0)
    ) == ["a", "b"]
    assert said == [
        "prompts: 1 of 2 after 0 s",
        "prompts: 2 of 2 after 0 s",
        "prompts: 2 in 0 s",
    ]
