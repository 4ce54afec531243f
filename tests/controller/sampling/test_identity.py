"""The identity of a job repeats in another process, and changes with what makes other samples or scores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from controller.generate import GENERATE
from controller.inputs import try_inputs
from controller.packages import ROOT
from controller.sampling.identity import job_identity
from controller.sampling.jobs import Request, checked_settings

ENVIRONMENT = """\
from workers.environment import Observation


class Guess:
    def reset(self, record):
        return None

    def step(self, response):
        return Observation("", reward=0.0, done=True)
"""
PRINT = """\
import json
from tests.controller.sampling.test_identity import identity
print(json.dumps(identity()))
"""


def identity(*overrides: str) -> dict[str, object]:
    request = Request(
        Path("config.yaml"), overrides=("rollout.environment=play.py:Guess", "rollout.max_turns=1", *overrides)
    )
    config, model, given = checked_settings(GENERATE, request)
    return job_identity("generate", model, config, try_inputs(config, given=given), given)


@pytest.fixture
def there(workspace: Path) -> Path:
    (workspace / "play.py").write_text(ENVIRONMENT)
    return workspace


def changed(before: dict[str, object], *overrides: str) -> set[str]:
    after = identity(*overrides)
    return {name for name in before if before[name] != after[name]}


def test_it_changes_with_what_makes_other_samples_and_with_nothing_else(there: Path) -> None:
    before = identity()
    assert changed(before) == set()
    assert changed(before, "rollout.samples_per_prompt=2", "rollout.replicas=2", "reward.timeout_s=3") == set()
    assert changed(before, "rollout.sampling.temperature=0.5") == {"sampling"}
    assert changed(before, "run.seed=3") == {"seed"}
    assert changed(before, "rollout.engine={quantization: fp8}") == {"engines"}
    assert changed(before, "data.max_prompt_tokens=31") == {"data"}
    assert changed(before, "reward.function=''", "reward.functions={'reward.py:reward': 2.0}") == {"rewards"}
    for file, part in (("play.py", "environment"), ("reward.py", "rewards"), ("train.jsonl", "data")):
        with (there / file).open("a") as open_file:
            open_file.write("# more\n" if file.endswith(".py") else '{"prompt": "2+2=", "solution": "4"}\n')
        assert changed(before) == {part}
        before = identity()
    (there / "model" / "model.safetensors").touch()
    assert changed(before) == {"model"}


def test_it_is_the_same_in_another_process(there: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PRINT], env={"PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(identity())), done.stderr
