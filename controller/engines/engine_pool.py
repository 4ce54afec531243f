"""EnginePool: requests through all engines, in rounds or continuously.

    submit -> Router --assign--> engine streams --(block reference, results)--> on_results
                 ^                     |
                 +-- failed, or engine lost: continued from PartialResponses

The driver reads light results and holds references to blocks. A lost engine's requests go to the other
engines at once, and to its replacement once it has the current weights (`controller.engines.engine_calls`).
`pump` serves several generations at a time, such as training's and a validation's.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from controller.engines.engine_calls import MakeActor, RolloutEngines
from controller.engines.fleet import Fleet, RestartBudget
from controller.engines.router import Router
from controller.observability.live_metrics import LiveMetrics
from workers.config.roles import RolloutConfig, SamplingConfig
from workers.engine.requests import Response, SampleRequest, SampleResult
from workers.engine.session_record import SessionRecord

LOOK_SECONDS = 5.0  # between two looks at an engine
ANSWER_SECONDS = 5.0


Partial = Response | SessionRecord


class PartialResponses:
    """Snapshots of the engines' unfinished responses and sessions, in the object store."""

    def __init__(self) -> None:
        self._asked: dict[int, ray.ObjectRef] = {}
        self._known: dict[int, ray.ObjectRef] = {}
        self._looked = time.monotonic()

    def look(self, actors: Mapping[int, Any]) -> None:
        """Ask these engines for a snapshot if it is due, without waiting for it."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for replica, ref in list(self._asked.items()):
            if ray.wait([ref], timeout=0, fetch_local=False)[0]:
                self._known[replica] = self._asked.pop(replica)
        for replica in actors.keys() - self._asked.keys():
            self._asked[replica] = actors[replica].partial_responses.remote()

    def last(self, replica: int) -> dict[int, Partial]:
        """Remove and return a lost engine's snapshot, by attempt."""
        refs = [self._known.pop(replica, None), self._asked.pop(replica, None)]
        return _read([ref for ref in refs if ref is not None], timeout_s=0.1)


def _read(refs: list[ray.ObjectRef], timeout_s: float) -> dict[int, Partial]:
    partials: dict[int, Partial] = {}
    if refs:
        for ref in ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]:
            # The engine died or its node is gone, so its responses start again.
            with suppress(RayError):
                partials |= ray.get(ref)
    return partials


Sample = tuple[SampleResult, ray.ObjectRef]
"""A finished sample: its tokens are row `result.row` of the DataProto."""
OnResults = Callable[[list[SampleResult], ray.ObjectRef], None]


@dataclass
class Generation:
    """Requests with one kind of sampling. on_results: called with finished samples and their block. streams:
    replicas by ObjectRefGenerator.
    """

    router: Router
    sampling: SamplingConfig
    on_results: OnResults
    streams: dict[Any, int] = field(default_factory=dict)

    def receive(
        self, replica: int, block: ray.ObjectRef, results: Sequence[SampleResult]
    ) -> list[SampleRequest]:
        """Handle a replica's results, and return their requests. Each successful result has a row in the
        block.
        """
        requests = [
            (self.router.retry_or_drop if result.failed else self.router.finish)(
                replica, result
            )
            for result in results
        ]
        if finished := [result for result in results if not result.failed]:
            self.on_results(finished, block)
        return requests


