"""Sampler: requests in, scored samples out, one by one as they come.

requests --a window at a time--> engines --> reward workers --> (reward model, some at a time) --> Sampled
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import ray
from ray import ObjectRef

from balancing import CostModel
from controller.actors.sampling_roles import SamplingRoles
from controller.config.sampler import SamplerConfig
from controller.data.prompts import Prompt
from controller.generation.engines import POLL_SECONDS
from controller.generation.rounds import Generation, RolloutRound
from controller.planner import Planner
from controller.samples import assemble
from workers.remote_batch import TokenBlock
from workers.rollout.requests import SampleRequest, SampleResult
from workers.score import Score

WINDOW = 4  # requests on their way, in those that the engines process at a time: enough that none waits
MODEL_SCORES = 256  # samples that a reward model scores at a time


@dataclass(frozen=True)
class Sampled:
    """A finished sample: its tokens are row `result.row` of the TokenBlock `block`."""

    result: SampleResult
    block: ObjectRef
    score: Score

    def row(self) -> dict[str, np.ndarray]:
        """Its columns of tokens, see `RolloutWorker.generate`."""
        block: TokenBlock = ray.get(self.block)
        return block.row(self.result.row)


class Sampler:
    """dropped: the last failure of every sample that was given up."""

    def __init__(self, config: SamplerConfig, roles: SamplingRoles, cost_model: CostModel) -> None:
        """cost_model: FLOPs of a sequence, which plans of a reward model balance."""
        self.dropped: list[SampleResult] = []
        self._config, self._roles = config, roles
        self._planner = Planner(config, cost_model)
        self._window = WINDOW * config.engines * config.rollout.max_concurrent

    def samples(self, requests: Iterable[SampleRequest], prompts: Mapping[str, Prompt]) -> Iterator[Sampled]:
        """The samples of the requests, in the order in which they finish; prompts: by uid.

        Raises RolloutError when no engine is left, LostError if a reward worker is lost too often, and WorkerError for
        a failed reward with reward.on_failure=stop.
        """
        found = self._scored(requests, prompts)
        if self._roles.reward_model is None:
            yield from found
            return
        while some := list(islice(found, MODEL_SCORES)):
            yield from self._with_model_scores(some)

    def _scored(self, requests: Iterable[SampleRequest], prompts: Mapping[str, Prompt]) -> Iterator[Sampled]:
        rollouts, scoring, waiting = self._roles.rollouts, self._roles.rewards.begin(), iter(requests)
        unscored: dict[tuple[str, int], tuple[SampleResult, ObjectRef]] = {}

        def score(results: list[SampleResult], block: ObjectRef) -> None:
            unscored.update({result.key: (result, block) for result in results})
            scoring.submit(results, block, prompts)

        generation = rollouts.begin(self._config.rollout.sampling, score)
        while True:
            under_way = len(generation.router.unfinished) + len(unscored)
            generation.router.submit(islice(waiting, max(0, self._window - under_way)))
            if generation.router.done and not unscored:
                return
            self._pump(generation)
            for key, found in scoring.ready(POLL_SECONDS if generation.router.done else 0.0).items():
                yield Sampled(*unscored.pop(key), found)

    def _pump(self, generation: Generation) -> None:
        """Read what engines have finished; waits for the first of it."""
        if not generation.router.done and self._roles.rollouts.pump(POLL_SECONDS):
            while self._roles.rollouts.pump():
                pass
        self.dropped += generation.router.take_dropped()

    def _with_model_scores(self, samples: list[Sampled]) -> list[Sampled]:
        """The samples with the reward model's scores in their rewards."""
        model = self._roles.reward_model
        assert model is not None
        scores = {sample.result.key: sample.score for sample in samples}
        finished = RolloutRound([sample.result for sample in samples], [sample.block for sample in samples], [], 0)
        rollout = assemble(finished, scores)
        values = model.score(rollout.batch, self._planner.whole(rollout.batch, "reward_model.scores"))
        rollout = rollout.with_reward_part("model", values, weight=self._config.reward.model.weight)
        return [replace(sample, score=rollout.by_sample[sample.result.key]) for sample in samples]
