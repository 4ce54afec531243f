"""Training on given sequences, from a configuration to what it leaves behind."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from controller import sft
from controller.observability.report import write_report
from controller.training_loop import Outcome
from tests.controller.offline.local_run import (
    OF_COMMAND,
    SETTINGS,
    recorded,
    undeclared_metrics,
)
from tests.workers.model.tiny import files_beside
from workers.errors import ConfigError, DataError

Run = Callable[..., Outcome]
PLANS = {
    "one micro-batch": ["policy.max_tokens_per_micro_batch=4096"],
    "small caps": ["policy.max_tokens_per_micro_batch=96"],
    "padded": ["model.layout=padded"],
    "in the given order": [
        "balance.algorithm=none",
        "policy.max_sequences_per_micro_batch=2",
    ],
}


@pytest.mark.parametrize("command", ["sft", "preferences", "reward_model"])
def test_curves_do_not_depend_on_the_plan(run: Run, command: str) -> None:
    held_out = "data.validation=held_out.jsonl"
    curves = []
    for number, plan in enumerate(PLANS.values()):
        outcome = run(command, f"run-{number}", held_out, *plan)
        losses = [step["policy/loss"] for step in outcome.steps]
        curves.append([*losses, outcome.before["loss"], outcome.after["loss"]])
    assert abs(curves[0][-1] - curves[0][-2]) > 1e-3, (
        "the steps change what is to be compared"
    )
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-6)


def test_sft_leaves_a_model_and_metrics_that_are_declared_and_a_report(run: Run) -> None:
    outcome = run("sft", "run", "data.validation=held_out.jsonl", "validation.every=2")
    steps = recorded("run")
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert [step["step"] for step in steps if "validation/loss" in step] == [0, 2, 3]
    assert outcome.after["perplexity"] == pytest.approx(math.exp(outcome.after["loss"]))
    assert undeclared_metrics("run") == set()
    assert (Path("runs") / "run" / "model" / "model.safetensors").is_file()
    assert files_beside(Path("runs/run/model")) == files_beside(Path("model"))
    page = write_report(Path("runs") / "run").read_text()
    assert "Loss and validation" in page
    assert "supervised, 6 sequences a step" in page


def test_preferences_begin_at_log_2_and_raise_the_chosen_over_the_rejected(
    run: Run,
) -> None:
    outcome = run("preferences", "run", "run.steps=8")
    first, last = outcome.steps[0], outcome.steps[-1]
    assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-6), (
        "policy and reference are the same at first"
    )
    assert first["preferences/margin"] == pytest.approx(0, abs=1e-5)
    assert last["policy/loss"] < first["policy/loss"]
    assert last["preferences/margin"] > 0
    assert files_beside(Path("runs/run/model")) == files_beside(Path("model"))


@pytest.mark.parametrize("loss", ["ipo", "simpo"])
def test_the_other_losses_learn_too_with_and_without_reference(run: Run, loss: str) -> None:
    steps = run(
        "preferences", "run", f"loss.name={loss}", "run.steps=6", "batch.pairs_per_step=20"
    ).steps
    assert steps[-1]["policy/loss"] < steps[0]["policy/loss"]


def test_with_adapters_the_policy_is_its_own_reference(run: Run) -> None:
    steps = run(
        "preferences", "run", "model.lora.rank=2", "policy.optimizer.learning_rate=1e-2"
    ).steps
    assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["policy/loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_been_stopped(run: Run) -> None:
    checkpoints = "run.checkpoint_every=2"
    whole = run("sft", "whole", "run.steps=4")
    run("sft", "parts", "run.steps=2", checkpoints)
    resumed = run("sft", "parts", "run.steps=4", checkpoints, "run.resume=auto")
    assert [step["data/epoch"] for step in resumed.steps] == [
        step["data/epoch"] for step in whole.steps[2:]
    ]
    losses = [step["policy/loss"] for step in whole.steps[2:]]
    assert [step["policy/loss"] for step in resumed.steps] == pytest.approx(
        losses, abs=1e-6
    )
    assert [step["step"] for step in recorded("parts")] == [0, 1, 2, 3, 4]


def test_epochs_pass_over_every_record_and_the_last_step_takes_what_is_left(
    run: Run,
) -> None:
    steps = run(
        "sft", "run", "run.steps=0", "run.epochs=2", "batch.sequences_per_step=12"
    ).steps
    assert [step["data/epoch"] for step in steps] == pytest.approx([0.6, 1.2, 1.8, 2.0])


def test_long_records_are_dropped_and_counted_or_refused(run: Run) -> None:
    steps = run("sft", "run", "data.max_tokens=24", "run.steps=1").steps
    assert 0 < steps[0]["data/dropped"] < 20
    with pytest.raises(
        DataError,
        match=r"pairs.jsonl record \d+ has \d+ tokens. Raise data.max_tokens \(24\)",
    ):
        run("sft", "other", "data.max_tokens=24", "data.overlong_records=error")


def test_a_checkpoint_of_other_data_is_refused_or_taken_as_run_other_data_says(
    run: Run,
) -> None:
    run("sft", "run", "run.steps=2", "run.checkpoint_every=2")
    resumed = ("run.resume=runs/run", "run.steps=3")
    others = {
        "data.train=held_out.jsonl": "has 4 records of other content than the 20 then",
        "data.response_key=rejected": "data.response_key=rejected was 'chosen'",
        "run.seed=1": "run.seed=1 was 0",
        "data.shuffle=false": "data.shuffle=False was True",
        "data.max_tokens=24": r"keeps \d+ records, and kept 20",
    }
    for other, words in others.items():
        with pytest.raises(ConfigError, match=words):
            run("sft", "other", *resumed, other)
    outcome = run(
        "sft",
        "restarted",
        *resumed,
        "data.response_key=rejected",
        "run.on_data_change=restart",
    )
    assert [step["data/epoch"] for step in outcome.steps] == pytest.approx([0.3])


@pytest.mark.parametrize(
    ("length", "setting"),
    [(["run.steps=4"], "run.steps=4"), (["run.steps=0", "run.epochs=2"], "run.epochs=2")],
)
def test_a_finished_run_is_left_as_it_is(
    run: Run, capsys: pytest.CaptureFixture[str], length: list[str], setting: str
) -> None:
    """Two epochs of 20 records, 12 a step, are 4 steps."""
    folder = Path("runs") / "done"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"steps": 4}')
    Path("mine.yaml").write_text("run: {name: done, resume: auto}\n")
    settings = [*SETTINGS, *OF_COMMAND["sft"], "batch.sequences_per_step=12", *length]
    assert sft.main(["--config", "mine.yaml", *settings]) == 0
    assert (
        capsys.readouterr().out
        == f"runs/done has ended after step 4. Raise {setting} to continue it\n"
    )
