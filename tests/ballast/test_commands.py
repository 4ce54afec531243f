"""One name for all commands: each reaches its module's main with the arguments that it was given."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ballast import __version__
from ballast.commands import COMMANDS, REMOVED, help_page, main
from tests.controller.config_workspace import write_workspace

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_modules_with_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = importlib.import_module(COMMANDS[name].module), []
    monkeypatch.setattr(module, "main", lambda arguments: given.append(arguments) or 7)
    assert main([name, "--config", "mine.yaml", "a.b=c"]) == 7
    assert given == [["--config", "mine.yaml", "a.b=c"]]


def test_a_command_runs_as_its_module_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_workspace(tmp_path)
    assert main(["fit", "--config", str(config), "run.stepps=1"]) == 2
    assert "run.stepps is not a setting; did you mean run.steps?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_there_is_the_list_of_them(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == help_page() + "\n"
    assert [
        line.split()[0] for line in help_page().splitlines() if line.startswith("  ")
    ] == list(COMMANDS)


def test_a_name_that_is_none_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preferencs"]) == 2
    assert (
        capsys.readouterr().err
        == "error: ballast has no command 'preferencs'; did you mean preferences?\n"
    )


def test_a_removed_command_names_its_successor_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["whatif", "runs/addition", "rollout.max_staleness=1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ballast whatif was removed. ")
    assert "--measured" in message and message.count("\n") == 1
    assert not REMOVED.keys() & COMMANDS.keys()


@pytest.mark.parametrize("name", ["report", "show"])
def test_a_missing_folder_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere: ")


def test_the_version_is_the_changelogs_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ballast {__version__}\n"
    assert (
        re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
        == __version__
    )


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ballast pref", "preferences"),
        ("ballast fit policy.optimizer.eps", "policy.optimizer.epsilon="),
    ],
)
def test_the_tab_key_completes_commands_and_settings(
    words: str, completed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion"]) == 0
    typed = f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _ballast; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(
        ["bash", "-c", capsys.readouterr().out + typed], text=True, capture_output=True
    )
    assert (done.stdout.strip(), done.returncode) == (completed, 0), done.stderr


def test_the_script_is_this_main() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ballast": "ballast.commands:main"}


def test_python_m_gives_the_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ballast", "report", str(tmp_path)],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
