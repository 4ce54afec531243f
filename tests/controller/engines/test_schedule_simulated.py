"""The simulated runs of the benchmark: what they count, and what the schedule buys in them."""

import pytest

from tests.benchmarks.schedule.rows import Row, WholeSteps, compared, result, windowed
from tests.benchmarks.schedule.simulator import Record, Workload

SMALL = Workload(steps=24, prompts_per_step=8, samples=4, engines=2, slots=16)


def times(record: Record) -> list[tuple[float, float]]:
    return [(step.start, step.end) for step in record.steps]


def test_without_staleness_the_schedule_is_the_synchronous_run() -> None:
    synchronous = Row("", lambda: WholeSteps(SMALL, ahead=0), 0)
    assert times(windowed(SMALL, 0, 0.3).run(SMALL, 0)) == times(synchronous.run(SMALL, 0))


def test_two_steps_of_staleness_more_than_double_the_speed_and_put_off_no_long_response() -> (
    None
):
    workload = Workload(steps=60)
    synchronous, ours = (
        result(row.run(workload, 0))
        for row in (compared(workload)[0], windowed(workload, 2, 0.3))
    )
    assert ours.tokens_per_second > 2.2 * synchronous.tokens_per_second
    assert ours.mean_length == 1.0
    assert ours.steady_length == pytest.approx(1.0, abs=0.01)
    assert ours.wasted == 0.0
