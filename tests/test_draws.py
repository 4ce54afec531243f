"""Which cases and whole runs a commit draws, and that none is lost."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import (
    RUNS_ALWAYS,
    RUNS_DRAWN,
    leave_cases_to_slow,
    leave_runs_to_slow,
    parameter_values,
    shuffle_items,
)
from tests.long_tests import (
    LEAST_SECONDS,
    ONE_OF,
    draw_tests,
    format_list,
    leave_long_to_slow,
    name_test,
    sum_by_test,
)


class Case:
    """What the draws read of a collected test."""

    def __init__(self, nodeid: str, **markers: Any) -> None:
        self.nodeid = nodeid
        self.path = Path(nodeid.partition("::")[0])
        self.callspec: Any = None
        self.markers = markers

    def get_closest_marker(self, name: str) -> Any:
        return self.markers.get(name)

    def add_marker(self, name: str) -> None:
        self.markers[name] = SimpleNamespace(args=(), kwargs={})


def matrix(count: int, always: tuple[str, ...] = ()) -> list[Any]:
    marker = SimpleNamespace(args=(count,), kwargs={"always": always})
    return [
        Case(f"tests/test_a.py::test_b[{number}]", drawn=marker) for number in range(20)
    ]


def quick(cases: list[Any]) -> list[str]:
    return [case.nodeid for case in cases if "slow" not in case.markers]


def test_a_commit_draws_the_same_cases_and_another_one_others() -> None:
    drawn = []
    for seed in ("a", "a", "b"):
        cases = matrix(5)
        leave_cases_to_slow(cases, seed)
        drawn.append(quick(cases))
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == len(drawn[2]) == 5


def test_fixed_cases_are_kept_beside_the_drawn_ones_and_a_single_one_always() -> None:
    cases = matrix(3, always=("4", "7"))
    leave_cases_to_slow(cases, "a")
    assert {"tests/test_a.py::test_b[4]", "tests/test_a.py::test_b[7]"} < set(quick(cases))
    assert len(quick(cases)) == 5
    (single,) = matrix(3)[:1]
    leave_cases_to_slow([single], "a")
    assert quick([single])


def grid(count: int, *sizes: int) -> list[Any]:
    marker = SimpleNamespace(args=(count,), kwargs={"covers": True})
    cases = []
    for values in itertools.product(*map(range, sizes)):
        case = Case(f"tests/test_a.py::test_b[{values}]", drawn=marker)
        case.callspec = SimpleNamespace(params=dict(zip("xyz", values, strict=False)))
        cases.append(case)
    return cases


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    count=st.integers(1, 12),
    seed=st.text(max_size=3),
)
def test_a_draw_that_covers_has_each_value_of_each_parameter(
    sizes: list[int], count: int, seed: str
) -> None:
    """And no more cases than that needs: one new value each at least."""
    cases = grid(count, *sizes)
    leave_cases_to_slow(cases, seed)
    kept = [case for case in cases if "slow" not in case.markers]
    values = set().union(*map(parameter_values, cases))
    assert set().union(*map(parameter_values, kept)) == values
    assert min(count, len(cases)) <= len(kept) <= max(count, len(values))


def test_another_commit_covers_with_other_cases() -> None:
    drawn = []
    for seed in ("a", "a", "b"):
        cases = grid(4, 4, 6)
        leave_cases_to_slow(cases, seed)
        drawn.append(quick(cases))
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 6


@pytest.mark.parametrize("seed", ["a", "b"])
def test_some_files_of_whole_runs_are_drawn_and_others_always_run(seed: str) -> None:
    names = [*RUNS_ALWAYS, *(f"test_run_{number}" for number in range(8))]
    cases: list[Any] = [Case(f"tests/end_to_end/{name}.py::test_it") for name in names]
    others: list[Any] = [Case("tests/test_other.py::test_it")]
    leave_runs_to_slow([*cases, *others], seed)
    assert len(quick(cases)) == len(RUNS_ALWAYS) + RUNS_DRAWN
    assert all(any(name in nodeid for nodeid in quick(cases)) for name in RUNS_ALWAYS)
    assert quick(others)


def test_a_seed_shuffles_files_and_tests_inside_files_and_keeps_files_whole() -> None:
    names = [
        f"tests/test_{file}.py::test_{number}" for file in range(5) for number in range(5)
    ]
    orders = []
    for seed in ("a", "a", "b"):
        cases: list[Any] = [Case(name) for name in names]
        shuffle_items(cases, seed)
        orders.append([case.nodeid for case in cases])
        assert sorted(orders[-1]) == names
        files = [case.path for case in cases]
        assert all(len(set(files[start : start + 5])) == 1 for start in range(0, 25, 5))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != names


def long_report(nodeid: str, seconds: float, when: str = "call") -> Any:
    return SimpleNamespace(nodeid=nodeid, duration=seconds, when=when)


def test_long_tests_are_listed_by_their_seconds_without_set_up() -> None:
    reports = [
        long_report("tests/test_a.py::test_one", LEAST_SECONDS - 0.1),
        long_report("tests/test_a.py::test_one", 30, "setup"),
        long_report("tests/test_a.py::test_two[1/2]", LEAST_SECONDS / 2),
        long_report("tests/test_a.py::test_two[x]", LEAST_SECONDS),
        long_report("tests/test_a.py::test_three", 7.2),
        long_report("tests/end_to_end/test_b.py::test_run", 40),
        SimpleNamespace(message="a warning"),
    ]
    lines = format_list(sum_by_test(reports)).splitlines()
    assert lines == ["7 tests/test_a.py::test_three", "2 tests/test_a.py::test_two"]


@given(count=st.integers(0, 40), seed=st.text(max_size=3))
def test_one_of_six_long_tests_runs_and_the_others_are_slow(count: int, seed: str) -> None:
    names = [f"tests/test_a.py::test_{number}" for number in range(count)]
    cases: list[Any] = [Case(f"{name}[{case}]") for name in names for case in "ab"]
    short: Any = Case("tests/test_a.py::test_short")
    leave_long_to_slow([*cases, short], names, seed)
    kept = {name_test(name) for name in quick(cases)}
    assert kept == draw_tests(names, seed)
    groups = [names[first : first + ONE_OF] for first in range(0, count, ONE_OF)]
    assert [len(kept & set(group)) for group in groups] == [1] * len(groups)
    assert len(quick(cases)) == 2 * len(kept)
    assert quick([short])


def test_every_long_test_is_drawn_by_some_commit() -> None:
    names = [f"tests/test_a.py::test_{number}" for number in range(30)]
    draws = [draw_tests(names, str(seed)) for seed in range(40)]
    assert set().union(*draws) == set(names)
    assert len(set(map(frozenset, draws))) > 30
