"""Recorded runs of TRL: clean ones pass every check, and faults that were planted in the trainer are named."""

from collections.abc import Callable
from math import exp, log, nan
from operator import neg
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.audit import read_bundle
from ballast.audit.checks import check_step
from ballast.audit.finding import Finding, Verdict
from ballast.audit.model_checks import check_with_models
from tests.ballast.audit.trl_runs import END, make_model, record_run, sample

LONG: dict[str, Any] = {"max_completion_length": 24}
TWICE: dict[str, Any] = {"num_iterations": 2, "learning_rate": 3e-3}
FAST: dict[str, Any] = {"num_iterations": 2, "learning_rate": 0.05}
CLEAN: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo, long": LONG,
    "dapo, no scale": {"scale_rewards": "none"},
    "dapo, batch scale": {"scale_rewards": "batch"},
    "dapo, two iterations": TWICE,
    "dapo, KL": {"beta": 0.1},
    "dapo, KL, two iterations": {"beta": 0.1, "use_bias_correction_kl": False, **TWICE},
    "dapo, asymmetric": {"epsilon_high": 0.28, "delta": 1.5, **TWICE},
    "grpo": {"loss_type": "grpo"},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.1},
    "grpo, no scale": {"loss_type": "grpo", "scale_rewards": "none", **LONG},
    "grpo, two updates of a generation": {"loss_type": "grpo", "steps_per_generation": 4},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        **TWICE,
        "learning_rate": 1e-4,
    },
    "bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 1},
    "bnpo, micro-batches": {"loss_type": "bnpo", **LONG},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", **LONG},
    "dr_grpo, scaled": {"loss_type": "dr_grpo", **TWICE},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0, **TWICE},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "bfloat16": {"bf16": True},
    "bfloat16, grpo": {"bf16": True, "loss_type": "grpo", **TWICE},
}


def audit_run(
    folder: Path, prepare: Callable[[Any], None] | None, settings: dict[str, Any]
) -> list[Finding]:
    """Return what is wrong in a recorded run."""
    findings = [
        finding
        for path in record_run(folder, prepare, **settings)
        for finding in check_step(read_bundle(path))
    ]
    assert findings
    return [finding for finding in findings if finding.verdict is Verdict.FAILED]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_passes(name: str, tmp_path: Path) -> None:
    assert audit_run(tmp_path, None, CLEAN[name]) == []


