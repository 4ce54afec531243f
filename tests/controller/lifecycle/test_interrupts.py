"""Interrupts wait where a run could not go on from, and nowhere else."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import pytest

from controller.lifecycle.interrupts import SIGNALS, Interrupts, handlers_kept


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Whatever started the tests may have them ignored: nohup SIGHUP, a shell's background job SIGINT."""
    before = {
        number: signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGHUP, signal.SIGTERM)
    }
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_stops_at_once_unless_held(number: signal.Signals) -> None:
    with Interrupts(print), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_a_held_interrupt_waits_for_the_release_and_is_said_once() -> None:
    said: SimpleQueue[str] = SimpleQueue()
    with Interrupts(said.put) as interrupts:
        interrupts.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        assert said.get(timeout=30).startswith("stopping")
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()
        interrupts.hold()
        interrupts.release()  # it came once
    assert said.empty()


def test_one_that_comes_while_a_line_is_logged_waits_for_its_end() -> None:
    lock, entered = threading.Lock(), list[bool]()
    with Interrupts(lambda line: entered.append(lock.acquire(timeout=5))) as interrupts:
        interrupts.hold()
        with lock:  # as the log of a run holds its own
            os.kill(os.getpid(), signal.SIGINT)
    assert entered == [True]


def test_one_that_is_lost_on_its_way_comes_again_before_the_next_update() -> None:
    """As where it is raised in a destructor, which Python only reports."""
    with Interrupts(print) as interrupts:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.hold()
        assert not interrupts.held


def test_a_second_one_stops_at_once_and_says_that_the_step_is_torn() -> None:
    with Interrupts(lambda text: None) as interrupts:
        interrupts.hold()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.held


def test_a_closed_terminal_is_ignored_where_the_process_was_told_to() -> None:
    """As `nohup` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(print):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_call_leaves_the_handlers_as_they_were_and_none_is_touched_in_another_thread() -> (
    None
):
    def mine(*_: object) -> None:
        pass

    def call() -> None:
        with handlers_kept():
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ray.init sets its own

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Interrupts(print):
            assert signal.getsignal(signal.SIGTERM) is not mine
        call()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
