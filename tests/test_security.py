"""What docs/security.md promises: nothing that is read is executed, and no secret is written."""

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ballast.replay.__main__ import settings
from ballast.sampling_commands import evaluate, generate
from controller.config import load, to_yaml
from controller.rollout.sample_files import read_samples, read_step
from tests.controller.config_workspace import write_workspace
from tests.workers.model.tiny import save_tiny_model
from workers.config.roles import ModelConfig
from workers.errors import ConfigError, DataError
from workers.model.model import load_model
from workers.model.pretrained import load_tokenizer

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for package in ("balancing", "workers", "controller", "ballast")
    for path in ROOT.glob(f"{package}/**/*.py")
)

EXECUTING = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "joblib.load",
    "marshal.loads",
}
ALLOWED = {
    ("workers/user_code/rewards.py", "cloudpickle.loads"),
    ("workers/user_code/functions.py", "cloudpickle.loads"),
    ("workers/agents/processes.py", "cloudpickle.loads"),
    ("workers/user_code/environments.py", "cloudpickle.loads"),
    ("workers/user_code/tools.py", "cloudpickle.loads"),
    ("workers/user_code/process.py", "pickle.loads"),
    ("controller/step.py", "cloudpickle.loads"),
    ("controller/config/file.py", "pickle.loads"),  # defaults that this process has pickled
    ("ballast/audit/readers/slime.py", "torch.load"),  # with weights_only=True
}
"""What a worker has pickled a moment before, in the process of its own that exists to run it; and the user's
own step (run.step), pickled by such a process, which the driver runs. A replay asks for --trust-run before.
"""


PROTECTIONS = {
    "trust_remote_code": "False",
    "shell": "False",
    "allow_pickle": "False",
    "weights_only": "True",
}


def calls(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_no_code_of_ours_executes_what_it_reads() -> None:
    found = {
        (str(path.relative_to(ROOT)), ast.unparse(call.func))
        for path in SOURCES
        for call in calls(path)
    }
    assert {(path, name) for path, name in found if name in EXECUTING} == ALLOWED


def test_no_call_switches_a_protection_off() -> None:
    keywords = [
        (str(path.relative_to(ROOT)), keyword.arg, ast.unparse(keyword.value))
        for path in SOURCES
        for call in calls(path)
        for keyword in call.keywords
    ]
    assert ("workers/model/pretrained.py", "trust_remote_code", "False") in keywords
    for path, name, value in keywords:
        assert PROTECTIONS.get(name or "", value) == value, path
        assert value.strip("'") not in ("0.0.0.0", "::"), (
            f"{path}: {name} listens on every interface"
        )


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (self.trace, "executed")


def test_a_pickle_among_the_weights_is_refused_unread(tmp_path: Path) -> None:
    folder, trace = tmp_path / "model", tmp_path / "trace"
    save_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb(trace)}, folder / "pytorch_model.bin")
    with pytest.raises((ConfigError, pickle.UnpicklingError)):
        load_model(ModelConfig(path=str(folder)), torch.float32)
    assert not trace.exists()


@pytest.mark.parametrize("read", [read_samples, read_step], ids=lambda read: read.__name__)
def test_a_pickle_in_a_file_of_samples_is_refused_unread(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path, trace = tmp_path / "step-1.npz", tmp_path / "trace"
    arrays = ("records", "objects", "scores", "trained", "tokens.offsets")
    np.savez(path, **{name: np.array([Bomb(trace)], dtype=object) for name in arrays})
    with pytest.raises(
        (DataError, ValueError), match=r"allow_pickle=False|not a file of samples"
    ):
        read(path)
    assert not trace.exists()


@pytest.mark.parametrize("model_type", ["qwen2", "unheard_of"])
def test_code_in_a_models_folder_is_not_run(tmp_path: Path, model_type: str) -> None:
    """Neither where it would replace a known family's, nor where the family is known from there alone."""
    folder, trace = tmp_path / "model", tmp_path / "trace"
    save_tiny_model(folder)
    (folder / "bomb.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nclass Config: ...\nclass Model: ...\n"
    )
    described = json.loads((folder / "config.json").read_text())
    described |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "bomb.Config", "AutoModelForCausalLM": "bomb.Model"},
    }
    (folder / "config.json").write_text(json.dumps(described))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["bomb.Model", "bomb.Model"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for read in (
        lambda: load_model(ModelConfig(path=str(folder)), torch.float32),
        lambda: load_tokenizer(str(folder)),
    ):
        try:
            read()
        except ConfigError:
            assert model_type == "unheard_of"
    assert not trace.exists()


@pytest.mark.parametrize(
    "line",
    [
        "run: {name: '${oc.env:SECRET}'}",
        "run: {name: 'x-${oc.env:SECRET,none}'}",
        "data: {train: '${oc.create:x}'}",
        "run: {name: '${run.${oc.env:SECRET}}'}",
    ],
)
def test_a_configuration_reads_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: model}}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "hunter2" not in str(caught.value)


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'trace'}]\n"
    )
    with pytest.raises(ConfigError):
        load(path)
    assert not (tmp_path / "trace").exists()


