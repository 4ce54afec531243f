"""The tool of examples/code. Its sandbox has its own tests, tests/workers/sandbox."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from controller import fit
from examples.tools import data
from examples.tools.warm_start import create
from tests.examples.dry_run import dry_run_page
from tests.workers.sandbox.conftest import needs_bubblewrap

pytestmark = needs_bubblewrap


@pytest.fixture(scope="module")
def tools() -> Any:
    return import_module("examples.code.tools")


def test_a_program_runs_and_its_end_is_told(tools: Any) -> None:
    assert tools.python("print(73+95)\nopen('x', 'w').write('kept')") == "168"
    assert tools.python("import os\nprint(os.listdir('.'), os.getcwd())") == "[] /box"
    assert tools.python("print('a')\nraise SystemExit(3)") == "a\n[exit code 3]"
    assert tools.python("1/0").splitlines()[-2:] == [
        "ZeroDivisionError: division by zero",
        "[exit code 1]",
    ]
    assert tools.python("#" * 70_000).startswith("[not run")
    assert (
        tools.python("print('\\ud800'.encode('utf8', 'surrogatepass'))")
        == r"b'\xed\xa0\x80'"
    )


def test_time_and_output_end(tools: Any) -> None:
    assert tools.run("while True: pass", seconds=0.5) == "[stopped: took more than 0.5 s]"
    said = tools.run("while True: print('x' * 10**6)", seconds=0.5)
    assert "[cut: printed more than 65,536 bytes]" in said and len(said) < 2**16 + 99


def test_its_configuration_is_valid_with_its_tool_and_with_those_of_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "model", import_module("examples.code.warm_start").conversation)
    page = dry_run_page("code", data, tmp_path, capsys)
    assert "tools python" in page and '"name": "python"' in page
    files = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "validation")]
    settings = ["--config", "examples/code/config.yaml", f"run.dir={tmp_path}"]
    settings += [f"model.path={tmp_path / 'model'}", *files]
    sandbox = ["rollout.sandbox.kind=bubblewrap", "rollout.tools=workers.sandbox.tools"]
    # The tiny model has no room for three tools.
    fit.main([*settings, *sandbox, "--dry-run"])
    page = capsys.readouterr().out
    assert "tools read_file, shell, write_file" in page
    assert "bubblewrap: a sandbox for each sample" in page
    assert fit.main([*settings, *sandbox[:1], "--dry-run"]) == 2
    assert "has none of read_file, shell, write_file" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fit.main(settings) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollout.tools" in line and "bwrap is not installed" in line
    assert not (tmp_path / "runs").exists()
