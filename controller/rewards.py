"""RewardPool: reward actors that score finished samples while generation goes on.

block of finished samples --submit--> actor --collect--> {(uid, sample): Score}
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from controller.data import Prompt
from workers.errors import ResourceError, WorkerError
from workers.reward import RewardWorker, Score, ScoreRequest
from workers.rollout.requests import SampleResult


class RewardPool:
    """Reward actors that take finished samples in turn."""

    def __init__(
        self, function: Callable[..., Any], columns: Sequence[str], tokenizer_path: str, *, workers: int, cpus: float
    ) -> None:
        """`columns`: what `requested_columns` said that the function takes.

        The function's module is pickled by value, so that actors on other nodes need no copy of its file.
        """
        self._columns = columns
        module = sys.modules[function.__module__]
        if "site-packages" not in (getattr(module, "__file__", None) or "site-packages"):
            ray.cloudpickle.register_pickle_by_value(module)
        actor_class = ray.remote(RewardWorker)
        self._actors = [
            actor_class.options(name=f"reward {i}", num_cpus=cpus).remote(function, tokenizer_path)
            for i in range(workers)
        ]
        self._next = 0
        self._pending: list[tuple[list[SampleResult], ray.ObjectRef]] = []

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every actor is built. Raises ResourceError if they are not within `timeout_s` seconds."""
        ready = [actor.ready.remote() for actor in self._actors]
        try:
            ray.get(ready, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ResourceError(
                f"{len(ready)} reward workers were not up within resources.start_timeout_s={timeout_s:g} s: the "
                "cluster has no room for them, or they hang; lower reward.workers or resources.cpus_per_worker."
            ) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a reward worker could not start: {error}") from error

    def submit(self, results: Sequence[SampleResult], block: ray.ObjectRef, prompts: Mapping[str, Prompt]) -> None:
        """Score the samples of one block on the next actor; returns at once."""
        finished = [result for result in results if result.row >= 0]
        if not finished:
            return
        requests = [
            ScoreRequest(result.row, result.prompt_tokens, self._arguments(prompts[result.uid])) for result in finished
        ]
        actor = self._actors[self._next % len(self._actors)]
        self._next += 1
        self._pending.append((finished, actor.score.options(name="reward.score").remote(block, requests)))

    def collect(self) -> dict[tuple[str, int], Score]:
        """Scores of everything submitted since the last call, by (uid, sample).

        Raises WorkerError, with the remote traceback, if the reward function raised.
        """
        pending, self._pending = self._pending, []
        scores: dict[tuple[str, int], Score] = {}
        for results, ref in pending:
            try:
                block_scores = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise WorkerError(f"the reward function failed: {error}") from error
            scores |= {(r.uid, r.sample): score for r, score in zip(results, block_scores, strict=True)}
        return scores

    def stop(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)

    def _arguments(self, prompt: Prompt) -> dict[str, Any]:
        return {name: prompt.columns[name] for name in self._columns if name in prompt.columns}