class EnginePool(RolloutEngines):
    """The engines of a run, and generation over them."""

    def __init__(
        self,
        make: MakeActor,
        config: RolloutConfig,
        budget: RestartBudget | None = None,
        live: LiveMetrics | None = None,
        front: Any = None,
        **options: Any,
    ) -> None:
        """make, options: see `RolloutEngines`. budget: None allows no restart. front: actor of
        `SessionFront`.
        """
        self._config = config
        self._live = live or LiveMetrics()
        self._front = front
        self.catch_up: Callable[[], None] = lambda: None
        """Brings the current weights to replacements, if no engine is left that has them."""
        self._generations: list[Generation] = []
        self._request_attempts = itertools.count()
        self._partial = PartialResponses()
        self._pumped = time.monotonic()
        self._idle_s = 0.0
        engines = config.engine_range
        fleet = Fleet(
            engines.minimum,
            budget or RestartBudget(0),
            self._live.engine_state,
            absent=engines.maximum - engines.minimum,
        )
        super().__init__(make, config, fleet, **options)

    def begin(self, sampling: SamplingConfig, on_results: OnResults) -> Generation:
        """Start a generation: submit requests to its router at any time, and call `pump`."""
        router = Router(
            self.fleet.size,
            self._config.max_concurrent,
            self._config.max_retries,
            self._request_attempts,
        )
        self._generations.append(Generation(router, sampling, on_results))
        return self._generations[-1]

    def adjust(self) -> None:
        """Add engines that a range allows, between steps. A fixed number stays."""

    def end(self, generation: Generation) -> None:
        self._generations.remove(generation)
        self._export_queues()

    def pump(self, timeout_s: float = 0.0) -> bool:
        """Assign waiting requests, and read from one stream. Returns whether one had results in time.

        Without engines, generation waits for a replacement. Raises as `lose`.
        """
        self.check_deadlines(self._busy())
        # Without a time the ranks may be computing.
        if timeout_s and self.queued and self.waits_for_weights:
            self.catch_up()
        self._partial.look(
            {
                replica: self.actors[replica]
                for replica in self._busy() & set(self.fleet.serving)
            }
        )
        for generation in self._generations:
            self._open_streams(generation)
        self._export_queues()
        self._count_idle()
        owners = {
            stream: generation
            for generation in self._generations
            for stream in generation.streams
        }
        if not owners and self.queued:
            self.check_any_will_serve()
        # One stream at a time, so that capacity it frees is assigned again at once.
        stream = self.wait(list(owners), timeout_s)
        if stream is not None:
            self._read(owners[stream], stream)
        return stream is not None

    def pump_all(self, timeout_s: float = 0.0) -> None:
        """Pump until nothing has arrived. Waits up to `timeout_s` for the first results."""
        if self.pump(timeout_s):
            while self.pump():
                pass

    def on_lost(self, replica: int) -> None:
        """Queue the replica's unfinished requests again, with their responses so far."""
        partials = self._partial.last(replica)
        for generation in self._generations:
            streams = generation.streams.items()
            generation.streams = {
                stream: owner for stream, owner in streams if owner != replica
            }
            generation.router.replica_lost(replica, partials)

    def partial_responses(self) -> dict[int, Partial]:
        """Return unfinished responses and sessions by attempt, from engines that answer in time."""
        refs = [
            self.actors[replica].partial_responses.remote()
            for replica in self.fleet.serving
        ]
        return _read(refs, timeout_s=ANSWER_SECONDS)

    @property
    def queued(self) -> int:
        return sum(generation.router.waiting for generation in self._generations)

    def take_idle_seconds(self) -> float:
        """Return seconds without requests since the last call, mean over engines."""
        self._count_idle()
        idle = self._idle_s
        self._idle_s = 0.0
        return idle

    def _busy(self) -> set[int]:
        return {
            replica
            for generation in self._generations
            for replica in generation.streams.values()
        }

    def _count_idle(self) -> None:
        now = time.monotonic()
        last_pump = self._pumped
        if self.actors:
            self._idle_s += (now - last_pump) * (1 - len(self._busy()) / len(self.actors))
        self._pumped = now

    def _open_streams(self, generation: Generation) -> None:
        for replica, requests in generation.router.assign(self.fleet.serving).items():
            generate = self.actors[replica].generate.options(num_returns="streaming")
            generation.streams[generate.remote(requests, generation.sampling)] = replica
            self.note_progress(replica)

    def _export_queues(self) -> None:
        routers = [generation.router for generation in self._generations]
        outstanding = []
        for replica in range(self.fleet.size):
            outstanding.append(sum(router.outstanding(replica) for router in routers))
        self._live.queues(self.queued, outstanding)

    def _read(self, generation: Generation, stream: Any) -> None:
        replica = generation.streams[stream]
        try:
            pair = _next_pair(stream)
        except RayError as error:
            self.lose(replica, error)
            return
        if pair is None:
            del generation.streams[stream]
            return
        self.note_progress(replica)
        if any(not result.failed for result in pair[1]):
            self.fleet.mark_finished_samples(replica)
        requests = generation.receive(replica, *pair)
        if self._front is not None:
            self._front.forget.remote([request.session for request in requests])


def _next_pair(stream: Any) -> tuple[ray.ObjectRef, list[SampleResult]] | None:
    block = next(stream, None)
    if block is None:
        return None
    results = next(stream, None)
    if results is None:  # Ray yields an error as the last object, in place of the block
        ray.get(block)
    return block, ray.get(results)
