"""Samples of requests by a pool of engines, for tests."""

from collections.abc import Sequence

import ray

from controller.engines.engine_calls import POLL_SECONDS
from controller.engines.engine_pool import EnginePool, OnResults, Sample
from controller.engines.router import Key, Router
from workers.config.roles import SamplingConfig
from workers.engine.requests import SampleRequest, SampleResult


def generate(
    pool: EnginePool,
    requests: Sequence[SampleRequest],
    sampling: SamplingConfig,
    on_results: OnResults | None = None,
) -> tuple[list[Sample], Router]:
    """Return finished samples in order, and the router, which knows drops and retries."""
    found: dict[Key, Sample] = {}

    def keep(results: list[SampleResult], block: ray.ObjectRef) -> None:
        found.update({result.key: (result, block) for result in results})
        if on_results is not None:
            on_results(results, block)

    generation = pool.begin(sampling, keep)
    generation.router.submit(requests)
    try:
        while not generation.router.done:
            pool.pump(POLL_SECONDS)
    finally:
        pool.end(generation)
    return [
        found[request.key] for request in requests if request.key in found
    ], generation.router
