"""The schedule: what it promises over random runs, that the bound is reached, and its single moves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.engines.staleness_schedule import GroupState, Staleness, StalenessSchedule
from tests.refusals import refused

Due = Callable[[Random, float, int], float]

# When a group ends: from its run's random numbers, the time now and its number. The least is next.
FINISH_ORDERS: dict[str, Due] = {
    "any": lambda random, now, group: random.random(),
    "admitted": lambda random, now, group: group,
    "long tail": lambda random, now, group: now + random.lognormvariate(0.0, 2.0),
    "oldest last": lambda random, now, group: -group,
    "one in eight last": lambda random, now, group: (
        now + (1e6 if group % 8 == 7 else random.random())
    ),
}


@dataclass
class Books:
    """What a run has done, kept beside the schedule. admitted_at: versions. steps: the groups of each step
    taken.
    """

    admitted_at: dict[int, int] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    steps: list[list[int]] = field(default_factory=list)
    updates: int = 0

    @property
    def active(self) -> list[int]:
        """Admitted, not released, and not in a step whose weights the engines have."""
        gone = self.released.union(*self.steps[: self.updates])
        return [group for group in self.admitted_at if group not in gone]

    @property
    def trained(self) -> list[int]:
        """The groups of all steps."""
        return [group for step in self.steps for group in step]

    def saved(self) -> "Books":
        """As a checkpoint has them: with the steps whose weights the engines have."""
        return Books(
            dict(self.admitted_at),
            set(self.released),
            self.steps[: self.updates],
            self.updates,
        )


class Run:
    """A run with random events, which checks every answer of its schedule.

    release: probability that a group gives no signal. waiting: steps whose weights may wait at once. prompt:
    probability of an update, where one is due, before anything else. losses: of an engine or of the whole
    run, a probability for each event.
    """

    def __init__(
        self,
        settings: Staleness,
        steps: int,
        random: Random,
        due: Due,
        *,
        release: float = 0.0,
        waiting: int = 1,
        prompt: float = 1.0,
        losses: float = 0.0,
    ) -> None:
        self.settings, self.steps, self.random, self.due = settings, steps, random, due
        self.release, self.waiting, self.prompt, self.losses = (
            release,
            waiting,
            prompt,
            losses,
        )
        self.schedule, self.books, self.checkpoint = (
            StalenessSchedule(settings, steps),
            Books(),
            Books(),
        )
        self.now, self.ends, self.oldest = 0.0, {}, 0

    def to_the_end(self) -> "Run":
        """Make all steps."""
        while self.books.updates < self.steps:
            if self.random.random() < self.losses:
                self.random.choice((self.lose_an_engine, self.resume_from_a_checkpoint))()
            self.admit()
            self.random_event()
        assert not self.schedule.admit(), "more is generated than is trained"
        trained, released = self.books.trained, self.books.released
        assert len(trained) == self.steps * self.settings.prompts_per_step
        assert sorted([*trained, *released]) == list(range(len(self.books.admitted_at))), (
            "each once, none is left over"
        )
        return self

    def admit(self) -> None:
        """What there is room for, and no group that no step would take."""
        active, trained = set(self.books.active), set(self.books.trained)
        assert set(self.schedule.in_state(*GroupState)) == active
        left = (
            self.steps * self.settings.prompts_per_step
            - len(trained)
            - len(active - trained)
        )
        new = self.schedule.admit()
        assert len(new) == max(0, min(self.settings.capacity - len(active), left))
        for group in new:
            assert group == len(self.books.admitted_at), (
                "each is admitted once, in the order of the prompts"
            )
            self.books.admitted_at[group] = self.books.updates
            self.ends[group] = self.due(self.random, self.now, group)

    def random_event(self) -> None:
        """One of those that are possible: there is always one."""
        waiting = len(self.books.steps) - self.books.updates
        if waiting and self.random.random() < self.prompt:
            self.update()
        elif not (waiting < self.waiting and self.take()) and not self.finish():
            assert waiting, (
                f"deadlock: {self.schedule.in_state(*GroupState)} after {self.books}"
            )
            self.update()

    def take(self) -> bool:
        """Train on the next step, if it can be taken."""
        taken = self.schedule.take()
        if not taken:
            return False
        assert len(taken) == self.settings.prompts_per_step
        assert taken == sorted(set(taken)) and not {*taken} & {
            *self.books.trained,
            *self.books.released,
        }
        ages = [len(self.books.steps) - self.books.admitted_at[group] for group in taken]
        self.oldest = max(self.oldest, *ages)
        assert self.oldest <= self.settings.max_age
        self.books.steps.append(taken)
        return True

    def finish(self) -> bool:
        """The running group that is due ends."""
        running = self.schedule.in_state(GroupState.RUNNING)
        if not running:
            return False
        group = min(running, key=self.ends.__getitem__)
        self.now = max(self.now, self.ends[group])
        if self.random.random() < self.release:
            self.schedule.release(group)
            self.books.released.add(group)
        else:
            self.schedule.finish(group)
        return True

    def update(self) -> None:
        """The weights of the oldest step that waits for it; sometimes with a checkpoint."""
        self.schedule.weights_updated()
        self.books.updates += 1
        if self.random.random() < 0.5:
            self.checkpoint = self.books.saved()

    def lose_an_engine(self) -> None:
        """A third of the running groups begin again."""
        lost = self.random.randrange(3)
        for group in self.schedule.in_state(GroupState.RUNNING):
            if group % 3 == lost:
                self.ends[group] = self.due(self.random, self.now, group)

    def resume_from_a_checkpoint(self) -> None:
        """The last one, or one of this moment."""
        self.books = self.random.choice((self.books, self.checkpoint)).saved()
        books = self.books
        left = self.steps - books.updates
        self.schedule = StalenessSchedule(
            self.settings, left, admitted=len(books.admitted_at), active=books.active
        )
        self.schedule.weights_updated()  # of the checkpoint's weights, which no step made: nothing changes


def random_run(seed: int) -> Run:
    """A run of up to 7 steps of up to 5 groups, with a random way to go wrong."""
    random = Random(seed)
    settings = Staleness(
        random.randint(1, 5),
        random.randint(0, 3),
        random.choice((0.05, 0.3, 0.5, 0.8, 1.0)),
    )
    return Run(
        settings,
        random.randint(1, 7),
        random,
        random.choice(list(FINISH_ORDERS.values())),
        release=random.choice((0.0, 0.0, 0.1, 0.4)),
        waiting=random.choice((1, 1, 2, 3)),
        prompt=random.choice((1.0, 0.5, 0.05)),
        losses=random.choice((0.0, 0.0, 0.02, 0.1)),
    )


@pytest.mark.parametrize(
    "seeds",
    [range(10_000), pytest.param(range(10_000, 110_000), marks=pytest.mark.slow)],
    ids=len,
)
def test_every_group_is_trained_once_within_its_age_and_no_run_stands_still(
    seeds: range,
) -> None:
    for seed in seeds:
        try:
            random_run(seed).to_the_end()
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"random_run({seed})") from error


SETTINGS = [
    Staleness(prompts, staleness, window)
    for prompts in (1, 2, 3, 8)
    for staleness in (0, 1, 2, 3)
    for window in (0.01, 0.3, 0.7, 1.0)
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_bound_of_the_age_is_reached(settings: Staleness) -> None:
    """By the youngest of the first groups, if it is last of all."""
    slow = settings.capacity - 1
    run = Run(
        settings,
        8 + settings.max_age,
        Random(0),
        lambda random, now, group: 1e6 if group == slow else group,
    )
    assert run.to_the_end().oldest == settings.max_age


def by_the_book(states: dict[int, GroupState], settings: Staleness) -> list[int]:
    """The rule of the module's head, a group at a time: the oldest ready of the W numbers from the oldest not
    taken.
    """
    left, taken = dict(states), []
    while left and len(taken) < settings.prompts_per_step:
        end = min(left) + settings.window_groups
        ready = [
            group
            for group, state in left.items()
            if group < end and state is GroupState.READY
        ]
        if not ready:
            return []
        taken.append(min(ready))
        del left[min(ready)]
    return taken if len(taken) == settings.prompts_per_step else []


@given(
    st.integers(1, 6),
    st.integers(0, 4),
    st.floats(0.01, 1.0),
    st.sets(st.integers(0, 40)),
    st.data(),
)
def test_a_step_takes_what_the_rule_says(
    prompts: int, staleness: int, window: float, active: set[int], data: st.DataObject
) -> None:
    settings = Staleness(prompts, staleness, window)
    schedule = StalenessSchedule(settings, 9, admitted=41, active=active)
    for group in sorted(active):
        if data.draw(st.booleans()):
            schedule.finish(group)
    expected = by_the_book({group: schedule.state(group) for group in active}, settings)
    assert schedule.take() == expected


@pytest.mark.parametrize(("event", "group"), [("finish", 7), ("finish", 0), ("release", 0)])
def test_an_impossible_event_is_refused(event: str, group: int) -> None:
    schedule = StalenessSchedule(Staleness(2, 0, 0.3), steps=1)
    schedule.admit()
    schedule.finish(0)
    with refused(f"group {group}", ValueError):
        getattr(schedule, event)(group)
