"""Tasks in Harbor's format, in the sandbox of this machine."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.config import load
from controller.lifecycle.tokenized_inputs import task_warnings
from tests.refusals import refused
from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.config.sandbox import SandboxConfig
from workers.environment import Turn
from workers.errors import ConfigError, DataError, EpisodeError
from workers.harbor.environment import HarborEnvironment
from workers.harbor.task_folders import (
    check_tasks,
    read_layout,
    read_tasks,
    records,
    unread_lines,
)
from workers.sandbox.kinds import export_settings
from workers.user_code.task_sources import task_records

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 20.0
[environment]
cpus = 1
"""
PASSES = (
    'if [ "$(cat /app/sorted.txt)" = "$(printf "a\\nb")" ]; then echo 1; else echo 0; fi'
)
TASKS = {  # Dockerfile, tests, solution, reward of the solution
    "sort": (
        "FROM ubuntu:24.04\nWORKDIR /app\nCOPY words.txt .\n",
        f"({PASSES}) > /logs/verifier/reward.txt\n",
        "sort words.txt > sorted.txt\n",
        {"reward": 1.0},
    ),
    "parts": (
        "FROM python:3.12-slim\nENV NAME=x\nWORKDIR /srv\nCOPY . /data/\n",
        '[ -f made ] && echo \'{"reward": 0.5, "made": 1}\' > /logs/verifier/reward.json\n'
        "[ -f made ] || echo 0 > /logs/verifier/reward.txt\n",
        'test -f /data/words.txt && test "$NAME" = x && touch made\n',
        {"reward": 0.5, "made": 1.0},
    ),
    "steps": (
        "FROM debian\nWORKDIR /app\n",
        "echo 0.25 > /logs/verifier/reward.txt\n",
        "true\n",
        {"reward": 0.25},
    ),
}


def write_task(
    folder: Path, dockerfile: str, tests: str, solution: str, toml: str = TOML
) -> Path:
    files = {
        "task.toml": toml,
        "instruction.md": f"Do {folder.name}.\n",
        "environment/Dockerfile": dockerfile,
        "environment/words.txt": "b\na\n",
        "tests/test.sh": tests,
        "solution/solve.sh": solution,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name, (dockerfile, tests, solution, _) in TASKS.items():
        write_task(tmp_path / name, dockerfile, tests, solution)
    return tmp_path


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLAST_SANDBOX", "")
    export_settings(SandboxConfig(kind="bubblewrap", memory_gib=0.25))


def in_sandbox(test: Callable[..., None]) -> Callable[..., None]:
    return needs_bubblewrap(pytest.mark.usefixtures("sandbox")(test))


def begin(folder: Path) -> HarborEnvironment:
    (record,) = records(f"harbor:{folder}")
    environment = HarborEnvironment()
    environment.reset(record)
    return environment


def call(command: str) -> Turn:
    arguments: dict[str, Any] = {"command": command}
    return Turn(
        "", tool_calls=[{"id": "1", "function": {"name": "shell", "arguments": arguments}}]
    )


def test_every_task_of_a_folder_is_a_record_with_a_shell(tasks: Path) -> None:
    made = task_records(f"harbor:{tasks}")
    assert [record["prompt"][0]["content"] for record in made] == [
        "Do parts.\n",
        "Do sort.\n",
        "Do steps.\n",
    ]
    assert {record["tools"][0]["function"]["name"] for record in made} == {"shell"}
    check_tasks(f"harbor:{tasks}", "bubblewrap", 20.0)


def test_tests_that_may_outlast_the_reward_are_refused(tasks: Path) -> None:
    with refused("reward.timeout_s=19.5"):
        check_tasks(f"harbor:{tasks}", "bubblewrap", 19.5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train={}"],
        ["data.validation={}"],
        ["data.sources={{'{}': 1}}"],
        ["rollout.environment={}"],
    ],
)
def test_what_is_not_read_of_tasks_is_named_from_every_door(
    tasks: Path, tmp_path: Path, overrides: list[str]
) -> None:
    settings = [override.format(f"harbor:{tasks}") for override in overrides]
    (line,) = task_warnings(load(None, ["model.path=x", *settings]))
    assert line.endswith(": environment.cpus")


