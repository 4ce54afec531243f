"""A phase is reported once and reaches the terminal, Prometheus, the timeline and the seconds of its step."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from controller.observability.run_folder import RunFolder, RunWriter
from controller.observability.run_record import RunRecord, advantages_of
from controller.observability.timeline import read_timeline, trace_events
from tests.controller.observability.test_console import recorded
from tests.controller.observability.trace_format import check, slices_of
from workers.batch.dataproto import object_column
from workers.batch.remote_batch import RemoteBatch


class Recording:
    """A RunRecord in `folder`, and what its parts received."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.terminal = folder, recorded(terminal=True)
        self.exported: list[tuple[str, float]] = []
        self.writer = RunWriter(folder, "", [])
        live = LiveMetrics(lambda name, value: self.exported.append((name, value)))
        self.record = RunRecord(Console(self.terminal), live, self.writer)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    found = Recording(tmp_path)
    with found.writer:
        yield found


def test_a_phase_reaches_every_place(recording: Recording) -> None:
    record = recording.record
    with record.step(3, 20):
        for _ in range(2):
            with record.phase("update"):
                sum(range(1_000))
    record.write_timeline(3)
    assert 0 < record.times()["time/update_s"] <= record.times()["time/step_s"]
    assert (
        recording.exported.count(("phase/update", 1.0))
        == recording.exported.count(("phase/update", 0.0))
        == 2
    )
    assert "3/20" in recording.terminal.file.getvalue()
    made = {"traceEvents": trace_events(read_timeline(recording.folder))}
    check(made)
    names = [event["name"] for event in slices_of(made, "driver", "phases")]
    assert sorted(names) == ["step", "update", "update"]
    with record.phase("validation"):
        pass
    with record.step(4, 20):
        pass
    assert list(record.seconds) == ["step"]


def test_a_phase_that_fails_ends_everywhere(recording: Recording) -> None:
    record = recording.record
    with pytest.raises(KeyError), record.phase("save"):
        raise KeyError
    assert recording.exported == [("phase/save", 1.0), ("phase/save", 0.0)]
    drawn = recording.terminal.file.getvalue()
    assert "save" in drawn
    assert drawn.count("\x1b[?25h") == 1  # the cursor is back
    record.write_timeline(0)
    (line,) = (recording.folder / "timeline.jsonl").read_text().splitlines()
    assert [name for name, _, _ in json.loads(line)["phases"]] == ["save"]


def test_skipped_optimiser_steps_have_a_line_a_step(recording: Recording) -> None:
    record = recording.record
    for step, skipped in ((1, 2.0), (2, 0.0)):
        with record.step(step, 2):
            pass
        record.add(
            {
                "policy/skipped_steps": skipped,
                "critic/skipped_steps": 0.0,
                "policy/loss": 0.5,
            }
        )
        record.end_step(step, 2)
    (row,) = RunFolder(recording.folder).failures
    assert (row["step"], row["count"]) == (1, 2)
    assert "policy.optimizer.max_skipped_steps" in row["kind"]
    assert "optimiser steps skipped" in recording.terminal.file.getvalue()


def test_advantages_of_turns_follow_their_samples() -> None:
    rows = {"uid": np.array(["a", "a", "b"]), "sample": np.array([0, 0, 1])}
    by_turn = object_column([((4, 0.5), (2, 1.0)), ((3, -1.0),), ((9, 2.0),)])
    assert advantages_of(RemoteBatch({**rows, "by_turn": by_turn}, {})) == {
        ("a", 0): {"advantages": [0.5, 1.0, -1.0]},
        ("b", 1): {"advantages": [2.0]},
    }
    assert advantages_of(RemoteBatch(rows, {})) == {}
