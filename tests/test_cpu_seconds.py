"""CPU seconds of tests are summed by folder, and long tests say what they are for."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.cpu_seconds import (
    LONG_SECONDS,
    SECONDS,
    STARTED,
    UNEXPLAINED,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    sum_by_folder,
)


def report(nodeid: str, seconds: float) -> Any:
    return SimpleNamespace(
        nodeid=nodeid, user_properties=[(SECONDS, seconds), ("other", 7)]
    )


def test_seconds_are_of_folders_and_of_files_beside_them() -> None:
    reports = [
        report("tests/workers/model/test_a.py::test_one[x/y]", 1.5),
        report("tests/workers/model/sharding/test_b.py::test_two", 2.0),
        report("tests/test_c.py::test_three", 0.25),
    ]
    assert sum_by_folder(reports) == {"tests/workers/model": 3.5, "tests/test_c.py": 0.25}


def test_work_of_a_test_is_counted_when_it_has_ended() -> None:
    item: Any = SimpleNamespace(stash=pytest.Stash(), user_properties=[])
    pytest_runtest_setup(item)
    item.stash[STARTED] -= 3
    pytest_runtest_makereport(item, SimpleNamespace(when="call", duration=1))  # type: ignore[arg-type]
    assert item.user_properties == []
    pytest_runtest_makereport(item, SimpleNamespace(when="teardown", duration=1))  # type: ignore[arg-type]
    ((name, seconds),) = item.user_properties
    assert name == SECONDS
    assert seconds >= 3


@pytest.mark.parametrize(
    ("function", "module", "seconds", "named"),
    [
        ("", "", LONG_SECONDS + 1, True),
        ("", "", LONG_SECONDS - 1, False),
        ("Only here does Ray place bundles.", "", LONG_SECONDS + 1, False),
        ("", "A run. Only here, weights travel.", LONG_SECONDS + 1, False),
        ("About images.", "Runs.", LONG_SECONDS + 1, True),
    ],
)
def test_a_long_test_without_a_reason_is_named(
    function: str, module: str, seconds: float, named: bool
) -> None:
    def test() -> None: ...

    test.__doc__ = function
    item: Any = SimpleNamespace(
        obj=test,
        module=ModuleType("tests.made", module),
        stash=pytest.Stash(),
        user_properties=[],
    )
    pytest_runtest_makereport(item, SimpleNamespace(when="call", duration=seconds))  # type: ignore[arg-type]
    assert ((UNEXPLAINED, seconds) in item.user_properties) == named
