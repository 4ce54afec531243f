"""The simulated runs of the benchmark: what they count, and what the schedule buys in them."""

from dataclasses import replace

import pytest

from tests.benchmarks.schedule.rows import Row, WholeSteps, compared, result, windowed
from tests.benchmarks.schedule.simulator import Record, Workload

SMALL = Workload(steps=24, prompts_per_step=8, samples=4, engines=2, slots=16)


def times(record: Record) -> list[tuple[float, float]]:
    return [(step.start, step.end) for step in record.steps]


@pytest.mark.parametrize("row", compared(SMALL), ids=lambda row: row.name)
def test_every_prompt_is_trained_or_discarded_once_and_none_is_older_than_the_bound(
    row: Row,
) -> None:
    record = row.run(SMALL, seed=0)
    groups = [*record.discarded, *(group for step in record.steps for group in step.groups)]
    assert sorted(groups) == list(range(SMALL.groups))
    assert max(age for step in record.steps for age in step.ages) <= row.bound


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


def test_discards_favour_short_responses() -> None:
    workload = replace(SMALL, steps=80)
    greedy = next(row for row in compared(workload) if "discards above 1" in row.name)
    discarding = result(greedy.run(workload, 0))
    assert discarding.wasted > 0.1
    assert discarding.mean_length < 0.95
