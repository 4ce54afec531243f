"""Shared by all tests: one local Ray session, ended with the tests."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray of 8 logical CPUs, without dashboard, for all tests that need actors."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2 * 2**30)
    yield
    ray.shutdown()
