"""An engine's process fails far from its actor, and the actor says why."""

import logging
import os
from collections.abc import Iterator

import pytest

from workers.engine.root_cause import (
    FILE,
    ErrorRecorder,
    describe,
    prepare_error_file,
    root_cause,
)

START = (
    "Engine core initialization failed. See root cause above. Failed core proc(s): {codes}"
)
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
WORKER = "WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
PYDANTIC = (
    "1 validation error for ModelConfig\n  Value error, Unknown dtype 'float1' [type=value_error, "
    "input_value=ArgsKwargs(()), input_type=ArgsKwargs]\n    For further information visit https://x"
)


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger that records as vLLM's does in an engine's process."""
    monkeypatch.delenv(FILE, raising=False)
    prepare_error_file()
    recorder = ErrorRecorder(os.environ[FILE])
    logger = logging.getLogger("a process of vLLM")
    logger.addHandler(recorder)
    logger.propagate = False
    yield logger
    logger.removeHandler(recorder)
    os.close(int(os.environ[FILE].rpartition("/")[2]))


def log(logger: logging.Logger, *errors: Exception) -> None:
    for error in errors:
        try:
            raise error
        except Exception:
            logger.exception("EngineCore failed to start.")


@pytest.mark.parametrize(
    ("recorded", "text", "cause"),
    [
        (
            [ValueError("a bad\nfolder")],
            START.format(codes={"EngineCore_DP0": 1}),
            "ValueError: a bad folder",
        ),
        (
            [MemoryError("no room"), Exception(WORKER)],
            START.format(codes={}),
            "MemoryError: no room",
        ),
        ([Exception(WORKER), MemoryError("no room")], DEAD, "MemoryError: no room"),
        ([ValueError(PYDANTIC)], START.format(codes={}), "Unknown dtype 'float1'"),
        (
            [],
            START.format(codes={"EngineCore_DP0": -9}),
            "vLLM's process EngineCore_DP0 was killed by SIGKILL, as when memory is short",
        ),
        (
            [],
            START.format(codes={"EngineCore_DP0": -11}),
            "vLLM's process EngineCore_DP0 was ended by SIGSEGV",
        ),
        ([], START.format(codes={}), f"RuntimeError: {START.format(codes={})}"),
        ([], "CUDA is not available", "RuntimeError: CUDA is not available"),
    ],
)
def test_the_root_cause_is_the_first_error_that_does_not_name_another(
    logger: logging.Logger, recorded: list[Exception], text: str, cause: str
) -> None:
    logger.error("a line without an exception")
    log(logger, *recorded)
    assert root_cause(RuntimeError(text)) == cause


def test_a_cause_in_the_actor_itself_is_the_innermost() -> None:
    outer = RuntimeError(DEAD)
    outer.__cause__ = KeyError("weight")
    assert root_cause(outer) == "KeyError: 'weight'"
    assert describe(AssertionError()) == "AssertionError"
