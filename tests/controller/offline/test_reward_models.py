"""Reward models, from a configuration to the scores that others read of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from controller.config.offline import RewardDataConfig
from controller.observability.report import write_report
from controller.offline.examples import reward_examples
from controller.offline.tokenized import Row, scored_row
from controller.training_loop import Outcome
from examples.addition import data
from examples.addition.warm_start import tokenizer
from tests.controller.offline.local_run import undeclared_metrics
from tests.json_lines import write_lines
from workers.errors import DataError
from workers.rendering import Renderer

Run = Callable[..., Outcome]
PADDED_BATCH = "the result scores a padded batch in transformers as the run did"
LABELLED = [
    {
        "prompt": f"{a}+{b}=",
        "response": f"{a + b}",
        "score": a - 2.0,
        "completions": [f"{a}", f"{b}"],
        "labels": [1, b % 2],
    }
    for a in range(5)
    for b in range(4)
]


def write(file: str, records: list[dict[str, Any]]) -> None:
    write_lines(Path(file), records)


def scores_of(texts: list[str]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained("runs/run/model")
    batch = AutoTokenizer.from_pretrained("runs/run/model")(
        [f"{text}<eos>" for text in texts], padding=True
    )
    with torch.no_grad():
        return model(
            torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
        ).logits[:, 0]


def test_pairs_are_ranked_by_a_model_that_transformers_reads(run: Run) -> None:
    pairs = [
        {"prompt": f"{n}+1=", "chosen": f"{n % 5}1", "rejected": f"{n % 5}2"}
        for n in range(24)
    ]
    write("pairs.jsonl", pairs[:20])
    write("held_out.jsonl", pairs[20:])
    settings = (
        "loss.center_rewards_coefficient=0.01",
        "data.validation=held_out.jsonl",
        "batch.records_per_step=20",
    )
    outcome = run("reward_model", "run", "run.steps=8", *settings)
    losses = [step["policy/loss"] for step in outcome.steps]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6), "a new head scores 0"
    assert losses[-1] < 0.8 * losses[0]
    assert outcome.after["accuracy"] == 1
    assert undeclared_metrics("run") == set()
    sides = ("chosen", "rejected")
    chosen, rejected = (
        scores_of([pair["prompt"] + pair[side] for pair in pairs[20:]]) for side in sides
    )
    assert outcome.after["chosen_reward"] == pytest.approx(
        chosen.mean().item(), abs=1e-5
    ), PADDED_BATCH
    assert outcome.after["margin"] == pytest.approx(
        (chosen - rejected).mean().item(), abs=1e-5
    )
    assert "reward model by bradley_terry" in write_report(Path("runs/run")).read_text()


def test_a_margin_raises_the_loss_of_its_pair(run: Run) -> None:
    records = [
        json.loads(line) | {"margin": 3}
        for line in Path("pairs.jsonl").read_text().splitlines()
    ]
    write("pairs.jsonl", records)
    assert run("reward_model", "run", "run.steps=1").steps[0][
        "policy/loss"
    ] == pytest.approx(np.log1p(np.exp(3)))


def test_the_plan_computes_a_pairs_prompt_once(run: Run) -> None:
    shared, apart = (
        run("reward_model", f"run-{number}", "run.steps=2", *settings).steps
        for number, settings in enumerate(
            (["model.min_shared_tokens=1"], ["model.share_prefixes=never"])
        )
    )
    assert shared[0]["balance/shared_tokens"] > 0.1
    assert [step["policy/loss"] for step in shared] == pytest.approx(
        [step["policy/loss"] for step in apart], abs=1e-6
    )


@pytest.mark.parametrize(
    ("loss", "metric"), [("regression", "absolute_error"), ("process", "accuracy")]
)
def test_scores_and_labels_of_steps_are_learned(run: Run, loss: str, metric: str) -> None:
    write("pairs.jsonl", LABELLED)
    settings = "data.validation=pairs.jsonl", "batch.records_per_step=20"
    outcome = run("reward_model", "run", f"loss.name={loss}", "run.steps=8", *settings)
    assert outcome.before["loss"] == pytest.approx(
        {"regression": 2.0, "process": np.log(2)}[loss], abs=1e-6
    )
    assert outcome.after["loss"] < 0.8 * outcome.before["loss"]
    assert outcome.steps[-1][f"policy/{metric}"] != outcome.before[metric]
    assert undeclared_metrics("run") == set()
    if loss == "regression":
        errors = scores_of(
            [f"{each['prompt']}{each['response']}" for each in LABELLED]
        ) - torch.tensor([each["score"] for each in LABELLED])
        assert outcome.after["loss"] == pytest.approx(
            errors.square().mean().item(), abs=1e-5
        ), PADDED_BATCH


CHARACTERS = tokenizer(data.CHARACTERS + " ")
# white space behind the end token
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }} {% endfor %}"


def row_of(record: dict[str, Any], loss: str, **settings: str) -> Row:
    made = CHARACTERS
    made.chat_template = TEMPLATE
    (*_, example) = reward_examples(record, RewardDataConfig(**settings), loss, "x")
    return scored_row(Renderer(made), example, "x")


def marked(row: Row) -> list[str]:
    """The text up to each marked token, with its label if it has one."""
    labels = row.get("label", np.zeros(len(row["input_ids"])))
    texts = [
        CHARACTERS.decode(row["input_ids"][: place + 1])
        for place in np.flatnonzero(row["loss_mask"])
    ]
    return [
        f"{text} {label:g}"
        for text, label in zip(texts, labels[row["loss_mask"]], strict=True)
    ]


@pytest.mark.parametrize(
    "prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=["text", "chat"]
)
def test_a_score_is_read_at_the_end_token_and_at_each_steps_last(prompt: Any) -> None:
    begin = "1+1=" if isinstance(prompt, str) else "1+1=<eos> "
    record = {
        "prompt": prompt,
        "response": "23",
        "score": 1,
        "completions": ["2", "34", "5"],
        "labels": [True, 0.5, 0],
    }
    assert marked(row_of(record, "regression")) == [f"{begin}23<eos> 0"]
    steps = row_of(record, "process", step_separator=".")
    assert marked(steps) == [f"{begin}2 1", f"{begin}2.34 0.5", f"{begin}2.34.5<eos> 0"]


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        ("regression", {"score": None}),
        ("regression", {"score": float("inf")}),
        ("regression", {"score": "1"}),
        ("process", {"labels": [1]}),
        ("process", {"labels": [1, 2]}),
        ("process", {"labels": [1, float("nan")]}),
        ("process", {"completions": ["1", ""]}),
        ("process", {"completions": "12"}),
    ],
)
def test_a_record_without_finite_labels_is_refused(
    loss: str, change: dict[str, Any]
) -> None:
    with pytest.raises(DataError):
        reward_examples(LABELLED[0] | change, RewardDataConfig(), loss, "x")
