"""RolloutBuffer: prompts in, the samples of a step out.

prompts -> requests -> engines --sample by sample--> rewards -> baseline, shaping -> keep groups with signal
   ^                                                                                            |
   '------------------------ new prompts for groups without signal, if replaced <--------------'
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from ray import ObjectRef

from controller.actors.launch import WorkerGroups
from controller.algorithm import advantages
from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.data.curriculum import SampledPrompts
from controller.data.prompts import Prompt, Prompts, with_system_prompt
from controller.data.records import Record
from controller.data.sample_functions import NO_FUNCTIONS, OFFERED, Functions, columns_of
from controller.engines.engine_calls import POLL_SECONDS
from controller.engines.engine_pool import Sample
from controller.engines.router import Key
from controller.observability.failures import failed_sample, place_of
from controller.observability.run_record import RunRecord
from controller.planning.planner import Planner
from controller.rollout.batch_rows import (
    sample_numbers,
    trainable_rows,
    with_record_columns,
)
from controller.rollout.model_scores import ScoreScales, with_model_scores
from controller.rollout.samples import (
    SAMPLED_COLUMNS,
    TOKEN_COLUMNS,
    RolloutBatch,
    assemble,
)
from workers.batch.remote_batch import RemoteBatch, store_images
from workers.batch.score import Score
from workers.config.roles import SamplingConfig
from workers.engine.requests import EpisodeStart, SampleRequest, SampleResult, sample_seed

NONE_EARLIER: Mapping[str, int] = MappingProxyType({})


class RolloutBuffer:
    """Samples for training and validation, generated at the start of each step with its weights."""

    def __init__(
        self,
        config: Config,
        roles: WorkerGroups,
        prompts: Prompts,
        planner: Planner,
        record: RunRecord,
        progress: Progress,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        """functions: that replace parts, by setting."""
        self.config = config
        self.roles = roles
        self.prompts = prompts
        self.planner = planner
        self.record = record
        self.position = progress.position
        self.functions = functions
        self.score_scales = ScoreScales(progress.score_scales)
        if isinstance(prompts, SampledPrompts):
            prompts.load(progress.sampler, progress.position)
        self._left = list(progress.active)

    @property
    def active(self) -> list[int]:
        """Places of untrained prompts before `position`, left by a run that generated ahead."""
        return self._left

    @property
    def sampler(self) -> dict[str, Any] | None:
        """State of data.sampler for a checkpoint, or None without one."""
        return self.prompts.kept if isinstance(self.prompts, SampledPrompts) else None

    @property
    def reads_texts(self) -> bool:
        """Whether the responses of all of a step's samples are read."""
        named = any("response" in function.names for function in self.functions.values())
        return named or self.config.run.record_samples or self.record.shows_all

    def begin(self) -> None:
        """Start, once the engines have the policy's first weights."""

    def weights_updated(self) -> None:
        """Continue after a step, once the engines have its weights."""

    def save(self, path: Path, numbers: Sequence[int]) -> None:
        """Write the samples of `active` prompts for a checkpoint."""

    def collect(self, step: int) -> RolloutBatch:
        """Make the step's samples, in several rounds if groups without signal are replaced."""
        settings = self.config.algorithm
        wanted = self.config.batch.prompts_per_step
        limit = (
            settings.max_sampling_rounds
            if settings.zero_variance_groups == "replace"
            else 1
        )
        rounds: list[RolloutBatch] = []
        batches: list[RemoteBatch] = []
        by_uid: dict[str, Prompt] = {}
        while wanted and len(rounds) < limit:
            prompts = self.next_prompts(wanted)
            by_uid |= {prompt.uid: prompt for prompt in prompts}
            rollout = self.roll_out(
                prompts,
                self.config.rollout.samples_per_prompt,
                self.config.rollout.sampling,
                step,
            )
            rounds.append(
                self.with_baseline(
                    self.shape_rewards(self.without_dropped(rollout)), prompts, step
                )
            )
            self.tell_rewards(rounds[-1])
            batches.append(self.keep_groups_with_signal(rounds[-1].rows, rounds[-1]))
            wanted -= len(np.unique(batches[-1]["uid"]))
        if limit > 1:
            self.log_missing(step, wanted)
        return self.with_trained(
            RolloutBatch.concat(rounds), RemoteBatch.concat(batches), by_uid
        )

    def with_trained(
        self, rollout: RolloutBatch, batch: RemoteBatch, prompts: Mapping[str, Prompt]
    ) -> RolloutBatch:
        """Set the rows that a step trains on, with the columns that its advantages and its loss take."""
        self.record.add_failures(
            "truncated samples dropped",
            ["reward.truncated=drop"] * rollout.truncated_dropped,
        )
        for key in ("algorithm.advantage_function", "batch.replay.by"):
            if custom_function := self.functions.get(key):
                names = [
                    name
                    for name in custom_function.names
                    if name not in (*OFFERED, "advantage") or name == "response"
                ]
                batch = batch.with_columns(
                    **columns_of(batch, names, rollout.by_sample, self.record_of)
                )
        return replace(
            rollout, trained=with_record_columns(batch, prompts, self.config.loss_columns)
        )

    def record_of(self, uid: str) -> Record:
        (prompt,) = self.prompts.take(int(uid), 1)
        return prompt.columns

    def tell_rewards(self, rollout: RolloutBatch) -> None:
        """Tell data.sampler the rewards of groups."""
        if isinstance(self.prompts, SampledPrompts):
            rewards: dict[str, list[float]] = {}
            for (uid, _), score in rollout.by_sample.items():
                rewards.setdefault(uid, []).append(score.reward)
            self.prompts.keep_rewards(rewards)

    def next_prompts(self, count: int) -> list[Prompt]:
        first = self._left[:count]
        self._left = self._left[count:]
        start = self.position
        self.position = self.position + count - len(first)
        leftovers = [prompt for place in first for prompt in self.prompts.take(place, 1)]
        return leftovers + self.prompts.take(start, self.position - start)

    def log_missing(self, step: int, groups: int) -> None:
        rounds = self.config.algorithm.max_sampling_rounds
        wanted = self.config.batch.prompts_per_step
        if groups:
            self.record.console.log(
                f"step {step}: {groups} of {wanted} groups are still without signal after "
                f"algorithm.max_sampling_rounds={rounds}; "
                + (
                    "training on the others"
                    if groups < wanted
                    else "nothing is trained in this step"
                )
            )

    def with_baseline(
        self, rollout: RolloutBatch, prompts: Sequence[Prompt], step: int
    ) -> RolloutBatch:
        """With ReMax, add the reward of a greedy response to each prompt."""
        if self.config.algorithm.advantage != "remax":
            return rollout
        greedy = replace(self.config.rollout.sampling, temperature=0.0, top_p=1.0, top_k=0)
        compared = rollout.with_baseline(
            self.shape_rewards(self.roll_out(prompts, 1, greedy, step))
        )
        lost = compared.dropped - rollout.dropped
        self.record.add_failures(
            "samples dropped without a greedy response",
            ["algorithm.advantage=remax"] * lost,
        )
        return compared

    def without_dropped(self, rollout: RolloutBatch) -> RolloutBatch:
        return (
            rollout.without_truncated()
            if self.config.reward.truncated == "drop"
            else rollout
        )

    def shape_rewards(self, rollout: RolloutBatch) -> RolloutBatch:
        settings = self.config.reward
        longest = self.config.longest_response
        if settings.model.normalize == "running":
            rollout = self.score_scales.normalize(self.config, rollout)
        if settings.overlong_tokens:
            tokens = rollout.batch["length"] - rollout.batch["prompt_tokens"]
            penalty = overlong_penalty(tokens, longest, settings.overlong_tokens)
            rollout = rollout.with_reward_part(
                "overlong_penalty", settings.overlong_penalty * penalty
            )
        if custom_function := self.functions.get("reward.shaping"):
            rewards = custom_function(
                columns_of(
                    rollout.batch, custom_function.names, rollout.by_sample, self.record_of
                )
            )
            rollout = rollout.with_rewards(rewards, "shaping")
        return rollout

    def roll_out(
        self, prompts: Sequence[Prompt], samples: int, sampling: SamplingConfig, step: int
    ) -> RolloutBatch:
        """Sample every prompt `samples` times, scoring while the rest is generated."""
        with (
            SamplingRound(self, prompts, samples, sampling, step) as sampling_round,
            self.record.console.samples(
                len(sampling_round.requests)
            ) as sampling_round.advance,
        ):
            while not sampling_round.done:
                self.roles.rollouts.pump(POLL_SECONDS)
        return sampling_round.result()

    def assemble_samples(
        self,
        finished: Sequence[Sample],
        scores: Mapping[Key, Score],
        dropped: Sequence[SampleResult],
        retried: Sequence[SampleResult],
        *,
        trains: bool = True,
    ) -> RolloutBatch:
        """Record finished samples and join them with their scores. Raises as `assemble`."""
        self._record_failures(scores, dropped, retried)
        self.record.timeline.samples(
            [*(result for result, _ in finished), *dropped], scores, trains=trains
        )
        rollout = assemble(
            finished,
            scores,
            dropped=dropped,
            retried=len(retried),
            drop_failed=self.config.reward.on_failure == "drop",
            token_columns=TOKEN_COLUMNS
            if self.config.model.router_replay == "none"
            else SAMPLED_COLUMNS,
        )
        return self.add_model_scores(rollout)

    def _record_failures(
        self,
        scores: Mapping[Key, Score],
        dropped: Sequence[SampleResult],
        retried: Sequence[SampleResult],
    ) -> None:
        """Before samples are joined, which raises if none is left."""
        of_retries = [failed_sample(result) for result in retried[:1]] * len(retried)
        of_rewards = [
            f"{place_of(key)}: {score.failure}"
            for key, score in scores.items()
            if score.failure
        ]
        retries = self.config.rollout.max_retries
        on_failure = self.config.reward.on_failure
        self.record.add_failures(
            f"samples dropped (rollout.max_retries={retries})", map(failed_sample, dropped)
        )
        self.record.add_failures("samples retried", of_retries)
        self.record.add_failures(
            f"rewards failed (reward.on_failure={on_failure})", of_rewards
        )

    def add_model_scores(self, rollout: RolloutBatch) -> RolloutBatch:
        if self.roles.reward_model is None:
            return rollout
        self.roles.sleep_engines()
        return with_model_scores(
            self.config, self.roles.reward_model, self.planner, rollout
        )

    def keep_groups_with_signal(
        self, batch: RemoteBatch, rollout: RolloutBatch
    ) -> RemoteBatch:
        """Drop groups without signal, unless algorithm.zero_variance_groups keeps them. batch: rows of
        `rollout`.
        """
        if self.config.algorithm.zero_variance_groups == "keep":
            return batch
        return batch.select(self.has_signal(batch, rollout))

    def has_signal(self, batch: RemoteBatch, rollout: RolloutBatch) -> np.ndarray:
        """True if the rewards of a sequence's group differ and some of its sequences are trained, bool [B].

        With algorithm.group_filter, if that keeps the group.
        """
        trained = np.unique(trainable_rows(batch, self.config.reward)["uid"])
        group_filter = self.functions.get("algorithm.group_filter")
        if group_filter is None:
            return advantages.has_signal(batch["reward"], batch["uid"]) & np.isin(
                batch["uid"], trained
            )
        first_rows = np.unique(sample_numbers(batch), return_index=True)[1]
        samples = batch.select(first_rows)
        decisions = []
        for uid in trained:
            group = samples.select(samples["uid"] == uid)
            columns = columns_of(
                group, group_filter.names, rollout.by_sample, self.record_of
            )
            decisions.append(group_filter(columns))
        return np.isin(batch["uid"], trained[np.array(decisions, bool)])


