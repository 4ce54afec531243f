"""Records of a run that a crash, a disk or an editor has damaged, and texts that other readers split lines
at.
"""

import json
import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from balancing import BalancingError
from balancing.analysis.lengths_file import read_lengths, recorded_arguments, run_step
from ballast.pages.report import main as report
from ballast.pages.show import main as show
from ballast.pages.timeline import main as timeline
from ballast.replay.__main__ import main as replay
from controller.algorithm.validation_metrics import ScoredResponse
from controller.observability.run_folder import RunFolder, RunWriter
from controller.observability.timeline import read_timeline
from tests.controller.observability.recorded_run import write_run

SEPARATORS = "a\u2028b\u2029c\u0085d\u000be\u000cf\u001cg\rh\r\ni"
NAMES = ("metrics", "lengths", "samples", "timeline")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([10**400, 1e308]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "example"
    write_run(folder, steps=3)
    return folder


def test_a_text_with_line_separators_is_one_row_of_every_reader(
    run: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    sample = RunFolder(folder).samples[0] | {"step": 1, "response": SEPARATORS}
    with RunWriter(folder, (run / "config.yaml").read_text(), [], last_step=3) as writer:
        writer.samples(4, [sample])
        writer.validation(
            4,
            [
                ScoredResponse(
                    "0", "", {"reward": 1.0}, "", {"prompt": "", "response": SEPARATORS}
                )
            ],
        )
    with RunWriter(folder, (run / "config.yaml").read_text(), [], last_step=4):
        pass
    assert RunFolder(folder).samples[-1]["response"] == SEPARATORS
    assert len(RunFolder(folder).samples) == len(RunFolder(run).samples) + 1
    assert [row["response"] for row in RunFolder(folder).validation(4)] == [SEPARATORS]
    assert report([str(folder)]) == 0


def damaged(line: bytes) -> st.SearchStrategy[bytes]:
    """A line with another value under a key, without one, cut short, with bytes of a bad disk; or
    any JSON.
    """
    row: dict[str, Any] = json.loads(line)
    keys = st.sampled_from(sorted(row))
    return st.one_of(
        st.tuples(keys, VALUES).map(
            lambda found: json.dumps(row | {found[0]: found[1]}).encode()
        ),
        keys.map(
            lambda name: json.dumps({key: row[key] for key in row if key != name}).encode()
        ),
        st.integers(0, len(line) - 2).map(lambda end: line[:end]),
        st.tuples(st.integers(0, len(line) - 1), st.integers(0, 255)).map(
            lambda at: (line[: at[0]] + bytes([at[1]]) + line[at[0] + 1 :]).replace(
                b"\n", b""
            )
        ),
        st.sampled_from([b"\0" * 64, b"[" * 10_000, b"\xff\xfe", b"", b"1" * 5_001]),
        VALUES.map(lambda value: json.dumps(value).encode()),
    )


@settings(deadline=None, max_examples=4, phases=[Phase.generate])
@given(data=st.data())
def test_no_damaged_row_stops_a_command_or_costs_another_row(
    run: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = Path(shutil.copytree(run, tmp_path_factory.mktemp("damaged") / "run"))
    files = [folder / f"{name}.jsonl" for name in NAMES] + list(
        folder.glob("validation/*.jsonl")
    )
    for file in files:
        lines = file.read_bytes().splitlines()
        wrong = data.draw(
            st.lists(damaged(lines[-1]), min_size=5, max_size=40), label=file.name
        )
        file.write_bytes(b"\n".join([lines[0], *wrong, *lines[1:]]))
    before, after = RunFolder(run), RunFolder(folder)
    for name in ("metrics", "samples"):
        assert [
            row for row in getattr(before, name) if row not in getattr(after, name)
        ] == []
    assert report([str(folder)]) == timeline([str(folder)]) == show([str(folder)]) == 0
    with suppress(BalancingError):  # the line of another plan
        recorded_arguments(run_step(folder))
    assert replay([str(folder), "--step", "2"]) == 2, "no samples were recorded"
    with RunWriter(folder, (run / "config.yaml").read_text(), [], last_step=3):
        pass
    assert [row for row in before.samples if row not in RunFolder(folder).samples] == []


@pytest.mark.parametrize(
    "line", ["7", '{"lengths": [1]}', '{"step": true}', '{"step": 1', "\0\0\0"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_left_out_is_named_with_its_file_and_line(
    run: Path, tmp_path: Path, name: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    file = folder / f"{name}.jsonl"
    file.write_text(line + "\n" + file.read_text())
    with caplog.at_level(logging.WARNING):
        found = RunFolder(folder)
        assert (len(found.metrics), len(found.lengths), len(found.samples)) == (4, 3, 9)
        assert len(read_timeline(folder)) == 3
    assert {f"{file}:1" in text for text in caplog.messages} == {True}


def test_plain_files_of_lengths_are_split_at_newlines_alone(tmp_path: Path) -> None:
    """JSON lines and a quoted cell of CSV, which may hold any of the others, a newline too."""
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"length": 7, "text": SEPARATORS}, ensure_ascii=False)
    )
    (tmp_path / "a.csv").write_text(f'length,text\n7,"{SEPARATORS}\n"\n')
    for name in ("a.jsonl", "a.csv"):
        assert np.array_equal(read_lengths(tmp_path / name), [7])
