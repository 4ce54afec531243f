"""Rollouts: rounds of generation over all engines, and new weights for them.

    requests -> Router --assign--> engine streams --(block reference, results)--> on_results, RolloutRound
                   ^                     |
                   +-- failed, engine lost

The driver reads the light results; of the blocks it holds references only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from controller.router import Key, Router
from workers.config import RolloutConfig, SamplingConfig
from workers.errors import RolloutError
from workers.rollout.requests import SampleRequest, SampleResult

OnResults = Callable[[list[SampleResult], ray.ObjectRef], None]
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class RolloutRound:
    """What came of one round.

    results: finished samples in the order in which they were requested; blocks: for each, the reference of the
    TokenBlock that holds its row. dropped: the last failure of every sample that was given up; retried: second tries.
    """

    results: list[SampleResult]
    blocks: list[ray.ObjectRef]
    dropped: list[SampleResult]
    retried: int


@dataclass
class _Progress:
    """A round under way: open streams and what they brought."""

    router: Router
    streams: dict[Any, int] = field(default_factory=dict)  # ObjectRefGenerator -> replica
    found: dict[Key, tuple[SampleResult, ray.ObjectRef]] = field(default_factory=dict)


class Pending:
    """Calls under way on several replicas."""

    def __init__(self, refs: dict[int, ray.ObjectRef], doing: str) -> None:
        self._refs = refs
        self._doing = doing

    def result(self, timeout_s: float | None = None) -> None:
        """Wait for all. Raises RolloutError naming the first replica that failed, or was late, and the cause."""
        for replica, ref in self._refs.items():
            try:
                ray.get(ref, timeout=timeout_s)
            except RayError as error:
                raise RolloutError(f"rollout replica {replica} failed while {self._doing}: {_cause(error)}") from error


class Rollouts:
    """The engines of a run."""

    def __init__(self, actors: Sequence[Any], config: RolloutConfig) -> None:
        """`actors`: handles of `RolloutWorker` actors, numbered by their place in the list."""
        self._actors = dict(enumerate(actors))
        self._config = config
        self._lost: dict[int, Exception] = {}

    @property
    def actors(self) -> list[Any]:
        """Handles of all engines' actors."""
        return list(self._actors.values())

    @property
    def living(self) -> list[int]:
        """Replicas that have not been lost."""
        return [replica for replica in self._actors if replica not in self._lost]

    def start(self) -> Pending:
        """Build all engines; returns at once, `result()` waits."""
        return self._call("start", "starting its engine")

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, on_results: OnResults | None = None
    ) -> RolloutRound:
        """Sample every request; `on_results` is called with finished samples and their block as they come.

        Raises RolloutError if no engine is left to do it.
        """
        router = Router(len(self._actors), self._config.max_concurrent, self._config.max_retries)
        for replica in self._lost:
            router.replica_lost(replica)
        router.submit(requests)
        progress = _Progress(router)
        while not router.done:
            self._check_living(router)
            self._open_streams(progress, sampling)
            # One stream at a time, so that what it frees is given out again at once.
            (stream,), _ = ray.wait(list(progress.streams), num_returns=1, fetch_local=False)
            self._read(progress, stream, on_results)
        return _round(requests, progress)

    def _open_streams(self, progress: _Progress, sampling: SamplingConfig) -> None:
        for replica, requests in progress.router.assign().items():
            generate = self._actors[replica].generate.options(num_returns="streaming")
            progress.streams[generate.remote(requests, sampling)] = replica

    def _read(self, progress: _Progress, stream: Any, on_results: OnResults | None) -> None:
        """Take one block and its results from a stream that has something, or close it."""
        replica = progress.streams[stream]
        try:
            pair = _next_pair(stream)
        except RayError as error:
            self._lose(progress, replica, error)
            return
        if pair is None:
            del progress.streams[stream]
            return
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

    def _lose(self, progress: _Progress, replica: int, error: Exception) -> None:
        """Take the replica out of this run: its requests go to the others. Its actor is ended, if it is not dead."""
        self._lost[replica] = error
        ray.kill(self._actors[replica])
        progress.router.replica_lost(replica)
        progress.streams = {stream: owner for stream, owner in progress.streams.items() if owner != replica}

    def _check_living(self, router: Router) -> None:
        if router.living:
            return
        replica, cause = next(iter(self._lost.items()))
        raise RolloutError(
            f"no rollout engine is left of rollout.replicas={len(self._actors)}; "
            f"replica {replica} was lost: {_cause(cause)}"
        ) from cause

    def update_weights(self, payload: ray.ObjectRef, version: int) -> None:
        """Load `payload`, a reference to packed weights, into every living engine as `version`.

        Raises RolloutError if one could not: it would go on with old weights.
        """
        self._call("update_weights", f"loading weights of version {version}", payload, version).result()

    def sleep(self) -> None:
        """Colocated engines give their GPUs to training."""
        self._call("sleep", "going to sleep").result()

    def wake(self) -> None:
        """Colocated engines take their GPUs back."""
        self._call("wake", "waking up").result()

    def stop(self) -> None:
        """End all engines and actors; never raises for one that is dead already."""
        stopping = [self._actors[replica].stop.remote() for replica in self.living]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
        for actor in self._actors.values():
            ray.kill(actor)

    def _call(self, method: str, doing: str, *arguments: Any) -> Pending:
        return Pending({r: getattr(self._actors[r], method).remote(*arguments) for r in self.living}, doing)


def _next_pair(stream: Any) -> tuple[ray.ObjectRef, list[SampleResult]] | None:
    """The next block's reference and its results, or None at the end. Raises what ended the stream before its end."""
    block = next(stream, None)
    if block is None:
        return None
    results = next(stream, None)
    if results is None:  # Ray hands an error over as the last object, here in the block's place
        ray.get(block)
    return block, ray.get(results)


def _cause(error: Exception) -> str:
    """What the actor raised, without the traceback that Ray puts around it; what Ray says where the actor died."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}"


def _round(requests: Sequence[SampleRequest], progress: _Progress) -> RolloutRound:
    found = [progress.found[request.key] for request in requests if request.key in progress.found]
    results = [result for result, _ in found]
    blocks = [block for _, block in found]
    return RolloutRound(results, blocks, progress.router.dropped, progress.router.retried)