class SamplingRound:
    """Requests for samples of prompts, which the engines answer while their pool is pumped, within a `with`
    block.

    advance: called with numbers of finished samples.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingConfig,
        step: int,
        seed: int | None = None,
        adapter: str = "",
        version: int | None = None,
        earlier: Mapping[str, int] = NONE_EARLIER,
    ) -> None:
        """seed: gives equal prompts equal samples, or None for those of the run's seed, the step and the uid,
        after the `earlier` ones of this step, a number by uid.

        adapter, version: a LoRA policy and its published weights. Raises ConfigError if engines do not have
        them.
        """
        self.adapter = buffer.roles.rollouts.adapter(adapter, version) if adapter else 0
        requests = sample_requests(buffer.config, prompts, samples, step, earlier)
        self.requests = (
            [replace(request, adapter=self.adapter) for request in requests]
            if adapter
            else requests
        )
        if seed is not None:
            names = {prompt.uid: prompt.ids.tobytes().hex() for prompt in prompts}
            self.requests = [
                replace(r, seed=sample_seed(seed, 0, names[r.uid], r.sample))
                for r in self.requests
            ]
        self.advance: Callable[[int], object] = lambda count: None
        self._buffer = buffer
        self._trains = step > 0
        self._prompts = {prompt.uid: prompt for prompt in prompts}
        self._found: dict[Key, Sample] = {}
        self._scoring = buffer.roles.scoring(
            samples, texts=not self._trains or buffer.reads_texts
        )
        buffer.roles.wake_engines()
        self._generation = buffer.roles.rollouts.begin(sampling, self._receive)
        self._generation.router.submit(self.requests)

    def __enter__(self) -> "SamplingRound":
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> None:
        self._buffer.roles.rollouts.end(self._generation)

    @property
    def done(self) -> bool:
        return self._generation.router.done

    def _receive(self, results: list[SampleResult], block: ObjectRef) -> None:
        self._found.update({result.key: (result, block) for result in results})
        self._scoring.submit(results, block, self._prompts)
        self.advance(len(results))

    def result(self) -> RolloutBatch:
        """Wait for the scores, and join them with the finished samples in order. Raises as `assemble`."""
        finished = [
            self._found[request.key]
            for request in self.requests
            if request.key in self._found
        ]
        router = self._generation.router
        scores = self._scoring.collect()
        return self._buffer.assemble_samples(
            finished, scores, router.dropped, router.retried, trains=self._trains
        )


def sample_requests(
    config: Config,
    prompts: Sequence[Prompt],
    samples: int,
    step: int,
    earlier: Mapping[str, int] = NONE_EARLIER,
) -> list[SampleRequest]:
    """Return `samples` requests per prompt, group by group, sharing their arrays and images.

    earlier: samples by uid that the step has already, whose seeds are not taken again.
    """
    image_refs: dict[int, ObjectRef] = {}
    shared = [
        (prompt, _start(config, prompt), store_images(prompt.images, image_refs))
        for prompt in prompts
    ]
    return [
        SampleRequest(
            prompt.uid,
            i,
            prompt.ids,
            sample_seed(config.run.seed, step, prompt.uid, earlier.get(prompt.uid, 0) + i),
            start,
            images=images,
        )
        for prompt, start, images in shared
        for i in range(samples)
    ]


def _start(config: Config, prompt: Prompt) -> EpisodeStart | None:
    if not config.rollout.plays_episodes:
        return None
    text = with_system_prompt(
        prompt.columns[config.data.prompt_key], config.data.system_prompt, prompt.uid
    )
    key = config.data.image_key if prompt.images else ""
    return EpisodeStart(
        prompt.columns,
        text,
        prompt.options,
        key,
        config.data.prompt_key,
        config.data.image_pixels.limits,
    )


def overlong_penalty(tokens: np.ndarray, longest: int, overlong_tokens: int) -> np.ndarray:
    """Soft punishment of long responses (Yu et al. 2025, DAPO, eq. 13), float64 [B] in [-1, 0].

        0                                           |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache         in between
        -1                                          |y| >= L_max

    tokens: |y|, int [B], after the prompt. longest: L_max. overlong_tokens: L_cache >= 1.
    """
    free = longest - overlong_tokens
    return np.clip((free - tokens) / overlong_tokens, -1.0, 0.0)
