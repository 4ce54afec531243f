"""Rollouts: rounds of generation over all engines, and new weights for them.

    requests -> Router --assign--> engine streams --(block reference, results)--> on_results, RolloutRound
                   ^                     |
                   +-- failed, engine lost

The driver reads the light results; of the blocks it holds references only. A lost engine's requests go to the others at
once, and to the one that is started in its place when it has the current weights (`controller.generation.engines`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from controller.generation.engines import MakeActor, RolloutEngines
from controller.generation.fleet import Fleet, RestartBudget
from controller.generation.router import Key, Router
from controller.observability.live_metrics import LiveMetrics
from workers.config import RolloutConfig, SamplingConfig
from workers.rollout.requests import SampleRequest, SampleResult

OnResults = Callable[[list[SampleResult], ray.ObjectRef], None]


@dataclass(frozen=True)
class RolloutRound:
    """The result of one round.

    results: finished samples in the order in which they were requested; blocks: for each, the reference of the
    TokenBlock that holds its row. dropped: the last failure of every dropped sample; retried: number of retries.
    """

    results: list[SampleResult]
    blocks: list[ray.ObjectRef]
    dropped: list[SampleResult]
    retried: int


@dataclass
class _Progress:
    """A running round: its open streams and their results so far."""

    router: Router
    streams: dict[Any, int] = field(default_factory=dict)  # ObjectRefGenerator -> replica
    found: dict[Key, tuple[SampleResult, ray.ObjectRef]] = field(default_factory=dict)

    def lost(self, replica: int) -> None:
        """Close the replica's streams; its unfinished requests go back to the queue."""
        self.streams = {stream: owner for stream, owner in self.streams.items() if owner != replica}
        self.router.replica_lost(replica)


class Rollouts(RolloutEngines):
    """The engines of a run, and rounds of generation over them."""

    def __init__(
        self,
        make: MakeActor,
        config: RolloutConfig,
        budget: RestartBudget | None = None,
        live: LiveMetrics | None = None,
        **options: Any,
    ) -> None:
        """make, options: see `RolloutEngines`. budget: None allows no restart. live: exports the engines' states and
        queues."""
        self._config, self._live = config, live or LiveMetrics()
        fleet = Fleet(config.replicas, budget or RestartBudget(0), self._live.engine_state)
        super().__init__(make, config, fleet, **options)

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, on_results: OnResults | None = None
    ) -> RolloutRound:
        """Sample every request; `on_results` is called with finished samples and their block as they come.

        With no engine left, the round waits for a replacement. Raises RolloutError, the cause first, when
        run.max_restarts are used up, and LostError if a lost engine cannot be replaced alone.
        """
        progress = _Progress(Router(len(self.actors), self._config.max_concurrent, self._config.max_retries))
        progress.router.submit(requests)
        while not progress.router.done:
            self.check_deadlines(set(progress.streams.values()))
            for replica in self.pop_lost():
                progress.lost(replica)
            self._open_streams(progress, sampling)
            self._export_queues(progress.router)
            if not progress.streams:
                self.check_any_will_serve()
            # One stream at a time, so that capacity it frees is assigned again at once.
            stream = self.wait(list(progress.streams))
            if stream is not None:
                self._read(progress, stream, on_results)
        self._export_queues(progress.router)
        return _round(requests, progress)

    def _open_streams(self, progress: _Progress, sampling: SamplingConfig) -> None:
        for replica, requests in progress.router.assign(self.fleet.serving).items():
            generate = self.actors[replica].generate.options(num_returns="streaming")
            progress.streams[generate.remote(requests, sampling)] = replica
            self.progressed(replica)

    def _export_queues(self, router: Router) -> None:
        self._live.queues(router.waiting, [router.outstanding(replica) for replica in range(len(self.actors))])

    def _read(self, progress: _Progress, stream: Any, on_results: OnResults | None) -> None:
        """Read one block and its results from a stream that is ready, or close it at its end."""
        replica = progress.streams[stream]
        try:
            pair = _next_pair(stream)
        except RayError as error:
            self.lose(replica, error)
            return
        if pair is None:
            del progress.streams[stream]
            return
        self.progressed(replica)
        block, results = pair
        finished = [result for result in results if not result.failed]
        for result in finished:
            progress.router.finished(replica, result)
            progress.found[result.key] = result, block
        for result in results:
            if result.failed:
                progress.router.failed(replica, result)
        if finished and on_results is not None:
            on_results(finished, block)


def _next_pair(stream: Any) -> tuple[ray.ObjectRef, list[SampleResult]] | None:
    """Reference and results of the next block, or None at the end. Raises the error that broke the stream."""
    block = next(stream, None)
    if block is None:
        return None
    results = next(stream, None)
    if results is None:  # Ray yields an error as the last object, here in the place of the block
        ray.get(block)
    return block, ray.get(results)


def _round(requests: Sequence[SampleRequest], progress: _Progress) -> RolloutRound:
    found = [progress.found[request.key] for request in requests if request.key in progress.found]
    results = [result for result, _ in found]
    blocks = [block for _, block in found]
    return RolloutRound(results, blocks, progress.router.dropped, progress.router.retried)