def test_settings_may_follow_one_another(tmp_path: Path) -> None:
    config = load(
        write_workspace(tmp_path),
        ["validation.sampling.max_new_tokens=${rollout.sampling.max_new_tokens}"],
    )
    assert config.validation.sampling.max_new_tokens == 64


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", [evaluate, generate], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "setting", ["reward.function", "rollout.environment", "rollout.agent"]
)
def test_a_foreign_runs_functions_run_only_if_the_caller_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: Any,
    setting: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    config, run, trace = (
        write_workspace(tmp_path),
        tmp_path / "runs" / "foreign",
        tmp_path / "trace",
    )
    run.mkdir(parents=True)
    shutil.copytree("model", run / "model")
    (run / "bomb.py").write_text(
        f"open({str(trace)!r}, 'w').close()\ndef f(**_): return 1.0\n"
    )
    options = ["reward.function=workers.reward_functions:length", "rollout.max_turns=1"] * (
        setting != "reward.function"
    )
    foreign = to_yaml(load(config, [*options, f"{setting}={run}/bomb.py:f"]))
    (run / "config.yaml").write_text(foreign)
    command = ["--model", str(run), "--dry-run"]
    assert kind.main(command) == 2
    told = capsys.readouterr().err
    assert "--trust-run" in told and f"{run}/bomb.py:f" in told and not trace.exists()
    kind.main([*command, "--config", str(config)])
    assert not trace.exists()
    kind.main([*command, "--trust-run"])
    assert trace.exists()


@pytest.mark.parametrize("task_set", ["verifiers:bomb", "openenv:bomb"])
@pytest.mark.parametrize("setting", ["data.train", "data.validation"])
def test_a_foreign_runs_task_set_is_imported_only_if_the_caller_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    task_set: str,
) -> None:
    """Both ways of code: a module that is imported, and a folder that pip installs."""
    monkeypatch.chdir(tmp_path)
    bomb = f"open({str(tmp_path / 'trace')!r}, 'w').close()\n"
    (tmp_path / "bomb.py").write_text(bomb)
    (tmp_path / "bomb").mkdir()
    (tmp_path / "bomb" / "setup.py").write_text(bomb)
    config, run = write_workspace(tmp_path), tmp_path / "runs" / "foreign"
    run.mkdir(parents=True)
    shutil.copytree("model", run / "model")
    ours = [
        "reward.function=workers.reward_functions:length",
        f"{setting}={task_set}?seeds=9",
    ]
    (run / "config.yaml").write_text(to_yaml(load(config, ours)))
    assert evaluate.main(["--model", str(run), "--dry-run"]) == 2
    assert f"names code that would run here: {task_set}" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()


def test_a_foreign_runs_loss_is_neither_replayed_nor_loaded_with_its_policy(
    tmp_path: Path,
) -> None:
    config = load(
        write_workspace(tmp_path),
        ["algorithm.loss.name=custom", "algorithm.loss.function=bomb.py:f"],
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"bomb.py:f.*--trust-run"):
        settings(tmp_path)
    assert settings(tmp_path, trust_run=True).algorithm.loss.function == "bomb.py:f"