def test_a_dockerfile_that_containers_ignore_is_named(tasks: Path) -> None:
    (tasks / "sort/task.toml").write_text(f'{TOML}docker_image = "registry/sort"\n')
    text = f"harbor:{tasks}"
    assert ["1 of 3" in line for line in unread_lines(text, "docker:x")] == [False, True]
    assert (
        len(unread_lines(text, "bubblewrap")) == 1
        and len(unread_lines(text, "kubernetes:x")) == 3
    )


@in_sandbox
@pytest.mark.parametrize("name", TASKS)
def test_the_oracle_is_rewarded_by_the_tests(tasks: Path, name: str) -> None:
    observation = begin(tasks / name).solve()
    assert observation.done
    assert {"reward": observation.reward, **observation.parts} == TASKS[name][3]


@in_sandbox
def test_the_oracle_has_the_agents_time(tmp_path: Path) -> None:
    """What it has done by then is scored."""
    toml = TOML.replace("30.0", "3.0")
    tests = "cat made > /logs/verifier/reward.txt"
    solution = "echo 0.5 > made; sleep 100; echo 0.75 > made"
    folder = write_task(tmp_path / "task", "FROM ubuntu\n", tests, solution, toml)
    assert begin(folder).solve().reward == 0.5


@in_sandbox
def test_the_policy_works_by_the_shell_and_a_turn_without_a_call_is_scored(
    tasks: Path,
) -> None:
    environment = begin(tasks / "sort")
    (answer,) = environment.step(
        call("sort words.txt | tee sorted.txt; ls /tests; exit 3")
    ).text
    assert answer["content"].startswith("a\nb") and answer["content"].endswith(
        "[exit code 3]"
    )
    assert "No such file" in answer["content"]
    observation = environment.step(Turn("done"))
    assert observation.done and observation.reward == 1.0
    assert begin(tasks / "sort").step(Turn("")).reward == 0.0


@in_sandbox
def test_the_first_turn_after_the_agents_time_submits(tasks: Path) -> None:
    """Its calls are not made, and the tests score what was there before."""
    environment = begin(tasks / "sort")
    assert not environment.step(call("sort words.txt > sorted.txt")).done
    environment._end = time.monotonic()
    late = environment.step(call("rm sorted.txt"))
    assert late.done and late.reward == 1.0


@in_sandbox
def test_work_that_is_not_submitted_has_no_reward_and_its_tests_do_not_run(
    tasks: Path,
) -> None:
    """As at rollout.max_turns: an episode's reward is the sum of its turns'."""
    environment = begin(tasks / "steps")  # whose tests would always pay
    turns = [environment.step(call("ls /tests /logs/verifier")) for _ in range(2)]
    assert [(turn.reward, turn.done) for turn in turns] == [(0.0, False)] * 2
    (answer,) = turns[-1].text
    assert "/tests" in answer["content"] and "reward.txt" not in answer["content"]
    environment.close()


