"""What hides a package of ours is named in one line, with its file; what only looks like it is left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.packages import ROOT, check_packages
from tests.controller.config_workspace import write_workspace

CHECKED = """
import sys
from controller.config import load
from controller.lifecycle.inputs import reward_functions
from controller.preflight.checks import check

config = load(sys.argv[1], sys.argv[2:])
check(config)
reward_functions(config, {})
"""


def run(folder: Path, *module: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *module, "nowhere"]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("file", "hidden", "named"),
    [
        ("workers/__init__.py", "workers", "workers"),
        ("workers.py", "workers", "workers.py"),
        ("balancing.py", "balancing", "balancing.py"),
        ("controller.py", "controller", "controller.py"),
        ("controller/__init__.py", "controller", "controller"),
    ],
)
def test_a_users_file_that_hides_a_package_is_named(
    tmp_path: Path, file: str, hidden: str, named: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    done = run(tmp_path, "ballast", "report")
    told = f"{tmp_path / named} hides Ballast's package {hidden}. Rename it, or run from another folder"
    assert (done.returncode, done.stderr) == (2, f"error: {told}\n")
    if hidden != "controller":  # of which Python itself says what it found
        done = run(tmp_path, "controller.sft")
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1 and told in done.stderr


def test_a_folder_of_another_kind_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where our packages are found by an editable installation's finder, after all folders
    on the path.
    """
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "pool.js").write_text("")
    assert "is not the folder" in run(tmp_path, "ballast", "replay", "--step=1").stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "path",
        [path for path in sys.path if Path(path).resolve() not in (ROOT, Path())],
    )
    monkeypatch.delitem(sys.modules, "workers")
    check_packages(["workers"])
    (tmp_path / "workers" / "pool.py").write_text("")
    with pytest.raises(ImportError, match="workers hides Ballast's package workers"):
        check_packages(["workers"])


def test_a_module_that_a_notebook_has_imported_already_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    monkeypatch.setitem(sys.modules, "workers", mine)
    with pytest.raises(ImportError, match=r"mine\.py hides Ballast's package workers"):
        check_packages()


@pytest.mark.parametrize("installed", ["editable", "on the path"])
def test_an_installation_finds_its_reward_functions_from_any_folder(
    tmp_path: Path, installed: str
) -> None:
    """By the finder of an editable installation, or in a folder of the path as a wheel puts them."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    if installed == "on the path":
        environment["PYTHONPATH"] = str(site := tmp_path / "site")
        site.mkdir()
        for name in ("balancing", "workers", "controller", "ballast"):
            (site / name).symlink_to(ROOT / name)
    (folder := tmp_path / "elsewhere").mkdir()
    config = write_workspace(folder)
    (folder / "mine" / "deep").mkdir(parents=True)  # without __init__.py
    (folder / "mine" / "deep" / "rewards.py").write_text(
        "def short(response):\n    return -len(response)\n"
    )
    rewards = "reward.functions={workers.reward_functions:length: 1.0, mine.deep.rewards:short: 1.0}"
    command = [sys.executable, "-c", CHECKED, str(config), "reward.function=''", rewards]
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")
