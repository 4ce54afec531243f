"""The package brings what a first run starts from: in a checkout, and in a wheel that is
installed elsewhere.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ballast.commands import main
from ballast.init import RECIPES
from tests.documentation.blocks import ROOT

CLUSTER = ["--dry-run", "--cluster", "nodes=1,gpus=1,gpu_gib=80,cpus=8"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_folder_to_start_from_passes_its_dry_run(
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a network: the model's shape comes with the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    assert main(["init", "mine", "--recipe", recipe]) == 0
    assert main(["init", "mine"]) == 2
    assert (
        capsys.readouterr().err
        == "error: mine/config.yaml is there. Name another folder.\n"
    )
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["fit", "--config", "config.yaml", *CLUSTER, "--no-measure"]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000, "/dev/null/x", "/proc/x", "\ud800"])
def test_a_folder_that_cannot_be_made_is_refused_in_one_line(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", folder]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: ")
        and error.count("\n") == 1
        and "Errno" not in error
        and len(error) < 300
    )


def test_the_printed_command_quotes_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs; $HOME"
    assert main(["init", str(folder)]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  cd ")
    )
    assert shlex.split(line) == ["cd", str(folder)]


@pytest.mark.slow
def test_a_wheel_has_all_that_its_commands_need(tmp_path: Path) -> None:
    source, wheels, target = tmp_path / "source", tmp_path / "wheels", tmp_path / "target"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source],
        check=True,
    )
    (wheel,) = wheels.glob("ballast_rl-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    environment = os.environ | {
        "PYTHONPATH": str(target),
        "HF_HUB_CACHE": str(tmp_path / "empty"),
    }
    for command in (
        ["--version"],
        ["init", "mine"],
        ["fit", "--config", "config.yaml", *CLUSTER],
    ):
        folder = tmp_path / "mine" if "--config" in command else tmp_path
        done = subprocess.run(
            [sys.executable, "-P", target / "bin" / "ballast", *command],
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
    assert {path.name for path in (target / "ballast" / "examples").iterdir()} >= {
        "addition",
        "gsm8k",
        "launch",
    }
    assert list(target.rglob("cache")) == []
