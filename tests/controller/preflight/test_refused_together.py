"""Independent faults are refused together, so that few rounds of correction lead to a run."""

import re
from pathlib import Path

import pytest

from controller.config import load
from controller.config.file import read
from controller.config.offline import SftConfig
from controller.fit import main
from controller.preflight.checks import check
from controller.preflight.offline_checks import check_offline
from tests.controller.config_workspace import write_workspace
from workers.errors import BallastError, CombinedConfigError

CODE = {
    "trl.py": "def first(completions, **kwargs): ...\ndef second(response, completions): ...\n",
    "wrong.py": "def reward(response, gone):\n    return 0.0\n",
    "loss.py": "def loss(predictions, config):\n    raise ValueError('no loss')\n",
    "order.py": "def order(records, epoch):\n    raise ValueError('no order')\n",
}
JUDGE = "reward.judge.model=model reward.judge.max_prompt_tokens=64 reward.judge.sampling.max_new_tokens=64"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    for name, code in CODE.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def refusals(overrides: list[str]) -> list[str]:
    with pytest.raises(BallastError) as caught:
        check(load("config.yaml", overrides))
    error = caught.value
    return (
        list(map(str, error.errors))
        if isinstance(error, CombinedConfigError)
        else [str(error)]
    )


FAULTS = {
    "keys": ("policy.learning_rte=1", "model.pth=x", "batch.prompts_per_step=many"),
    "ranges": ("run.steps=-1", "batch.mini_batches=0", "policy.optimizer.learning_rate=-1"),
    "run": ("run.name=a/b", "run.resume=gone", "run.push_to_hub=a/b/c"),
    "models": (
        "model.path=gone",
        "reference.path=lost algorithm.loss.kl_coefficient=0.1",
        "model.chat_template=none",
    ),
    "data": (
        "data.train=gone.jsonl",
        "data.validation=lost.jsonl",
        "data.curriculum=none.py:order",
    ),
    "functions": (
        "run.metrics=none.py:f",
        "reward.shaping=gone.py:f",
        "algorithm.group_filter=lost.py:f",
    ),
    "sampling": (
        "rollout.sampling.bad_words=['']",
        "validation.sampling.min_new_tokens=500",
    ),
    "episodes": (
        "rollout.environment=none.py:Game rollout.max_turns=2",
        "rollout.tool_parser=none",
        "rollout.reasoning_parser=none",
        "data.continue_last_message=true",
        "rollout.max_episode_tokens=8",
    ),
    "players": (
        # and tools play it too
        "rollout.environment=none.py:Game rollout.max_turns=2 rollout.max_episode_tokens=96",
        "rollout.tools=gone.py",
        "reward.function=lost.py:reward",
    ),
    "agent": (
        "rollout.agent_command=nowhere",
        "rollout.history=template rollout.max_turns=2",
        "reward.overlong_tokens=8 rollout.max_episode_tokens=96",
    ),
    "judge": (
        f"reward.judge.weight=0 {JUDGE}",
        "reward.judge.parser=x",
        "reward.judge.min_grade=100",
    ),
    "loss": (
        "algorithm.loss.function=none.py:f algorithm.loss.name=custom",
        "algorithm.loss.columns=uid",
        "rollout.sampling.presence_penalty=0.5",
    ),
    "counts": ("policy.min_micro_batches=999", "policy.optimizer.warmup_steps=99"),
    "trackers": ("tracking.mlflow=true", "tracking.wandb=true"),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_each_independent_fault_of_a_check_has_its_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        "controller.preflight.tracker_checks._is_installed",
        lambda package: package == "tensorboard",
    )
    lines = refusals([override for fault in faults for override in fault.split()])
    assert len(lines) == len(faults), lines
    for fault in faults:
        named = fault.partition("=")[0]
        assert any(named in line for line in lines), (named, lines)


def test_each_reward_function_has_its_line_before_it_is_imported(workspace: Path) -> None:
    functions = "reward.functions={'trl.py:first': 1, 'trl.py:second': 1, 'none.py:third': 1, 'wrong.py:reward': 1}"
    lines = refusals([functions, "reward.function=''"])
    assert len(lines) == 3, lines
    for function in ("trl.py:first", "trl.py:second", "none.py:third"):
        assert sum(function in line for line in lines) == 1


def test_faults_of_an_offline_run_come_together(workspace: Path) -> None:
    wrong = [
        "data.train=gone.jsonl",
        "model.path=gone",
        "policy.data_parallel=99",
        "policy.optimizer.warmup_steps=99",
    ]
    with pytest.raises(CombinedConfigError) as caught:
        check_offline(
            read(
                SftConfig,
                [],
                [*wrong, "run.steps=5", "resources.device=cpu", "run.name=sft"],
            )
        )
    assert len(caught.value.errors) == len(wrong), caught.value


def test_code_data_and_model_are_wrong_and_two_rounds_name_all(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first round reads files, the second builds the model and runs the user's code."""
    right = {
        "model.path": "model",
        "data.train": "train.jsonl",
        "policy.optimizer.warmup_steps": "0",
        "data.max_prompt_tokens": "32",
        "reward.function": "reward.py:reward",
        "algorithm.loss.function": "workers.model.losses.ratio_losses:cispo",
        "data.curriculum": "",
    }
    config = {
        "model.path": "gone",
        "data.train": "lost.jsonl",
        "policy.optimizer.warmup_steps": "99",
        "data.max_prompt_tokens": "900",
        "reward.function": "wrong.py:reward",
        "algorithm.loss.function": "loss.py:loss",
        "data.curriculum": "order.py:order",
    }
    rounds = []
    while True:
        arguments = [f"{key}={value}" for key, value in config.items()]
        code = main(
            [
                "--config",
                "config.yaml",
                "--dry-run",
                "algorithm.loss.name=custom",
                *arguments,
            ]
        )
        lines = capsys.readouterr().err.splitlines()
        named = {
            key
            for key in config
            for line in lines
            if re.match(rf"error: .*?{re.escape(key)}\b", line)
        }
        if code == 0:
            break
        wrong = {key for key in named if config[key] != right[key]}
        assert code == 2 and wrong, lines
        rounds.append(len(wrong))
        config |= {key: right[key] for key in wrong}
    assert rounds == [3, 4]
