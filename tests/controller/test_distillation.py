"""Distillation from a configuration: the real driver, teacher, dispatch and training engine, by stand-ins of
vLLM and Ray. The loss is that of transformers' own distributions.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from controller.config import load
from controller.lifecycle.model_checks import check_models
from examples.addition.warm_start import create_model, tokenizer
from tests.controller.stand_ins.run import (
    SETTINGS,
    StandInRun,
    StandIns,
    write_stand_in_workspace,
)
from tests.json_lines import read_lines
from tests.refusals import refused, refused_rows
from tests.workers.model.reference import divergence
from workers.batch.remote_batch import RemoteBatch
from workers.errors import BallastError

Run = Callable[..., StandInRun]
TAUGHT = (
    "teacher.path=teacher",
    "algorithm.loss.distillation.coefficient=0.5",
    "run.steps=1",
)
ALONE = ("algorithm.advantage=none", "reward.function=''")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taught")
    write_stand_in_workspace(path)
    shutil.copytree(path / "model", path / "teacher")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(path / "model")
    config.vocab_size, config.hidden_size = config.vocab_size + 4, 2 * config.hidden_size
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        path / "teacher"
    )
    create_model(path / "near", seed=2)
    file = path / "prompts.jsonl"
    known = read_lines(file)
    taught = [
        {"who": ("teacher", "near")[i % 2], "hint": "#" * (1 + i)}
        for i in range(len(known))
    ]
    file.write_text(
        "".join(
            json.dumps(one | other) + "\n" for one, other in zip(known, taught, strict=True)
        )
    )
    return path


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(folder)
    stand_ins = StandIns(monkeypatch)
    stand_ins.compute("float64")
    settings = [
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "data.validation=''",
        "data.shuffle=false",
        "rollout.placement=colocated",
    ]
    return lambda *overrides: stand_ins.run([*settings, *overrides])


SEVERAL = (
    "teacher.path=''",
    "teacher.paths={teacher: teacher, near: near}",
    "teacher.key=who",
    *ALONE,
)
HINTS = ("teacher.context_key=hint", "teacher.context_template='{context}={prompt}'")
LONG = (
    f"teacher.context_template='{120 * '#'}{{context}}{{prompt}}'",
    "policy.max_tokens_per_micro_batch=256",
)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("over", "kind", "others"),
    [
        ("token", "reverse_kl", ALONE),
        ("top_k", "jsd", ()),
        ("vocabulary", "forward_kl", ALONE),
        ("top_k", "reverse_kl", SEVERAL),
        ("token", "reverse_kl", (*SEVERAL, *HINTS)),
        ("vocabulary", "reverse_kl", (*ALONE, *HINTS, "teacher.path=''")),
        ("top_k", "forward_kl", (*ALONE, *HINTS, "model.share_prefixes=never")),
    ],
)
def test_the_loss_is_that_of_both_models_distributions(
    run: Run, batches: list[RemoteBatch], over: str, kind: str, others: tuple[str, ...]
) -> None:
    chosen = [f"algorithm.loss.distillation.over={over}"]
    chosen += [f"algorithm.loss.distillation.divergence={kind}"] if over != "token" else []
    chosen += ["algorithm.loss.distillation.top_k=3"] if over == "top_k" else []
    metrics = run(*TAUGHT, *chosen, *others).outcome.steps[0]
    rows, distances = batches[0].gather(), []
    for index, record in enumerate(records(batches[0])):
        row, hint = rows.row(index), HINTS[0] in others and record["hint"] + "="
        teacher = (
            record["who"]
            if SEVERAL[1] in others
            else "model"
            if "teacher.path=''" in others
            else "teacher"
        )
        log_p = log_probs("model", row["input_ids"])
        log_q = log_probs(teacher, row["input_ids"], hint or "")
        common = log_q[:, : log_p.shape[-1]]
        if over == "token":
            found = (log_p - common).gather(-1, row["input_ids"][1:, None]).squeeze(-1)
        elif over == "vocabulary":
            found = divergence(kind, log_p.exp(), common.softmax(-1))
        else:
            top = common.topk(3).indices
            parts = [part.exp().gather(-1, top) for part in (log_p, log_q)]
            found = divergence(
                kind,
                *(torch.cat([part, 1 - part.sum(-1, keepdim=True)], -1) for part in parts),
            )
        distances.append(found[row["loss_mask"][1:]])
    expected = torch.cat(distances).mean().item()
    assert metrics["policy/teacher_divergence"] == pytest.approx(expected, rel=1e-6)
    if others == ALONE and over == "vocabulary":
        weights = torch.cat(
            [torch.full_like(part, 1 / (len(distances) * len(part))) for part in distances]
        )
        assert metrics["policy/loss"] == pytest.approx(
            0.5 * (torch.cat(distances) * weights).sum().item(), rel=1e-6
        )
    assert metrics["policy/grad_norm"] > 0


def records(batch: RemoteBatch) -> list[dict[str, str]]:
    """The record of each row."""
    known = read_lines(Path("prompts.jsonl"))
    return [known[int(uid)] for uid in batch["uid"].tolist()]


@cache
def loaded(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def log_probs(model: str, ids: torch.Tensor, before: str = "") -> torch.Tensor:
    """By transformers, of the tokens from the second on, [L - 1, V], after the text `before`."""
    given = torch.tensor(tokenizer()(before).input_ids, dtype=torch.int64)
    found = loaded(model)(torch.cat([given, ids])[None])
    return found.logits[0, len(given) : -1].log_softmax(-1)


@refused_rows(
    """
teacher.path=
teacher.path algorithm.loss.distillation.coefficient=0
algorithm.loss.distillation.divergence=jsd algorithm.loss.distillation.over=token
algorithm.loss.distillation.top_k=8 algorithm.loss.distillation.over=vocabulary
algorithm.zero_variance_groups=drop
teacher.path SEVERAL teacher.path=teacher
teacher.paths SEVERAL algorithm.loss.distillation.over=vocabulary
teacher.key=who
teacher.context_key HINTS rollout.environment=reward.py:reward
teacher.context_template HINTS "teacher.context_template='{context}'"
teacher.context_template HINTS teacher.context_key=
model.router_replay=replay HINTS teacher.path=
teacher.cpu_offload=true HINTS teacher.path=
teacher.forward_max_tokens_per_micro_batch HINTS policy.max_tokens_per_micro_batch=16
teacher.path HINTS LONG
model.path HINTS LONG teacher.path=
"prompts.jsonl: record 2" teacher.path= teacher.key=who "teacher.paths={teacher: teacher}"
"prompts.jsonl record 1" HINTS teacher.context_key=solution
algorithm.advantage=none teacher.path= algorithm.loss.distillation.coefficient=0
""",
    SEVERAL=SEVERAL,
    HINTS=HINTS,
    LONG=LONG,
)
def test_what_cannot_teach_is_refused(run: Run, named: str, overrides: list[str]) -> None:
    with refused(named, BallastError):
        run(*TAUGHT, *overrides)


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
    config = load(
        None,
        [*SETTINGS, *TAUGHT, "resources.device=cpu", "rollout.placement=shared_memory"],
    )
    with refused("algorithm.loss.distillation.top_k=64"):
        check_models(config)
    config.algorithm.loss.distillation.top_k = 3
    check_models(config)
    config.teacher.path = "foreign"
    with refused("teacher.path=foreign"):
        check_models(config)
    config.teacher.path, config.teacher.paths = "", {"near": "near", "far": "foreign"}
    with refused("teacher.paths.far=foreign"):
        check_models(config)
