"""RewardPool: reward actors that score finished samples while others are generated.

begin --> Scoring: block of finished samples --submit--> actor --collect, ready--> {(uid, sample): Score}
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import ray

from controller.config.sections import RewardConfig
from controller.data.prompts import Prompt
from controller.engines.engine_calls import cause_of
from workers.batch.placed_images import Placed
from workers.batch.remote_batch import store_images
from workers.batch.score import TOOL_PARTS, Score, add_environment, check_parts
from workers.engine.requests import SampleResult
from workers.errors import LostError, ResourceError, WorkerError
from workers.roles.reward import RewardWorker, ScoreRequest, texts_of
from workers.roles.text_decoder import serialize
from workers.user_code.rewards import MESSAGES, RewardFunction

# Scoring is stateless and blocks outlive the actor: Ray may restart the actor and retry the call.
AGAIN = {"max_restarts": 3, "max_task_retries": 3}


class RewardPool:
    def __init__(
        self,
        functions: Sequence[RewardFunction],
        tokenizer_path: str,
        config: RewardConfig,
        cpus: float,
        *,
        with_environment: bool = False,
        image_key: str = "",
        name: str = "reward",
    ) -> None:
        """with_environment: whether an environment adds its reward to that of the functions. image_key:
        column in which functions get images. name: of its actors.
        """
        self._columns = sorted(
            {name for function in functions for name in function.columns}
        )
        self._on_failure = config.on_failure
        self._adds = with_environment and bool(functions)
        self._image_key = image_key if image_key in self._columns else ""
        self._tokenizer_path = tokenizer_path
        backend = serialize(self._tokenizer) if config.workers else ""
        actor_class = ray.remote(RewardWorker)
        self._actors = [
            actor_class.options(name=f"{name} {i}", num_cpus=cpus, **AGAIN).remote(
                list(functions),
                tokenizer_path,
                timeout_s=config.timeout_s,
                concurrency=config.concurrency,
                backend=backend,
            )
            for i in range(config.workers)
        ]
        self._next = 0

    def wait_ready(self, timeout_s: float) -> None:
        ready = [actor.ready.remote() for actor in self._actors]
        try:
            ray.get(ready, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ResourceError(
                f"{len(ready)} reward workers were not up within resources.start_timeout_s={timeout_s:g} s: "
                "the cluster has no room for them, or they hang. Lower reward.workers or "
                "resources.cpus_per_worker."
            ) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a reward worker could not start: {error}") from error

    def begin(self, *, texts: bool = True) -> "Scoring":
        return Scoring(self, texts)

    def score(
        self,
        results: Sequence[SampleResult],
        block: ray.ObjectRef,
        prompts: Mapping[str, Prompt],
        texts: bool,
    ) -> ray.ObjectRef:
        """Score samples that have a row in the block, on the next actor, and return a reference to a list of
        Score.
        """
        requests = [self._request(result, prompts[result.uid], texts) for result in results]
        actor = self._actors[self._next % len(self._actors)]
        self._next += 1
        return actor.score.options(name="reward.score").remote(block, requests)

    def _request(self, result: SampleResult, prompt: Prompt, texts: bool) -> ScoreRequest:
        columns = prompt.columns | ({MESSAGES: result.messages} if result.messages else {})
        return ScoreRequest(
            result.row,
            result.prompt_tokens,
            {name: columns[name] for name in self._columns if name in columns},
            _images_of(prompt, result) if self._image_key else (),
            self._image_key,
            texts,
        )

    def read(
        self, places: Sequence[tuple[ray.ObjectRef, int, int]]
    ) -> list[dict[str, Any]]:
        """Decode samples whose texts were left out: the block, row and prompt tokens of each."""
        refs = list(dict.fromkeys(block for block, _, _ in places))
        try:
            blocks = dict(zip(refs, ray.get(refs), strict=True))
        except ray.exceptions.RayError:  # the step that trains on them tells of it
            return [{} for _ in places]
        return [
            texts_of(self._tokenizer, blocks[block].row(row), start)
            for block, row, start in places
        ]

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._tokenizer_path, trust_remote_code=False)

    def join_scores(
        self, results: Sequence[SampleResult], scores: Sequence[Score]
    ) -> dict[tuple[str, int], Score]:
        """Return scores by key, with environments'.

        Raises WorkerError for a failure with reward.on_failure=stop, DataError for a reserved name of a part.
        """
        by_key = {}
        for result, score in zip(results, scores, strict=True):
            played = result.environment.parts if result.environment is not None else ()
            check_parts(score.parts, played, ours=("agent", *TOOL_PARTS))
            if result.environment is not None:
                joint = add_environment(score, result.environment, as_part=self._adds)
                score = replace(joint, scored=score.scored)
            by_key[result.key] = self.check_score(result.key, score)
        return by_key

    def check_score(self, key: tuple[str, int], score: Score) -> Score:
        """Return the score. Raises WorkerError for a failure with reward.on_failure=stop."""
        if score.failure and self._on_failure == "stop":
            raise WorkerError(
                f"the reward of sample {key[1]} of prompt {key[0]} failed ({score.failure}). "
                "reward.on_failure=zero or drop would continue without it."
            )
        return score

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def _images_of(prompt: Prompt, result: SampleResult) -> Placed:
    """Return the record's images. A row of an agent may begin with others."""
    first = result.images[: len(prompt.images)]
    matches = [placed_image.image for placed_image in first] == [
        placed_image.image for placed_image in prompt.images
    ]
    return first if matches else store_images(prompt.images, {})


class Scoring:
    def __init__(self, pool: RewardPool, texts: bool = True) -> None:
        """texts: see `ScoreRequest`."""
        self._pool = pool
        self._texts = texts
        self._pending: dict[ray.ObjectRef, list[SampleResult]] = {}

    def submit(
        self,
        results: Sequence[SampleResult],
        block: ray.ObjectRef,
        prompts: Mapping[str, Prompt],
    ) -> None:
        finished = [result for result in results if result.row >= 0]
        if finished:
            self._pending[self._pool.score(finished, block, prompts, self._texts)] = (
                finished
            )

    def without(self, result: SampleResult) -> None:
        """Expect no score of a sample that was given up."""

    def collect(self) -> dict[tuple[str, int], Score]:
        """Wait for all scores, by key. Raises WorkerError as `join_scores`, LostError if one was lost too
        often.
        """
        return self._take(list(self._pending))

    def ready(self, timeout_s: float = 0.0) -> dict[tuple[str, int], Score]:
        """Collect the scores that have arrived. Waits up to `timeout_s` for the first."""
        pending = list(self._pending)
        if not pending:
            return {}
        ray.wait(pending, num_returns=1, timeout=timeout_s)
        return self._take(ray.wait(pending, num_returns=len(pending), timeout=0)[0])

    def _take(self, refs: Sequence[ray.ObjectRef]) -> dict[tuple[str, int], Score]:
        scores: dict[tuple[str, int], Score] = {}
        for ref in refs:
            try:
                worker_scores = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise LostError(f"a reward worker was lost: {cause_of(error)}") from error
            scores |= self._pool.join_scores(self._pending.pop(ref), worker_scores)
        return scores