def change_samples(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """Plant a fault in what the sampler returns."""

    def prepare(trainer: Any) -> None:
        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            output = sample(prompts, trainer)
            change(output)
            return output

        trainer.rollout_func = rollout

    return prepare


def change_batch(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """Plant a fault in the generated batch."""

    def prepare(trainer: Any) -> None:
        generate = trainer._generate_and_score_completions

        def generate_changed(inputs: Any) -> Any:
            output = generate(inputs)
            change(output)
            return output

        trainer._generate_and_score_completions = generate_changed

    return prepare


def change_logprobs(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Any], None]:
    """Plant a fault in the trainer's log-probs."""

    def prepare(trainer: Any) -> None:
        compute = trainer._get_per_token_logps_and_entropies

        def compute_changed(*arguments: Any, **named: Any) -> Any:
            logprobs, *others = compute(*arguments, **named)
            return change(logprobs), *others

        trainer._get_per_token_logps_and_entropies = compute_changed

    return prepare


def change_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def prepare(trainer: Any) -> None:
        compute = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: change(compute(model, inputs))

    return prepare


def change_settings(**settings: Any) -> Callable[[Any], None]:
    """Compute the loss with other settings than those that the trainer reports."""

    def prepare(trainer: Any) -> None:
        compute = trainer._compute_loss

        def compute_changed(model: Any, inputs: Any) -> Any:
            usual = {name: getattr(trainer, name) for name in settings}
            for name, value in settings.items():
                setattr(trainer, name, value)
            loss = compute(model, inputs)
            for name, value in usual.items():
                setattr(trainer, name, value)
            return loss

        trainer._compute_loss = compute_changed

    return prepare


def freeze_sampler(trainer: Any) -> None:
    """Sample from the first weights. TRL patches the trainer's model, so that a copy of it would not do."""
    trainer.sampler_model = make_model()


def sample_colder(trainer: Any) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        usual = trainer.temperature
        trainer.temperature = 0.5
        output = sample(prompts, trainer)
        trainer.temperature = usual
        return output

    trainer.rollout_func = rollout


def map_logprobs(change: Callable[[float], float]) -> Callable[[dict[str, Any]], None]:
    def change_output(output: dict[str, Any]) -> None:
        output["logprobs"] = [
            [change(value) for value in row] for row in output["logprobs"]
        ]

    return change_output


def zero(value: float) -> float:
    return 0.0


def shift_sampler(output: dict[str, Any]) -> None:
    output["logprobs"] = [[0.0, *row[:-1]] for row in output["logprobs"]]


def repeat_samples(output: dict[str, Any]) -> None:
    for name in ("completion_ids", "logprobs"):
        output[name] = [
            output[name][number - number % 4] for number in range(len(output[name]))
        ]


def swap_logprobs(output: dict[str, Any]) -> None:
    output["logprobs"] = output["logprobs"][1:] + output["logprobs"][:1]


def mask_most_rows(output: dict[str, Any]) -> None:
    output["completion_mask"][2:] = 0


def mask_end(output: dict[str, Any]) -> None:
    output["completion_mask"][output["completion_ids"] == END] = 0


def mask_first_token(output: dict[str, Any]) -> None:
    output["completion_mask"][:, 0] = 0


def train_padding(output: dict[str, Any]) -> None:
    output["completion_mask"][:] = 1


def scale_advantages(factor: float) -> Callable[[dict[str, Any]], None]:
    def change(output: dict[str, Any]) -> None:
        output["advantages"] = output["advantages"] * factor

    return change


def roll_advantages(output: dict[str, Any]) -> None:
    output["advantages"] = output["advantages"].roll(1)


def whiten_advantages(output: dict[str, Any]) -> None:
    advantages = output["advantages"]
    output["advantages"] = (advantages - advantages.mean()) / (advantages.std() + 1e-4)


def zero_old(output: dict[str, Any]) -> None:
    output["old_per_token_logps"] = torch.zeros_like(output["old_per_token_logps"])


def shift_old(output: dict[str, Any]) -> None:
    output["old_per_token_logps"] = output["old_per_token_logps"].roll(1, dims=1)


Fault = tuple[str, str, Callable[[Any], None], dict[str, Any]]
KL: dict[str, Any] = {"beta": 0.5, "use_bias_correction_kl": False, **TWICE}
ONCE: dict[str, Any] = {"max_steps": 1}
FAULTS: dict[str, Fault] = {
    "sampler's log-probs are zeros": (
        "log_probs.sampler",
        "all_zero",
        change_samples(map_logprobs(zero)),
        {},
    ),
    "they are probabilities": (
        "log_probs.sampler",
        "probabilities",
        change_samples(map_logprobs(exp)),
        {},
    ),
    "they are in base 2": (
        "log_probs.sampler_and_trainer",
        "base_2",
        change_samples(map_logprobs(lambda value: value / log(2))),
        {},
    ),
    "they are negated": (
        "log_probs.sampler",
        "sign_flipped",
        change_samples(map_logprobs(neg)),
        {},
    ),
    "they are constant": (
        "log_probs.sampler",
        "constant",
        change_samples(map_logprobs(lambda value: -1.0)),
        {},
    ),
    "they are clamped": (
        "log_probs.sampler_and_trainer",
        "clamped",
        change_samples(map_logprobs(lambda value: max(value, -2.0))),
        {},
    ),
    "they are NaN where rare": (
        "log_probs.sampler",
        "not_finite",
        change_samples(map_logprobs(lambda value: nan if value < -4 else value)),
        {},
    ),
    "they are shifted": (
        "log_probs.sampler_and_trainer",
        "shifted_by_one",
        change_samples(shift_sampler),
        {},
    ),
    "they are of other rows": (
        "log_probs.sampler_and_trainer",
        "other_rows",
        change_samples(swap_logprobs),
        {},
    ),
    "samples are repeated": (
        "selection.duplicates",
        "duplicate_rows",
        change_samples(repeat_samples),
        {},
    ),
    "most rows are masked": (
        "layout.loss_tokens",
        "most_rows_masked",
        change_batch(mask_most_rows),
        {},
    ),
    "the end is masked": (
        "layout.after_end",
        "end_token_not_trained",
        change_batch(mask_end),
        LONG,
    ),
    "the mask begins late": (
        "layout.prompt_mask",
        "mask_shifted_right",
        change_batch(mask_first_token),
        {},
    ),
    "padding is trained": (
        "layout.after_end",
        "trained_after_end",
        change_batch(train_padding),
        LONG,
    ),
    "advantages are negated": (
        "advantages.estimator",
        "sign_flipped",
        change_batch(scale_advantages(-1)),
        {},
    ),
    "advantages are halved": (
        "advantages.estimator",
        "scaled",
        change_batch(scale_advantages(0.5)),
        {},
    ),
    "advantages are 0": (
        "advantages.estimator",
        "all_zero",
        change_batch(scale_advantages(0)),
        {},
    ),
    "advantages are scaled by the batch": (
        "advantages.estimator",
        "estimator:grpo_batch_std",
        change_batch(whiten_advantages),
        {"scale_rewards": "none"},
    ),
    "old log-probs are zeros": ("log_probs.old", "all_zero", change_batch(zero_old), TWICE),
    "old log-probs are shifted": (
        "log_probs.new_places",
        "shifted_by_one",
        change_batch(shift_old),
        TWICE,
    ),
    "labels are shifted": (
        "log_probs.sampler_and_trainer",
        "shifted_by_one",
        change_logprobs(lambda logprobs: logprobs.roll(1, dims=1)),
        {},
    ),
    "log-probs are zeros": (
        "log_probs.new",
        "all_zero",
        change_logprobs(lambda logprobs: logprobs * 0),
        {},
    ),
    "the loss is negated": ("loss.value", "sign_flipped", change_loss(neg), LONG),
    "the loss is NaN": (
        "loss.value",
        "not_finite",
        change_loss(lambda loss: loss * nan),
        ONCE,
    ),
    "a token mean": (
        "loss.value",
        "aggregation:token_mean",
        change_settings(loss_type="dapo"),
        {"loss_type": "grpo", **LONG},
    ),
    "a mean of rows": (
        "loss.value",
        "aggregation:sequence_mean_token_mean",
        change_settings(loss_type="grpo"),
        LONG,
    ),
    "no clipping": (
        "loss.value",
        "not_clipped",
        change_settings(epsilon_low=1e9, epsilon_high=1e9),
        FAST,
    ),
    "bounds swapped": (
        "loss.value",
        "clip_bounds_swapped",
        change_settings(epsilon_low=0.4, epsilon_high=0.1),
        {"epsilon": 0.1, "epsilon_high": 0.4, **FAST},
    ),
    "no KL": ("loss.value", "kl_left_out", change_settings(beta=0.0), KL),
    "KL negated": ("loss.value", "kl_sign_flipped", change_settings(beta=-0.5), KL),
    "ratios of sequences": (
        "loss.value",
        "loss:gspo",
        change_settings(importance_sampling_level="sequence"),
        FAST,
    ),
}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    check, cause, prepare, settings = FAULTS[name]
    assert (check, cause) in {
        (finding.name, finding.cause) for finding in audit_run(tmp_path, prepare, settings)
    }


FOUND: dict[str, tuple[str, Callable[[Any], None], dict[str, Any]]] = {
    "advantages of other rows": ("advantages.estimator", change_batch(roll_advantages), {}),
    "weights that never arrive": ("log_probs.sampler_and_trainer", freeze_sampler, {}),
    "another temperature": ("log_probs.sampler_and_trainer", sample_colder, {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_without_a_name_is_found(name: str, tmp_path: Path) -> None:
    check, prepare, settings = FOUND[name]
    assert check in {finding.name for finding in audit_run(tmp_path, prepare, settings)}


MODEL: dict[str, tuple[Callable[[Any], None] | None, int, str]] = {
    "clean": (None, 1, ""),
    "another temperature": (sample_colder, 1, "temperature"),
    "weights that never arrive": (freeze_sampler, 2, "other_weights"),
}


@pytest.mark.parametrize("name", MODEL)
def test_the_model_names_what_columns_cannot(name: str, tmp_path: Path) -> None:
    prepare, step, cause = MODEL[name]
    paths = record_run(tmp_path, prepare, save_strategy="steps", save_steps=1)
    first = tmp_path / "model"
    models = [first] if step == 1 else [tmp_path / "trl" / "checkpoint-1", first]
    sampler, old = check_with_models(read_bundle(paths[step - 1]), models)
    assert sampler.cause == cause, sampler.text
    assert old.verdict is Verdict.PASSED
