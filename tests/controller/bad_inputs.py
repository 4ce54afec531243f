"""Inputs that must be refused, each in one line: a table's rows, and the check that is the same for all of
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller import fit

COMMAND = ("--config", "config.yaml")


@dataclass(frozen=True)
class BadInput:
    """One row, in the folder of `tests.controller.config_workspace`.

    words: what the line on stderr must say, in any place. overrides: of the workspace's configuration. write:
    changes the workspace's files; it is given the folder. code: the exit code. told: what is said on stdout
    before.
    """

    name: str
    words: Sequence[str]
    overrides: Sequence[str] = ()
    write: Callable[[Path], object] | None = None
    code: int = 2
    told: Sequence[str] = ()


def rows(*cases: BadInput) -> pytest.MarkDecorator:
    """The rows as parameters `case` of a test, by name."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def check_refused(
    case: BadInput,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> None:
    """Run the command with `options` in this process: it ends with the row's code and line, having started
    nothing.

    folder: the working directory, a workspace. Only for what cannot end or block the process that reads it.
    """
    monkeypatch.setattr(fit, "run", _must_not_run)
    if case.write is not None:
        case.write(folder)
    capfd.readouterr()
    code = fit.main([*COMMAND, *options, *case.overrides])
    written = capfd.readouterr()
    check_line(case, code, written.err)
    assert [word for word in case.told if word not in written.out] == [], written.out
    assert not list(folder.glob("runs/*")), "a refused run has written a folder"


def check_line(case: BadInput, code: int, errors: str) -> None:
    """The exit code, and one line on stderr, `error: ...`, with every word of the row."""
    assert code == case.code, errors
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), errors
    assert [word for word in case.words if word not in lines[0]] == [], lines[0]
    assert not lines[0].endswith(".."), lines[0]


def _must_not_run(*_: Any) -> None:
    raise AssertionError("the input was not refused: the run began")
