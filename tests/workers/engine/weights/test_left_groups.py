"""A process that waits in a broadcast hears from its actor, in another process, that it must leave."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from workers.engine.weights import left_groups
from workers.engine.weights.left_groups import GroupWatch, last_left_group

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(left_groups.FILE, "")  # so that it is taken back at the end
    return left_groups.prepare_file()


def test_a_process_below_reads_the_newest_group(file: Path) -> None:
    program = (
        "from workers.engine.weights.left_groups import last_left_group as newest;"
        "print(newest(), flush=True); input(); print(newest(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        left_groups.leave(file, 12)
        left_groups.leave(file, 3)
        assert child.communicate("\n")[0] == "3\n"


def test_without_an_actor_no_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(left_groups.FILE)
    assert last_left_group() == 0


@pytest.mark.parametrize("left_before", [True, False])
def test_a_member_leaves_when_it_is_told(file: Path, left_before: bool) -> None:
    aborted = threading.Event()
    if left_before:
        left_groups.leave(file, 2)
    with GroupWatch(2, WAIT_S, aborted.set) as watch:
        if not left_before:
            left_groups.leave(file, 2)
        assert aborted.wait(WAIT_S / 2)
    assert "was lost" in watch.reason


def test_a_member_leaves_after_the_time_out() -> None:
    aborted = threading.Event()
    with GroupWatch(1, 0.01, aborted.set) as watch:
        assert aborted.wait(WAIT_S)
    assert "resources.collective_timeout_s=0.01 s" in watch.reason


def test_a_member_of_a_later_group_stays(file: Path) -> None:
    left_groups.leave(file, 1)
    looks = threading.Semaphore(0)
    aborted = threading.Event()

    def look() -> int:
        looks.release()
        return last_left_group()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_groups, "last_left_group", look)
        with GroupWatch(2, WAIT_S, aborted.set) as watch:
            assert looks.acquire(timeout=WAIT_S) and looks.acquire(timeout=WAIT_S)
    assert not aborted.is_set() and not watch.reason
