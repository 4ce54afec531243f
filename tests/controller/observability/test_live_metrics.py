"""What is told as a run goes on, without Ray: to a list in place of the exporter."""

import numpy as np
import pytest

from balancing import CostModel
from controller.engines.fleet import Fleet, RestartBudget, State
from controller.observability.live_metrics import LiveMetrics, rank_seconds
from controller.observability.metric_table import LIVE, SECTIONS, spec_of
from workers.batch.remote_batch import RemoteBatch
from workers.model.timing import MicroStepTime


class Told:
    """Everything that was told, in order."""

    def __init__(self) -> None:
        self.everything: list[tuple[str, tuple[str, ...], float]] = []
        self.live = LiveMetrics(self.export)

    def export(self, name: str, value: float) -> None:
        found = spec_of(name)
        assert found and found[0] in SECTIONS[LIVE]
        self.everything.append((found[0].name, tuple(found[1].values()), value))

    def of(self, name: str) -> list[tuple[tuple[str, ...], float]]:
        """(labels, value) of one metric."""
        return [
            (labels, value) for found, labels, value in self.everything if found == name
        ]

    def on(self, name: str) -> set[tuple[str, ...]]:
        """Labels of the series whose last value is 1."""
        return {labels for labels, value in dict(self.of(name)).items() if value == 1}


def test_one_phase_is_on_at_a_time_the_innermost_also_after_an_error() -> None:
    told = Told()
    with told.live.phase("step"):
        assert told.on("phase/{phase}") == {("step",)}
        with pytest.raises(KeyError), told.live.phase("update"):
            assert told.on("phase/{phase}") == {("update",)}
            raise KeyError
        assert told.on("phase/{phase}") == {("step",)}
    assert told.on("phase/{phase}") == set()


def test_every_engine_is_in_one_state_from_its_start_to_its_restart() -> None:
    told = Told()
    fleet = Fleet(2, RestartBudget(1), told.live.engine_state)
    assert told.on("engine/state/{replica}/{state}") == {
        ("0", "starting"),
        ("1", "starting"),
    }
    for change in (
        lambda: fleet.mark_started(0),
        lambda: fleet.new_version(1),
        lambda: fleet.mark_updated(0, 1),
        lambda: fleet.drain(0),
        lambda: fleet.resume(0),
        lambda: fleet.mark_lost(0),
        lambda: fleet.restart(0),
    ):
        change()
        assert told.on("engine/state/{replica}/{state}") == {
            (str(replica), fleet.state(replica).name.lower()) for replica in (0, 1)
        }
    assert fleet.state(0) is State.STARTING


def test_queues_are_told_when_they_change() -> None:
    told = Told()
    told.live.queues(3, [4, 4])
    told.live.queues(3, [4, 3])
    told.live.queues(0, [4, 3])
    assert told.of("rollout/requests_waiting") == [((), 3), ((), 0)]
    assert told.of("engine/requests_in_flight/{replica}") == [
        (("0",), 4),
        (("1",), 4),
        (("1",), 3),
    ]


def test_every_sample_counts_and_rewards_may_be_of_any_size() -> None:
    told = Told()
    columns = {
        "response_tokens": [7, 9, 8],
        "seconds": [1.0, 2.0, 3.0],
        "reward": [-1.0, 0.0, 3.0],
    }
    told.live.samples(
        RemoteBatch({name: np.array(values) for name, values in columns.items()}, {})
    )
    assert [value for _, value in told.of("sample/response_tokens")] == [7, 9, 8]
    quantiles = {labels[0]: value for labels, value in told.of("sample/reward/{quantile}")}
    assert quantiles == pytest.approx(
        {"0": -1.0, "0.1": -0.8, "0.5": 0.0, "0.9": 2.4, "1": 3.0}
    )


def micro_step(name: str, seconds: float, tokens: int) -> MicroStepTime:
    return MicroStepTime(name, 0.0, seconds, tokens, tokens**2)


def test_a_rank_is_predicted_its_share_of_what_its_roles_pass_took() -> None:
    """Costs 2 L + L^2: 8 and 15 on rank 0, 24 on rank 1, together 47; the role's update took 9.4 s."""
    times = {
        "policy dp=0": [
            micro_step("update", 2.0, 2),
            micro_step("update", 3.0, 3),
            micro_step("log_probs", 1.0, 3),
        ],
        "policy dp=1": [micro_step("update", 4.4, 4), micro_step("log_probs", 3.0, 3)],
        "critic dp=0": [micro_step("update", 7.0, 1)],
    }
    found = rank_seconds(times, CostModel(2.0, 1.0))
    assert found["policy dp=0", "update"] == (5.0, pytest.approx(4.6))
    assert found["policy dp=1", "update"] == (4.4, pytest.approx(4.8))
    assert found["policy dp=0", "log_probs"] == (1.0, 2.0)
    assert found["critic dp=0", "update"] == (7.0, 7.0)


def test_micro_steps_without_work_are_no_measurement() -> None:
    told = Told()
    told.live.micro_steps(
        {"policy dp=1 cp=0": [micro_step("update", 0.2, 0)]}, CostModel(1.0, 0.0)
    )
    assert told.of("micro_step/{role}/{rank}/{phase}_s") == []
    told.live.micro_steps(
        {"policy dp=1 cp=0": [micro_step("update", 0.2, 5)]}, CostModel(1.0, 0.0)
    )
    assert told.of("micro_step/{role}/{rank}/{phase}_s") == [
        (("policy", "dp=1 cp=0", "update"), 0.2)
    ]
