"""Shared by the tests of workers and training engine: one pool of processes."""

from collections.abc import Iterator

import pytest

from tests.workers.model.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four gloo ranks that run functions: `ranks.run(function, 2, *arguments)`."""
    pool = RankPool()
    yield pool
    pool.stop()
