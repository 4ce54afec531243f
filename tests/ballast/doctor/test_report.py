"""Lines, their joining over nodes, and that one failure stops no other check."""

import sys
from threading import Event

import pytest

from ballast.doctor.report import Report, Status, fail, merge_findings, ok, warn


def test_a_line_says_status_what_was_found_and_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report()
    report.add(
        ok("GPUs", "none"),
        warn("open files", "at most 1,024", "raise it"),
        fail("driver", "old", "install"),
    )
    assert capsys.readouterr().out.splitlines() == [
        "ok    GPUs: none",
        "warn  open files: at most 1,024; raise it",
        "FAIL  driver: old; install",
    ]
    assert report.exit_code == 1
    report.findings.pop()
    assert report.exit_code == 0, "only a failure is one"


def test_a_check_that_raises_is_a_failure_and_the_next_one_is_made() -> None:
    report = Report()
    with report.guarding("first", "do this"):
        raise RuntimeError("no\nroute")
    with report.guarding("second", ""):
        report.add(ok("second", "fine"))
    with pytest.raises(KeyboardInterrupt), report.guarding("third", ""):
        raise KeyboardInterrupt
    assert report.findings == [
        fail("first", "RuntimeError: no route", "do this"),
        ok("second", "fine"),
    ]


def test_a_check_that_lasts_is_told_beside_the_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Event()

    def told(what: str, **_: object) -> None:
        print(what, file=sys.stderr)
        said.set()

    monkeypatch.setattr("ballast.doctor.report.print", told, raising=False)
    report = Report()
    with report.guarding("all-reduce", ""):
        assert said.wait(60)
        report.add(ok("all-reduce", "fine"))
    assert capsys.readouterr().err.splitlines()[0] == "...   all-reduce"


def test_equal_findings_of_nodes_are_one_line_and_others_name_their_node() -> None:
    assert merge_findings({"a": [ok("GPUs", "none")]}) == [ok("GPUs", "none")]
    small = fail("/dev/shm", "0.1 GiB", "raise it")
    by_node = {
        "a": [ok("GPUs", "8"), ok("/dev/shm", "8 GiB")],
        "b": [ok("GPUs", "8"), small],
        "c": [ok("GPUs", "8"), ok("/dev/shm", "8 GiB")],
    }
    found = merge_findings(by_node)
    assert [(finding.name, finding.status) for finding in found] == [
        ("GPUs (all 3 nodes)", Status.OK),
        ("/dev/shm (2 nodes, a first)", Status.OK),
        ("/dev/shm (b)", Status.FAIL),
    ]
    found = merge_findings(
        {"a": [ok("GPUs", "8"), ok("network", "eth0")], "b": [fail("node", "gone", "look")]}
    )
    assert [finding.name for finding in found] == ["GPUs (a)", "network (a)", "node (b)"]
