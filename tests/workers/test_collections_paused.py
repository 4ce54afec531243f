"""Nothing is collected in the block, and the collector's state afterwards is that of before."""

import gc
from typing import Any

import pytest

from workers.collections_paused import collections_paused


def count_collections(objects: int) -> int:
    """Return how often the collector ran while this many containers were made."""
    runs: list[str] = []

    def note(phase: str, information: dict[str, Any]) -> None:
        del information
        runs.append(phase)

    gc.callbacks.append(note)
    try:
        containers: list[list[int]] = [[number] for number in range(objects)]
        assert len(containers) == objects
    finally:
        gc.callbacks.remove(note)
    return runs.count("start")


def test_nothing_is_collected_in_the_block() -> None:
    objects = 3 * gc.get_threshold()[0]
    assert count_collections(objects)
    with collections_paused():
        assert count_collections(objects) == 0
    assert count_collections(objects)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_afterwards_as_before_also_after_an_error(
    is_enabled: bool,
) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), collections_paused():
            raise ZeroDivisionError
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
