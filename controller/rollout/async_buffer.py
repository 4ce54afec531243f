"""AsyncRolloutBuffer: groups are generated ahead while the policy trains, across updates of its weights.

    admit: prompts -> engines --sample by sample--> rewards -> group ready -> take P -> train -> new weights
      ^                  ^ pump, also while the driver waits for the training ranks                |
      '--------------------------------------------------------------------------------------------'

`controller.engines.staleness_schedule` decides which groups are generated and taken. There is one thread:
while the driver waits, it calls `read`, which reads finished samples and rewards.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import ray
from ray import ObjectRef

from controller.actors.launch import WorkerGroups
from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.data.prompts import Prompt, Prompts
from controller.data.sample_functions import NO_FUNCTIONS, Functions
from controller.engines.engine_calls import POLL_SECONDS
from controller.engines.engine_pool import Partial, Sample
from controller.engines.router import Key
from controller.engines.staleness_schedule import GroupState, Staleness, StalenessSchedule
from controller.observability.run_record import RunRecord
from controller.planning.planner import Planner
from controller.rollout.buffer import RolloutBuffer, sample_requests
from controller.rollout.sample_files import (
    FinishedSample,
    StoredSamples,
    read_samples,
    write_samples,
)
from controller.rollout.samples import RolloutBatch, assemble
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import fetch_objects
from workers.batch.score import Score
from workers.engine.requests import SampleResult
from workers.errors import DataError, RolloutError


@dataclass
class Group:
    """A prompt and its samples so far."""

    prompt: Prompt
    finished: dict[Key, Sample] = field(default_factory=dict)
    scores: dict[Key, Score] = field(default_factory=dict)
    dropped: list[SampleResult] = field(default_factory=list)


class AsyncRolloutBuffer(RolloutBuffer):
    """Continuous generation for training. Validation still uses `RolloutBuffer.roll_out`."""

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
        super().__init__(config, roles, prompts, planner, record, progress, functions)
        settings = Staleness(
            config.batch.prompts_per_step,
            config.rollout.max_staleness,
            config.rollout.out_of_order_window,
        )
        self.schedule = StalenessSchedule(
            settings,
            config.run.steps - progress.step,
            admitted=progress.position,
            active=progress.active,
        )
        self._groups: dict[int, Group] = {}
        self._released: list[Group] = []
        self._saved = progress.samples
        self._generation = roles.rollouts.begin(config.rollout.sampling, self._score)
        for group in roles.groups.values():
            group.meanwhile = self.read

    @property
    def active(self) -> list[int]:
        """Places of prompts before `position` that no step has trained on."""
        return self.schedule.in_state(GroupState.RUNNING, GroupState.READY)

    def begin(self) -> None:
        """Continue a resumed run's untrained groups, then begin new ones."""
        self._scoring = self.roles.scoring(
            self.config.rollout.samples_per_prompt, texts=self.reads_texts
        )
        self._request(self.active, self._read_saved_samples())
        self.weights_updated()

    def weights_updated(self) -> None:
        """Free the last step's groups, and begin others."""
        for number in self.schedule.in_state(GroupState.TRAINING):
            del self._groups[number]
        self.schedule.weights_updated()
        self._admit()

    def save(self, path: Path, numbers: Sequence[int]) -> None:
        """Write these groups' samples so far. Raises OutputError."""
        self.read()
        groups = [self._groups[number] for number in numbers if number in self._groups]
        finished = [sample for group in groups for sample in _finished_samples(group)]
        write_samples(
            path,
            StoredSamples(finished, self._partial({group.prompt.uid for group in groups})),
        )

    def _partial(self, uids: Collection[str]) -> dict[int, Partial]:
        """Return unfinished responses and sessions of these prompts, by seed."""
        now = self.roles.rollouts.partial_responses()
        requests = [
            request for request in self._generation.router.unfinished if request.uid in uids
        ]
        partials = {
            request.seed: now.get(request.attempt, request.begun) for request in requests
        }
        return {
            seed: response for seed, response in partials.items() if response is not None
        }

    def collect(self, step: int) -> RolloutBatch:
        """Wait for the step's groups and return their samples."""
        wanted = self.config.batch.prompts_per_step
        with self.record.console.samples(wanted) as advance:
            progress = 0
            while not (numbers := self.schedule.take()):
                self._read(POLL_SECONDS)
                ready = min(wanted, len(self.schedule.in_state(GroupState.READY)))
                advance(ready - progress)
                progress = ready
        groups = [self._groups[number] for number in numbers]
        released = self._released
        self._released = []
        rollout = self._rollout([*groups, *released])
        by_uid = {group.prompt.uid: group.prompt for group in groups}
        batch = rollout.rows.select(np.isin(rollout.rows["uid"], list(by_uid)))
        self.tell_rewards(rollout)
        batch = self.keep_groups_with_signal(batch, rollout)
        if self.config.algorithm.zero_variance_groups == "replace":
            self.log_missing(step, wanted - len(np.unique(batch["uid"])))
        return self.with_trained(rollout, batch, by_uid)

    def read(self) -> None:
        self._read(0.0)

    def _read(self, timeout_s: float) -> None:
        """Read finished results. Waits up to `timeout_s` for the first."""
        rollouts = self.roles.rollouts
        busy = bool(self._generation.streams) or rollouts.queued > 0
        rollouts.pump_all(timeout_s if busy else 0.0)
        for key, score in self._scoring.ready(0.0 if busy else timeout_s).items():
            self._groups[int(key[0])].scores[key] = score
        for result in self._generation.router.take_dropped():
            self._drop(result)
        for number in self.schedule.in_state(GroupState.RUNNING):
            group = self._groups[number]
            if (
                len(group.scores) + len(group.dropped)
                == self.config.rollout.samples_per_prompt
            ):
                self._settle(number)

    def _settle(self, number: int) -> None:
        """Keep a complete group, or replace it if it has no signal."""
        settings = self.config.algorithm
        group = self._groups[number]
        most = (settings.max_sampling_rounds - 1) * self.config.batch.prompts_per_step
        replaces = settings.zero_variance_groups == "replace" and len(self._released) < most
        if replaces and not self._has_signal(group):
            self.schedule.release(number)
            self._released.append(self._groups.pop(number))
            self._admit()
        else:
            self.schedule.finish(number)

    def _has_signal(self, group: Group) -> bool:
        drop_failed = self.config.reward.on_failure == "drop"
        try:
            rollout = assemble(
                list(group.finished.values()), group.scores, drop_failed=drop_failed
            )
            shaped = self.shape_rewards(self.without_dropped(rollout))
        except RolloutError:  # none of its samples was finished, or each was dropped
            return False
        return bool(self.has_signal(shaped.batch, shaped).any())

    def _rollout(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return samples of these groups, in prompt order. Raises RolloutError if there are none."""
        ordered = sorted(groups, key=lambda group: int(group.prompt.uid))
        finished = []
        scores: dict[Key, Score] = {}
        dropped = []
        for group in ordered:
            finished += [group.finished[key] for key in sorted(group.finished)]
            scores |= group.scores
            dropped += group.dropped
        retried = self._generation.router.take_retried()
        rollout = self.assemble_samples(finished, scores, dropped, retried)
        return self.shape_rewards(self.without_dropped(rollout))

    def _read_saved_samples(self) -> StoredSamples:
        """Return the checkpoint's samples, or None if its file is missing or broken."""
        if not self._saved:
            return StoredSamples()
        try:
            return read_samples(Path(self._saved))
        except DataError as error:
            self.record.console.log(f"{error}. Its samples are made again")
            return StoredSamples()

    def _admit(self) -> None:
        """Begin the groups that the schedule allows, because the driver never waits in a short step."""
        numbers = self.schedule.admit()
        # At once: data.sampler chooses them together.
        self.prompts.take(self.position, len(numbers))
        self._request(numbers)
        self.position = self.schedule.admitted
        self.roles.rollouts.pump()

    def _request(self, numbers: Sequence[int], stored: StoredSamples | None = None) -> None:
        """Request samples of these groups that are not `stored`, and the rest of unfinished ones.

        Seeds equal those without staleness.
        """
        stored = stored or StoredSamples()
        for number in numbers:
            (prompt,) = self.prompts.take(number, 1)
            self._groups[number] = Group(prompt)
        self._put(stored.finished)
        for number in numbers:
            group = self._groups[number]
            step = number // self.config.batch.prompts_per_step + 1
            requests = sample_requests(
                self.config, [group.prompt], self.config.rollout.samples_per_prompt, step
            )
            keys = {*group.finished, *(result.key for result in group.dropped)}
            self._generation.router.submit(
                replace(request, begun=stored.partial.get(request.seed), priority=number)
                for request in requests
                if request.key not in keys
            )

    def _put(self, samples: Sequence[FinishedSample]) -> None:
        """Add stored samples to their groups, and score samples without a score or without a text that is
        read.
        """
        finished = [sample for sample in samples if sample.rows]
        block = (
            ray.put(
                DataProto.from_rows([row for sample in finished for row in sample.rows])
            )
            if finished
            else None
        )
        begins = np.cumsum([0, *(len(sample.rows) for sample in finished)]).tolist()
        for row, sample in zip(begins, finished, strict=False):
            result = replace(sample.result, row=row)
            group = self._groups[int(sample.result.uid)]
            if sample.score is None or (self.reads_texts and not sample.score.response):
                self._score([result], block)
            else:
                group.finished[result.key], group.scores[result.key] = (
                    (result, block),
                    sample.score,
                )
        for sample in samples:
            if not sample.rows:
                self._drop(sample.result)

    def _drop(self, result: SampleResult) -> None:
        self._groups[int(result.uid)].dropped.append(result)
        self._scoring.without(result)

    def _score(self, results: list[SampleResult], block: ObjectRef) -> None:
        groups = {result.uid: self._groups[int(result.uid)] for result in results}
        for result in results:
            groups[result.uid].finished[result.key] = result, block
        self._scoring.submit(
            results, block, {uid: group.prompt for uid, group in groups.items()}
        )


def _finished_samples(group: Group) -> list[FinishedSample]:
    blocks = fetch_objects(reference for _, reference in group.finished.values())
    samples = []
    for key, (result, reference) in sorted(group.finished.items()):
        rows = [blocks[reference].row(row) for row in result.rows]
        samples.append(FinishedSample(result, rows, group.scores.get(key)))
    for result in group.dropped:
        samples.append(FinishedSample(result, [], None))
    return samples
