"""The command itself, in a process of its own: exit codes, one line on stderr, nothing heavy imported.

Only here is a dry run the process that a user starts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.config import load
from controller.lifecycle.input_lines import tried_lines
from controller.lifecycle.inputs import try_inputs
from tests.controller.config_workspace import write_workspace

REPOSITORY = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "vllm", "transformers", "tensordict")
FIT = f"""
import sys
from controller.fit import main
try:
    code = main(sys.argv[1:])
finally:
    print("heavy:", [name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""


def fit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_CACHE": str(folder / "hub"),
    }
    return subprocess.run(
        [sys.executable, "-c", FIT, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
    )


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "--config config.yaml policy.max_tokens_per_micro=1",
            "did you mean policy.max_tokens_per_micro_batch?",
        ),
        (
            "--config config.yaml policy.data_parallel=two",
            "policy.data_parallel must be a whole number (int), not 'two'.",
        ),
        ("--config gone.yaml", "there is no file gone.yaml."),
        ("--config config.yaml data.train=gone.jsonl", "there is no file gone.jsonl"),
        (
            "--config config.yaml model.path=no/such",
            "there is no folder no/such and no such model",
        ),
        (
            "--config config.yaml policy.max_tokens_per_micro_batch=50 --dry-run",
            "is below the longest possible sequence",
        ),
        (
            "policy.max_tokens_per_micro_batch=50",
            "the following arguments are required: --config; usage: ",
        ),
        ("--config config.yaml --dryrun", "unrecognized arguments: --dryrun; usage: "),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line_before_anything_heavy_is_imported(
    tmp_path: Path, command: str, message: str
) -> None:
    write_workspace(tmp_path)
    process = fit(tmp_path, *command.split())
    assert process.returncode == 2, process.stderr
    assert message in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert process.stdout == "heavy: []\n"
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_plan_of_the_run_and_starts_nothing(tmp_path: Path) -> None:
    write_workspace(tmp_path)
    process = fit(
        tmp_path,
        "policy.data_parallel=1",
        "--config",
        "config.yaml",
        "--dry-run",
        "run.steps=3",
    )
    assert process.returncode == 0, process.stderr
    assert "policy: 1 actor, " in process.stdout
    assert "the run: 3 steps, 6 optimiser steps" in process.stdout
    assert "train.jsonl: 1 record\n" in process.stdout
    assert (
        "train.jsonl: 12 epochs, 12 of run.steps * batch.prompts_per_step = 12 prompts\n"
        in process.stdout
    )
    assert "the first prompt, as engines read it:\n    1+1=\n" in process.stdout
    assert (
        "reward.py:reward: tried on the first record and an empty response"
        in process.stdout
    )
    assert "the reward of an empty response: 0\n" in process.stdout
    assert (
        "train.jsonl: 1 prompt of 4 to 4 tokens, 4 on average; above data.max_prompt_tokens: 0 dropped"
        in (process.stdout)
    )
    # Its settings are at their defaults.
    assert "optimizer" not in process.stdout.partition("== placement")[0]
    assert (
        "numerics: packed rows of model.path match the model's own forward pass"
        in process.stdout
    )
    # To measure the model; neither Ray nor vLLM.
    assert process.stdout.endswith("heavy: ['torch', 'transformers']\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "line"),
    [("--help", "usage: "), ("--settings", "policy.max_tokens_per_micro_batch  (int, ")],
)
def test_help_and_settings_print_and_end(tmp_path: Path, option: str, line: str) -> None:
    process = fit(tmp_path, option)
    assert process.returncode == 0
    assert process.stderr == ""
    assert line in process.stdout


def test_a_dry_run_shows_what_an_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines, in this process: the dry run above prints them, and imports for 8 CPU seconds."""
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told.py").write_text(
        "from workers.environment import Observation\n\n\n"
        "class Told:\n"
        "    def reset(self, record):\n"
        "        return '2+2='\n\n"
        "    def step(self, response):\n"
        "        return Observation('3+3=', reward=-0.5, parts={'turns': 1.0})\n"
    )
    played = (
        "rollout.environment=told.py:Told",
        "rollout.max_turns=2",
        "rollout.max_episode_tokens=80",
    )
    config = load(Path("config.yaml"), ("reward.function=''", *played))
    assert (
        "told.py:Told: tried on the first record and an empty response\n"
        "the environment adds to the first prompt:\n    2+2=\n"
        "the environment's reward of an empty response: -0.5, turns 1\n"
        "its observation:\n    3+3="
    ) in "\n".join(tried_lines(config, try_inputs(config)))


def test_independent_problems_are_refused_together_a_line_each(tmp_path: Path) -> None:
    write_workspace(tmp_path)
    wrong = [
        "rollout.max_turns=3",
        "model.lora.alpha=7",
        "data.train=nowhere.jsonl",
        "reward.function=none.py:f",
    ]
    done = fit(tmp_path, "--config", "config.yaml", *wrong)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert len(lines) == len(wrong), done.stderr
    for setting in wrong:
        assert (
            sum(
                setting.partition("=")[0] in line.partition(" has no effect")[0]
                for line in lines
            )
            == 1
        ), done.stderr
