"""What a run says is kept in its folder, and Ray's own lines stand there alone."""

import errno
import io
import logging
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

from controller.observability.console import Console
from controller.observability.run_log import RAYS_THREADS, RunLog, rays_logging_in, run_log
from workers.user_code.rewards import RewardFunction, try_rewards


def printed_by(name: str, text: str) -> None:
    thread = threading.Thread(target=print, args=(text,), name=name)
    thread.start()
    thread.join()


def lines(folder: Path) -> list[str]:
    return (folder / "run.log").read_text().splitlines()[1:]


def test_the_log_has_console_actors_and_what_ended_the_run_and_the_terminal_no_line_of_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "very-secret-1")
    console = Console()
    with pytest.raises(RuntimeError), run_log(tmp_path, console):
        console.log("step 1")
        printed_by(RAYS_THREADS[0], "(RewardWorker pid=7) scored")
        printed_by(RAYS_THREADS[1], "\x1b[33m(raylet)\x1b[0m A node died")
        print("of the driver, very-secret-1")
        print("a warning", file=sys.stderr)
        print("10 %\r100 %")
        with console.aside():
            print("a last line of an actor")
        raise RuntimeError("no room")
    with console.aside():
        print("seen without a log")
    told = capsys.readouterr()
    assert (
        told.out
        == "step 1\nof the driver, very-secret-1\n10 %\r100 %\nseen without a log\n"
    )
    assert told.err == "a warning\n"
    assert lines(tmp_path) == [
        "step 1",
        "(RewardWorker pid=7) scored",
        "(raylet) A node died",
        "of the driver, [hidden]",
        "a warning",
        "100 %",
        "a last line of an actor",
        "error: no room",
    ]


def test_a_run_that_goes_on_adds_to_its_log(tmp_path: Path) -> None:
    for step in (1, 2):
        with run_log(tmp_path, console := Console()):
            console.log(f"step {step}")
    heads = [
        line
        for line in (tmp_path / "run.log").read_text().splitlines()
        if line.startswith("=== ")
    ]
    assert len(heads) == 2
    assert lines(tmp_path)[0] == "step 1" and lines(tmp_path)[-1] == "step 2"


def test_what_ray_logs_goes_to_the_log(tmp_path: Path) -> None:
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("ray")
    logger.addHandler(handler)
    try:
        with run_log(tmp_path, console := Console()):
            assert console.kept is not None
            with rays_logging_in(console.kept):
                logger.error("a node is gone")
        assert handler.stream.getvalue() == ""
    finally:
        logger.removeHandler(handler)
    assert "a node is gone" in lines(tmp_path)


def test_a_full_disk_ends_the_log_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    log = RunLog(tmp_path / "run.log")
    monkeypatch.setattr(log, "_file", Full())
    log.write("one\ntwo\n")
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_the_log_has_what_users_code_prints(tmp_path: Path) -> None:
    def talk(response: str) -> float:
        print("scored", response)
        return 1.0

    function = RewardFunction("talk", 1.0, cloudpickle.dumps(talk), ())
    with run_log(tmp_path, Console()):
        try_rewards([function], {}, 20)
    assert lines(tmp_path) == ["scored "]
