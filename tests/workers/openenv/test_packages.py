"""Packages of environments: installed apart, served by a child process, which ends with its owner."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.config import load
from controller.lifecycle.reward_inputs import find_environment
from tests.controller.config_workspace import refusal, write_workspace
from tests.refusals import refused
from tests.workers.openenv.package import PROGRAM, SCRIPT, write_wheel
from tests.workers.openenv.test_openenv import call, play
from workers.errors import DataError
from workers.openenv.environment import pack_server_environment
from workers.openenv.package_server import LAUNCH
from workers.openenv.packages import COMPLETE, install_package
from workers.user_code.environments import EnvironmentPool
from workers.user_code.task_sources import task_records

OWNER = """
import sys
import time
import psutil
from workers.openenv.package_server import PackageServer

server = PackageServer(sys.argv[1])
print(*[child.pid for child in psutil.Process().children()], flush=True)
time.sleep(600)
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def package(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_wheel(tmp_path_factory.mktemp("package")))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_dead(pid: int) -> None:
    for _ in range(1000):
        if not is_alive(pid):
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is alive")


def server_of(answers: list[Any]) -> int:
    return int(json.loads(answers[0])["pid"])


async def play_in_turn(package: str, *numbers: int) -> list[list[Any]]:
    """Play an episode for each number, which is its only action."""
    pool = EnvironmentPool(pack_server_environment(f"openenv:{package}"), timeout_s=60)
    record = dict(task_records(f"openenv:{package}?seeds=1")[0])
    answers = []
    try:
        for number in numbers:
            answers.append(await play(pool, record, call(record, by=number)))
    finally:
        await pool.stop()
    return answers


def test_a_configuration_with_a_package_is_tried_on_its_own_server(
    workspace: Path, package: str
) -> None:
    """Prompts and tools come from one server, the dry run's turn from another, and neither is left."""
    name = f"openenv:{package}"
    (record, other) = task_records(f"{name}?seeds=2")
    assert record["prompt"][0]["content"] == "Count above ten."
    assert record["tools"][0]["function"]["name"] == "count_action"
    assert other["task"]["reset"] == {"seed": 1}
    config = load(
        "config.yaml", [f"data.train={name}?seeds=2", f"rollout.environment={name}"]
    )
    packed, answered = find_environment(config, dict(record), print)
    assert packed and answered is not None and answered.observation.done
    wait_until_dead(json.loads(str(answered.opening))["pid"])


def test_episodes_share_a_server_which_ends_with_their_pool(package: str) -> None:
    first, second = asyncio.run(play_in_turn(package, 11, 3))
    assert (first[1].reward, first[1].done) == (11.0, True)
    assert (second[1].reward, second[1].done) == (3.0, False)
    assert server_of(first) == server_of(second) != os.getpid()
    wait_until_dead(server_of(first))


def test_a_server_that_ends_costs_its_episode_alone_and_says_why(package: str) -> None:
    crashed, after = asyncio.run(play_in_turn(package, 13, 11))
    assert "ended the session at step" in crashed[-1]
    assert "the 13th floor is missing" in crashed[-1]
    assert after[1].reward == 11.0 and server_of(after) != server_of(crashed)


def test_a_server_that_does_not_start_again_is_named_in_later_episodes(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that forks episodes ends with it, and the next one starts from the beginning."""
    monkeypatch.setenv("COUNTING_CLOSED", str(tmp_path / "closed"))
    name = f"openenv:{package}"
    record = dict(task_records(f"{name}?seeds=1")[0])

    async def play_on() -> list[list[Any]]:
        pool = EnvironmentPool(pack_server_environment(name), timeout_s=60)
        try:
            open_first = await play(pool, record, call(record, by=1))
            (tmp_path / "closed").touch()
            turns = [call(record, by=13)], [call(record, by=1)], [call(record, by=1)]
            return [open_first, *[await play(pool, record, *turn) for turn in turns]]
        finally:
            await pool.stop()

    opened, crashed, _, refused_later = asyncio.run(play_on())
    assert opened[1].reward == 1.0
    # The next server may have ended already, and then its line is the last.
    assert re.search(r"13th floor|has ended: it is closed", crashed[-1])
    assert refused_later == [
        f"rollout.environment: the server of {package} ended at its start: it is closed"
    ]


def test_a_server_ends_when_its_owner_is_killed(package: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, package], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until_dead(pid)


def test_a_server_that_does_not_start_is_refused_with_its_cause(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTING_IMPORT", "no_such_module")
    with refused("No module named 'no_such_module'", DataError):
        # Records are read once in a process: no other test names these seeds.
        task_records(f"openenv:{package}?seeds=3")


@pytest.mark.parametrize(
    ("program", "scripts", "cause"),
    [
        (PROGRAM.replace("app(", "application("), SCRIPT, "no `app`"),
        (PROGRAM, SCRIPT.replace("server", "count"), "no script `server`"),
    ],
    ids=["no app", "no script"],
)
def test_a_package_that_is_no_environment_says_so(
    tmp_path: Path, program: str, scripts: str, cause: str
) -> None:
    shutil.unpack_archive(write_wheel(tmp_path, program, scripts), tmp_path / "site", "zip")
    process = subprocess.run(
        [sys.executable, str(LAUNCH), "0"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.returncode == 1 and cause in process.stderr.splitlines()[-1]


def test_what_cannot_be_installed_is_refused_with_the_installers_cause(
    workspace: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "empty").mkdir()
    environment = "rollout.environment=openenv:empty"
    said = refusal("data.train=openenv:empty?seeds=1", environment)
    assert said.startswith("data.train") and "pyproject.toml" in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "config.yaml"))
    with refused("Set XDG_CACHE_HOME to a folder that can be written"):
        find_environment(load("config.yaml", [environment]), {"prompt": "x"}, print)


@pytest.mark.slow  # three virtual environments
def test_a_changed_package_is_installed_anew_and_a_broken_installation_too(
    cache: Path, tmp_path: Path
) -> None:
    wheel = write_wheel(tmp_path)
    first = install_package(str(wheel))
    before = first.stat().st_ctime_ns
    assert install_package(str(wheel)) == first and first.stat().st_ctime_ns == before
    (first.parents[1] / COMPLETE).unlink()  # as if its installation had been killed
    assert install_package(str(wheel)) == first
    assert (first.parents[1] / COMPLETE).exists()
    write_wheel(tmp_path, PROGRAM + "\n# changed\n")
    assert install_package(str(wheel)) != first


@pytest.mark.parametrize(
    "name", ["my/folder", "echo env", "file:///tmp", "http://", "?seeds=1"]
)
def test_what_is_neither_a_url_nor_a_package_is_refused(workspace: Path, name: str) -> None:
    for key in ("rollout.environment", "data.train"):
        said = refusal(f"{key}=openenv:{name}").replace("data.train: ", "data.train=")
        assert said.startswith(f"{key}=openenv:{name}: ")