@needs_bubblewrap
def test_a_command_of_the_policy_has_the_time_of_a_command(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's, not the tests', which may take longer."""
    monkeypatch.setenv("BALLAST_SANDBOX", "")
    settings = SandboxConfig(kind="bubblewrap", memory_gib=0.25, command_timeout_s=0.5)
    export_settings(settings)
    (tasks / "steps/tests/test.sh").write_text(
        "sleep 1; echo 0.25 > /logs/verifier/reward.txt"
    )
    environment = begin(tasks / "steps")
    (answer,) = environment.step(call("echo begun; sleep 30")).text
    assert answer["content"].startswith("begun")
    assert "[stopped: took more than 0.5 s]" in answer["content"]
    assert environment.step(Turn("")).reward == 0.25


@in_sandbox
def test_a_process_that_the_policy_leaves_does_not_write_the_reward(tasks: Path) -> None:
    """It writes whenever the tests have run, in a session of its own and deaf to signals that can be caught."""
    environment = begin(tasks / "steps")
    loop = "trap '' HUP TERM; while :; do echo 1 > /logs/verifier/reward.txt; done"
    environment.step(
        call(
            f"setsid sh -c {loop!r} > /dev/null 2>&1 & sleep 0.2; cat /logs/verifier/reward.txt"
        )
    )
    script = "echo 0.25 > /logs/verifier/reward.txt\nsleep 0.3\n"
    (tasks / "steps/tests/test.sh").write_text(script)
    assert environment.step(Turn("")).reward == 0.25


@in_sandbox
def test_the_sandbox_ends_with_its_episode(tasks: Path) -> None:
    environment = begin(tasks / "sort")
    sandbox = environment._running()
    environment.close()
    with pytest.raises(EpisodeError):
        sandbox.run("true")
    with pytest.raises(EpisodeError):
        environment.step(call("true"))


@in_sandbox
@pytest.mark.parametrize(
    "tests",
    [
        "true",
        "echo nan > /logs/verifier/reward.txt",
        "echo '{}' > /logs/verifier/reward.json",
        "sleep 9",
    ],
)
def test_tests_without_a_reward_fail_the_sample(tmp_path: Path, tests: str) -> None:
    toml = TOML.replace("20.0", "0.5")
    folder = write_task(tmp_path / "task", "FROM ubuntu\n", tests, "true", toml)
    with pytest.raises(EpisodeError, match=r"test\.sh"):
        begin(folder).step(Turn(""))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("task.toml", "x ="),
        ("task.toml", "[agent]\ntimeout_sec = -1"),
        ("task.toml", "[[steps]]\nname = 'a'"),
        ("task.toml", "[environment]\ndocker_image = 3"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'"),
        ("instruction.md", " \n"),
        ("tests/test.sh", None),
    ],
)
def test_a_malformed_folder_is_refused_by_its_file(
    tasks: Path, name: str, text: str | None
) -> None:
    file = tasks / "sort" / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError) as error:
        read_tasks(f"harbor:{tasks}")
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get install -y gcc",
        "FROM pytorch/pytorch",
        "COPY --from=a /b /c",
        "COPY none.txt .",
    ],
)
def test_a_task_that_needs_an_image_is_refused_before_the_run(
    tasks: Path, line: str
) -> None:
    (tasks / "sort/environment/Dockerfile").write_text(f"FROM ubuntu\n{line}\n")
    with pytest.raises(ConfigError, match=r"sort/environment/Dockerfile"):
        check_tasks(f"harbor:{tasks}", "bubblewrap", 20.0)


def test_containers_take_the_image_of_each_task(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="docker_image"):
        check_tasks(f"harbor:{tasks}", "docker:x", 20.0)
    for name in TASKS:
        (tasks / name / "task.toml").write_text(f'{TOML}docker_image = "registry/{name}"\n')
    check_tasks(f"harbor:{tasks}", "docker:x", 20.0)
    assert {task.image for task in read_tasks(f"harbor:{tasks}")} == {
        f"registry/{name}" for name in TASKS
    }


def test_a_layout_is_read_as_docker_reads_it(tasks: Path) -> None:
    folder = tasks / "sort"
    (folder / "environment/Dockerfile").write_text(
        "FROM ubuntu\nWORKDIR /a\nWORKDIR b\nCOPY words.txt \\\n x/\nCOPY words.txt y\nENV A=1 B='2 3'\n"
    )
    layout = read_layout(folder)
    assert layout.folder == "/a/b" and layout.variables == {"A": "1", "B": "2 3"}
    assert [inside for _, inside in layout.copies] == ["/a/b/x/words.txt", "/a/b/y"]
