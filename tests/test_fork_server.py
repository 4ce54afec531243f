"""Workers of the tests' Ray: forks that have imported, and new interpreters where imports read variables."""

import json
import os
import sys

import pytest
import ray

from tests.ray_worker_script import RUNTIME_ENVIRONMENT, needs_interpreter


@ray.remote(num_cpus=0.1)
def describe_worker() -> dict[str, object]:
    return {
        "imported": "vllm" in sys.modules,
        "group": os.getpgid(0) == os.getpid(),
        "raylet": os.environ["RAY_RAYLET_PID"],
        "value": os.environ.get("BALLAST_TEST_VALUE"),
    }


@ray.remote(num_cpus=0.1)
class Exits:
    def exit(self) -> None:
        os._exit(3)


def test_a_worker_is_a_fork_with_its_own_environment_and_group(ray_session: None) -> None:
    worker = ray.get(describe_worker.remote())
    assert worker["imported"]
    assert worker["group"]
    assert worker["raylet"] != str(os.getpid())


def test_a_worker_with_variables_is_a_new_interpreter(ray_session: None) -> None:
    options = {"runtime_env": {"env_vars": {"BALLAST_TEST_VALUE": "7"}}}
    worker = ray.get(describe_worker.options(**options).remote())
    assert (worker["imported"], worker["value"]) == (False, "7")


def test_ray_notices_the_end_of_a_fork(ray_session: None) -> None:
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(Exits.remote().exit.remote())


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({}, False),
        ({"py_executable": "python", "env_vars": {}, "command_prefix": []}, False),
        ({"env_vars": {"A": "1"}}, True),
        ({"command_prefix": ["cd", "folder", "&&"]}, True),
    ],
)
def test_runtime_environments_need_an_interpreter(
    context: dict[str, object], expected: bool
) -> None:
    command = ["default_worker.py", "--node-id=1"]
    assert not needs_interpreter(command)
    assert (
        needs_interpreter([*command, RUNTIME_ENVIRONMENT + json.dumps(context)]) is expected
    )
