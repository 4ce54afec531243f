"""What a run says of an engine that died."""

from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout import tiny
from tests.workers.rollout.engines import Engines
from workers.errors import RolloutError
from workers.rollout.engine_life import describe_death


def raise_from(cause: Exception) -> Exception:
    """Return an error with `cause`, which has been raised."""
    try:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError from error
    except RuntimeError as death:
        return death


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (ValueError("no such kernel"), "ValueError: no such kernel"),
        (AssertionError(), "AssertionError: raise cause (test_engine_life.py, line "),
    ],
)
def test_a_death_is_described_by_its_cause(cause: Exception, expected: str) -> None:
    """An assertion of a library has no text of its own, so its line is shown."""
    assert describe_death(raise_from(cause)).startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "weights", "cause"),
    [
        ({"engine": {"num_gpu_blocks_override": 10**9}}, True, "can't allocate memory"),
        ({}, False, "Cannot find any model weights"),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    ray_session: None, tmp_path: Path, settings: dict[str, Any], weights: bool, cause: str
) -> None:
    """The engine is a process of its own, as on GPUs, where vLLM only says "See root cause above"."""
    model = tiny.save_model(tmp_path / "model")
    if not weights:
        (model / "model.safetensors").unlink()
    with pytest.raises(
        RolloutError, match=f"replica 0 failed while starting its engine: .*{cause}"
    ):
        Engines(model, variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, **settings)
