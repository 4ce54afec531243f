"""The fleet as a state machine: who serves has the current weights, and restarts are bounded."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controller.engines.fleet import UP, Fleet, RestartBudget, State
from tests.refusals import refused

REPLICAS, RESTARTS = 3, 4
THERE = (State.STARTING, State.ASLEEP, *UP)
MOVES = {
    "drain": ((State.CURRENT,), State.DRAINING),
    "resume": ((State.DRAINING,), State.CURRENT),
    "sleep": (UP, State.ASLEEP),
    "wake": ((State.ASLEEP,), State.STALE),
}
"""States that an event is for, and the state after it."""


class FleetMachine(RuleBasedStateMachine):
    """Keeps the weights that each engine really has beside the fleet's books."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = RestartBudget(RESTARTS)
        self.fleet = Fleet(REPLICAS, self.budget)
        self.weights: dict[int, int] = {}
        self.restarted = 0
        # Who finished a sample.
        self.history: dict[int, list[bool]] = {
            replica: [False] for replica in range(REPLICAS)
        }

    def draw(self, data: st.DataObject, *states: State) -> int:
        return data.draw(st.sampled_from(self.fleet.in_state(*states)))

    def by_weights(self, replica: int) -> State:
        return State.CURRENT if self.weights[replica] == self.fleet.version else State.STALE

    @precondition(lambda self: self.fleet.in_state(State.STARTING))
    @rule(data=st.data())
    def started(self, data: st.DataObject) -> None:
        replica = self.draw(data, State.STARTING)
        self.fleet.mark_started(replica)
        self.weights[replica] = 0
        assert self.fleet.state(replica) is self.by_weights(replica)

    @precondition(lambda self: self.fleet.in_state(State.STALE))
    @rule(data=st.data(), behind=st.integers(0, 2))
    def updated(self, data: st.DataObject, behind: int) -> None:
        """With what is current, or with weights that became old on the way."""
        replica, version = self.draw(data, State.STALE), max(0, self.fleet.version - behind)
        self.fleet.mark_updated(replica, version)
        self.weights[replica] = version
        assert self.fleet.state(replica) is self.by_weights(replica)

    @rule(by=st.integers(0, 3))
    def new_version(self, by: int) -> None:
        had = self.fleet.in_state(State.CURRENT, State.DRAINING)
        self.fleet.new_version(self.fleet.version + by)
        assert {self.fleet.state(replica) for replica in had} <= {State.STALE}

    @rule(data=st.data(), event=st.sampled_from(sorted(MOVES)))
    def move(self, data: st.DataObject, event: str) -> None:
        before, after = MOVES[event]
        if self.fleet.in_state(*before):
            replica = self.draw(data, *before)
            getattr(self.fleet, event)(replica)
            assert self.fleet.state(replica) is after
            if after is State.ASLEEP:
                self.weights.pop(replica, None)

    @precondition(lambda self: self.fleet.in_state(*THERE))
    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        replica = self.draw(data, *THERE)
        self.fleet.mark_lost(replica)
        self.weights.pop(replica, None)

    @precondition(lambda self: self.fleet.in_state(State.DEAD))
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        replica = self.draw(data, State.DEAD)
        may = self.budget.left > 0 and self.history[replica][-2:] != [False, False]
        assert self.fleet.restart(replica) == may
        self.restarted += may
        self.history[replica] += [False] * may
        assert self.fleet.state(replica) is (State.STARTING if may else State.DEAD)

    @precondition(lambda self: self.fleet.serving)
    @rule(data=st.data())
    def finishes_a_sample(self, data: st.DataObject) -> None:
        replica = self.draw(data, State.CURRENT)
        self.fleet.mark_finished_samples(replica)
        self.history[replica][-1] = True

    @invariant()
    def who_serves_has_the_current_weights(self) -> None:
        for replica in self.fleet.serving:
            assert self.weights[replica] == self.fleet.version

    @invariant()
    def restarts_are_counted_and_bounded(self) -> None:
        assert self.budget.engines == self.restarted <= RESTARTS

    @invariant()
    def every_engine_is_in_one_state(self) -> None:
        assert sorted(
            replica for state in State for replica in self.fleet.in_state(state)
        ) == list(range(REPLICAS))


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_recoveries_of_the_run_and_restarts_of_engines_share_one_budget() -> None:
    budget = RestartBudget(2, recoveries=1)
    fleet = Fleet(1, budget)
    fleet.mark_lost(0)
    assert fleet.restart(0)
    fleet.mark_lost(0)
    assert not fleet.restart(0)
    assert budget.metrics() == {"restarts/engines": 1.0, "restarts/recoveries": 1.0}


@pytest.mark.parametrize("event", ["mark_updated", "restart", *MOVES])
def test_an_event_that_cannot_happen_is_refused_by_name(event: str) -> None:
    arguments = (0, 1) if event == "mark_updated" else (0,)
    with refused("engine 0", ValueError):
        getattr(Fleet(1, RestartBudget(1)), event)(*arguments)
    fleet = Fleet(1, RestartBudget(0))
    with refused("version -1", ValueError):
        fleet.new_version(-1)
