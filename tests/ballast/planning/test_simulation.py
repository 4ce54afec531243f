"""The simulated schedule: every group is trained once, ages keep their bound, and time is what the engines
take.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.planning.simulation import EngineSpeed, Phase, SimulatedRun, SimulatedSample, simulate
from controller.engines.staleness_schedule import Staleness

SPEED = EngineSpeed(0.01, 0.001, 0.0)


def run_of(lengths: np.ndarray, staleness: Staleness, engines: int = 1, **changed: object) -> SimulatedRun:
    """lengths: of responses, [groups, samples]."""
    groups = [[SimulatedSample(int(tokens), 10, 0.0) for tokens in group] for group in lengths]
    run = SimulatedRun(staleness, engines, 16, groups, frozenset(), SPEED, lambda taken: [Phase(0.5)])
    return replace(run, **changed)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_group_is_trained_once_and_no_older_than_the_bound(data: st.DataObject) -> None:
    staleness = Staleness(
        data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3)), data.draw(st.floats(0.1, 1.0))
    )
    pair = st.lists(st.integers(1, 60), min_size=2, max_size=2)
    lengths = np.array(data.draw(st.lists(pair, min_size=9, max_size=24)))
    released = frozenset(data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=4)))
    trained: list[int] = []

    def phases(taken: Sequence[int]) -> list[Phase]:
        trained.extend(taken)
        return [Phase(data.draw(st.floats(0.0, 0.6))), Phase(0.1, pause=0.05)]

    run = run_of(lengths, staleness, data.draw(st.integers(1, 3)), released=released, phases=phases)
    steps = simulate(run)
    assert len(steps) == run.steps
    assert len(set(trained)) == len(trained) == run.steps * staleness.prompts_per_step
    assert not released & set(trained)
    assert max((age for step in steps for age in step.ages), default=0) <= staleness.max_age


def test_a_step_takes_its_longest_response_and_its_phases() -> None:
    (first, second) = simulate(run_of(np.array([[10, 10], [10, 40]]), Staleness(1, 0, 0.3)))
    assert first.seconds == pytest.approx(10 * 0.012 + 0.5)
    assert second.seconds == pytest.approx(10 * 0.012 + 30 * 0.011 + 0.5)
    assert second.waited == pytest.approx(10 * 0.012 + 30 * 0.011)
    assert second.engines_idle == pytest.approx(0.5 / second.seconds)


def test_prompts_delays_pauses_and_shared_cores_take_their_time() -> None:
    lengths = np.array([[10, 10]])
    groups = [[SimulatedSample(10, 50, 0.25) for _ in range(2)]]
    run = run_of(lengths, Staleness(1, 0, 0.3), groups=groups, speed=replace(SPEED, prompt_token=0.002))
    (step,) = simulate(run)
    assert step.seconds == pytest.approx(
        0.1 + 10 * 0.012 + 0.25 + 0.5
    )  # the second sample finds the prompt cached
    slow = replace(run, engine_cores=4.0, cores=2.0, phases=lambda taken: [Phase(0.5, cores=1.0)])
    (step,) = simulate(slow)
    assert step.seconds == pytest.approx(2 * (0.1 + 10 * 0.012) + 0.25 + 0.5)


def test_staleness_hides_generation_behind_training() -> None:
    lengths = np.full((40, 4), 30)
    alone = 30 * 0.014
    synchronous, ahead = (
        simulate(run_of(lengths, Staleness(1, staleness, 0.3), phases=lambda taken: [Phase(alone)]))
        for staleness in (0, 1)
    )
    assert synchronous[-1].seconds == pytest.approx(2 * alone)
    assert ahead[-1].seconds == pytest.approx(alone, rel=0.05)


def test_a_pause_longer_than_its_phase_stops_the_next_step() -> None:
    run = run_of(np.full((2, 1), 10), Staleness(1, 0, 0.3), phases=lambda taken: [Phase(0.1, pause=0.3)])
    first, second = simulate(run)
    assert first.seconds == pytest.approx(10 * 0.011 + 0.1)
    assert second.seconds == pytest.approx(0.2 + 10 * 0.011 + 0.1)
