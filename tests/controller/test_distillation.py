"""Distillation from a configuration: the real driver, teacher, dispatch and training engine, by stand-ins of vLLM and
Ray. The loss is that of transformers' own distributions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from controller.config import load
from controller.lifecycle.model_checks import check_models
from tests.controller.stand_ins.run import SETTINGS, StandInRun, StandIns, write_stand_in_workspace
from tests.workers.model.reference import divergence
from tests.workers.model.tiny import unpacked_distributions
from workers.errors import ConfigError
from workers.remote_batch import RemoteBatch

Run = Callable[..., StandInRun]
TAUGHT = ("teacher.path=teacher", "algorithm.loss.distillation.coefficient=0.5", "run.steps=1")
ALONE = ("algorithm.advantage=none", "reward.function=''")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taught")
    write_stand_in_workspace(path)
    shutil.copytree(path / "model", path / "teacher")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(path / "model")
    config.vocab_size, config.hidden_size = config.vocab_size + 4, 2 * config.hidden_size
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path / "teacher")
    return path


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(folder)
    stand_ins = StandIns(monkeypatch)
    stand_ins.compute("float64")
    settings = [f"run.dir={tmp_path}", "policy.data_parallel=1", "data.validation=''", "rollout.placement=colocated"]
    return lambda *overrides: stand_ins.run([*settings, *overrides])


@pytest.mark.parametrize(
    ("over", "kind", "others"),
    [("token", "reverse_kl", ALONE), ("top_k", "jsd", ()), ("vocabulary", "forward_kl", ALONE)],
)
def test_the_loss_is_that_of_both_models_distributions(
    run: Run, batches: list[RemoteBatch], over: str, kind: str, others: tuple[str, ...]
) -> None:
    chosen = [f"algorithm.loss.distillation.over={over}"]
    chosen += [f"algorithm.loss.distillation.divergence={kind}"] if over != "token" else []
    chosen += ["algorithm.loss.distillation.top_k=3"] if over == "top_k" else []
    metrics = run(*TAUGHT, *chosen, *others).outcome.steps[0]
    rows = batches[0].gather()
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in ("model", "teacher")
    )
    distances = []
    each = zip(*(unpacked_distributions(model, rows) for model in (student, teacher)), strict=True)
    for index, (log_p, log_q) in enumerate(each):
        row = rows.row(index)
        common = log_q[:, : log_p.shape[-1]]
        if over == "token":
            found = (log_p - common).gather(-1, row["input_ids"][1:, None]).squeeze(-1)
        elif over == "vocabulary":
            found = divergence(kind, log_p.exp(), common.softmax(-1))
        else:
            top = common.topk(3).indices
            parts = [part.exp().gather(-1, top) for part in (log_p, log_q)]
            found = divergence(kind, *(torch.cat([part, 1 - part.sum(-1, keepdim=True)], -1) for part in parts))
        distances.append(found[row["loss_mask"][1:]])
    expected = torch.cat(distances).mean().item()
    assert metrics["policy/teacher_divergence"] == pytest.approx(expected, rel=1e-6)
    if others and over == "vocabulary":
        weights = torch.cat([torch.full_like(part, 1 / (len(distances) * len(part))) for part in distances])
        assert metrics["policy/loss"] == pytest.approx(0.5 * (torch.cat(distances) * weights).sum().item(), rel=1e-6)
    assert metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ("teacher.path", ("teacher.path=''",)),
        ("teacher.path", ("algorithm.loss.distillation.coefficient=0",)),
        (
            "algorithm.loss.distillation.divergence",
            ("algorithm.loss.distillation.over=token", "algorithm.loss.distillation.divergence=jsd"),
        ),
        (
            "algorithm.loss.distillation.top_k",
            ("algorithm.loss.distillation.over=vocabulary", "algorithm.loss.distillation.top_k=8"),
        ),
        ("algorithm.zero_variance_groups", ("algorithm.zero_variance_groups=drop",)),
        (
            "algorithm.advantage",
            ("algorithm.advantage=none", "teacher.path=''", "algorithm.loss.distillation.coefficient=0"),
        ),
    ],
)
def test_settings_without_effect_are_refused(run: Run, setting: str, others: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        run(*TAUGHT, *others)
    assert str(refused.value).startswith(setting)


def test_a_teacher_of_other_tokens_and_a_top_of_all_tokens_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "teacher", folder / "foreign", dirs_exist_ok=True)
    file = folder / "foreign" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(content))
    config = load(None, [*SETTINGS, *TAUGHT, "resources.device=cpu", "rollout.placement=shared_memory"])
    with pytest.raises(ConfigError) as refused:
        check_models(config)
    assert str(refused.value).startswith("algorithm.loss.distillation.top_k=64")
    config.algorithm.loss.distillation.top_k = 3
    check_models(config)
    config.teacher.path = "foreign"
    with pytest.raises(ConfigError) as refused:
        check_models(config)
    assert str(refused.value).startswith("teacher.path=foreign")
