"""ContinuousCollector: groups are generated ahead while the policy trains, across updates of its weights.

    admit: prompts -> engines --sample by sample--> rewards -> group ready -> take P -> train -> published -> admit
                         ^ pump, also while the driver waits for the training ranks

Which groups are generated and taken is decided in `controller.generation.schedule`. There is one thread: what engines
and reward workers have finished is read by `pump`, which the driver calls while it waits for anything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ray import ObjectRef

from controller import advantages
from controller.actors.roles import Roles
from controller.checkpoint import Progress
from controller.collector import Collected, Collector, sample_requests
from controller.config import Config
from controller.data.prompts import Prompt, Prompts
from controller.generation.engines import POLL_SECONDS
from controller.generation.rounds import RolloutRound
from controller.generation.schedule import GroupState, Schedule, Staleness
from controller.observability.run_record import RunRecord
from controller.planner import Planner
from controller.samples import Rollout, assemble, with_record_columns
from workers.errors import RolloutError
from workers.rollout.requests import SampleResult
from workers.score import Score


@dataclass
class Group:
    """A prompt, and its samples as far as they are there."""

    prompt: Prompt
    results: dict[tuple[str, int], tuple[SampleResult, ObjectRef]] = field(default_factory=dict)
    scores: dict[tuple[str, int], Score] = field(default_factory=dict)
    dropped: list[SampleResult] = field(default_factory=list)

    @property
    def settled(self) -> int:
        """Samples that are scored or given up."""
        return len(self.scores) + len(self.dropped)


class ContinuousCollector(Collector):
    """Samples of training without rounds; those of a validation are made as in `Collector`, beside them."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        prompts: Prompts,
        planner: Planner,
        record: RunRecord,
        progress: Progress,
    ) -> None:
        super().__init__(config, roles, prompts, planner, record, progress)
        settings = staleness(config)
        self.schedule = Schedule(
            settings, config.run.steps - progress.step, admitted=progress.position, active=progress.active
        )
        self._groups: dict[int, Group] = {}
        self._released: list[Group] = []
        self._retried = 0
        self._scoring = roles.rewards.begin()
        self._generation = roles.rollouts.begin(config.rollout.sampling, self._score)
        for group in roles.groups:
            group.meanwhile = self.read

    @property
    def active(self) -> list[int]:
        """Places of prompts before `position` whose samples no step has trained on."""
        return self.schedule.in_state(GroupState.RUNNING, GroupState.READY)

    def begin(self) -> None:
        """Generate the groups that a resumed run had not trained on, then new ones."""
        self._request(self.active)
        self.published()

    def published(self) -> None:
        """Free the places of the groups that the last step was trained on, and begin others."""
        self.schedule.published()
        self._admit()

    def collect(self, step: int) -> Collected:
        """The samples of the groups that the step takes; waits until there are enough of them."""
        wanted = self.config.batch.prompts_per_step
        with self.record.console.samples(wanted) as advance:
            shown = 0
            while not (taken := self.schedule.take()):
                self._read(POLL_SECONDS)
                ready = min(wanted, len(self.schedule.in_state(GroupState.READY)))
                advance(ready - shown)
                shown = ready
        groups = [self._groups.pop(number) for number in taken]
        rollout = self._rollout([*groups, *self._take_released()])
        by_uid = {group.prompt.uid: group.prompt for group in groups}
        batch = rollout.batch.select(np.isin(rollout.batch["uid"], list(by_uid)))
        batch = self.keep_groups_with_signal(batch)
        if self.config.algorithm.groups_without_signal == "replace":
            self.log_missing(step, wanted - len(np.unique(batch["uid"])))
        return Collected(rollout, with_record_columns(batch, by_uid, self.config.loss_columns))

    def read(self) -> None:
        """Read all that engines and reward workers have finished, without waiting."""
        self._read(0.0)

    def _read(self, timeout_s: float) -> None:
        """Read what is there; waits up to `timeout_s` for the first."""
        rollouts = self.roles.rollouts
        busy = bool(self._generation.streams) or rollouts.queued > 0
        if rollouts.pump(timeout_s if busy else 0.0):
            while rollouts.pump():
                pass
        for key, score in self._scoring.ready(0.0 if busy else timeout_s).items():
            self._groups[int(key[0])].scores[key] = score
        for result in self._generation.router.take_dropped():
            self._groups[int(result.uid)].dropped.append(result)
        for number in self.schedule.in_state(GroupState.RUNNING):
            if self._groups[number].settled == self.config.rollout.samples_per_prompt:
                self._settle(number)

    def _settle(self, number: int) -> None:
        """All samples of the group are there: keep it, or replace it where it has no signal."""
        settings, group = self.config.algorithm, self._groups[number]
        most = (settings.max_sampling_rounds - 1) * self.config.batch.prompts_per_step
        replaces = settings.groups_without_signal == "replace" and len(self._released) < most
        if replaces and not self._has_signal(group):
            self.schedule.released(number)
            self._released.append(self._groups.pop(number))
            self._admit()
        else:
            self.schedule.finished(number)

    def _has_signal(self, group: Group) -> bool:
        drop_failed = self.config.reward.on_failure == "drop"
        try:
            batch = self.shaped(assemble(_round([group]), group.scores, drop_failed=drop_failed)).batch
        except RolloutError:  # none of its samples was finished
            return False
        return bool(advantages.has_signal(batch["reward"], batch["uid"]).any())

    def _rollout(self, groups: Sequence[Group]) -> Rollout:
        """The samples of these groups, in the order of their prompts. Raises RolloutError if there is none."""
        ordered = sorted(groups, key=lambda group: int(group.prompt.uid))
        retried, self._retried = self._retried, self._generation.router.retried
        scores = {key: score for group in ordered for key, score in group.scores.items()}
        return self.shaped(self.assembled(_round(ordered, self._retried - retried), scores))

    def _take_released(self) -> list[Group]:
        released, self._released = self._released, []
        return released

    def _admit(self) -> None:
        self._request(self.schedule.admit())
        self.position = self.schedule.admitted

    def _request(self, numbers: Sequence[int]) -> None:
        """Ask for the samples of these groups, with the seeds that they would have without staleness."""
        for number in numbers:
            (prompt,) = self.prompts.take(number, 1)
            self._groups[number] = Group(prompt)
            step = number // self.config.batch.prompts_per_step + 1
            samples = self.config.rollout.samples_per_prompt
            self._generation.router.submit(sample_requests(self.config, [prompt], samples, step))

    def _score(self, results: list[SampleResult], block: ObjectRef) -> None:
        for result in results:
            self._groups[int(result.uid)].results[result.key] = result, block
        prompts = {result.uid: self._groups[int(result.uid)].prompt for result in results}
        self._scoring.submit(results, block, prompts)


def _round(groups: Sequence[Group], retried: int = 0) -> RolloutRound:
    found = [group.results[key] for group in groups for key in sorted(group.results)]
    dropped = [result for group in groups for result in group.dropped]
    return RolloutRound([result for result, _ in found], [block for _, block in found], dropped, retried)


def staleness(config: Config) -> Staleness:
    """The settings of a run's schedule."""
    return Staleness(config.batch.prompts_per_step, config.rollout.max_staleness, config.rollout.staleness_window)
