"""`python -m ballast show`: a step's recorded samples as a table, one of them as a tree, and refusals in one
line.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ballast.commands import main
from tests.controller.observability.recorded_run import write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs") / "example"
    write_run(found, steps=3)
    return found


def test_the_table_of_a_step_has_a_line_for_each_sample(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder), "--step", "2"]) == 0
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "step 2"
    assert header.split() == [
        "session",
        "turns",
        "branches",
        "tokens",
        "reward",
        "advantage",
        "prompt",
    ]
    assert [line.split()[:2] for line in lines] == [["1", "1"], ["2", "6"], ["3", "1"]]
    assert lines[1].split()[2:6] == ["4", "60", "0.500", "+0.750"]
    assert max(map(len, [title, header, *lines])) <= 80


def test_a_session_is_drawn_as_a_tree_plain_in_a_pipe(folder: Path) -> None:
    command = [sys.executable, "-m", "ballast", "show", str(folder), "--session", "2"]
    text = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    assert text.startswith(
        "step 3, session 2\nturns 6, branches 4, dropped 1, tokens 60, reward 0.500, advantage"
    )
    assert "branch from the start" in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80


def test_held_out_responses_are_shown_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder), "--validation"]) == 0
    assert "validation at step 3" in capsys.readouterr().out
    assert main(["show", str(folder), "--validation", "--session", "2"]) == 0
    assert "onerror=" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--step", "9"),
        ("--step", "x"),
        ("--session", "0"),
        ("--session", "4"),
        ("--validation", "--step", "2"),
    ],
)
def test_what_was_not_recorded_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(["show", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and arguments[-2] in error


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
