"""What a run says of an engine that died."""

import pytest

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
