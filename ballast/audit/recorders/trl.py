"""Record the steps of TRL's GRPOTrainer as bundles.

generation --rewards, rows--> loss --log-probs, loss--> runs/audit/step-12/

trainer = GRPOTrainer(...)
record_steps(trainer, "runs/audit")
trainer.train()
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

import ballast.audit
from workers.errors import DataError

ROW = "audit_row"
REWARD = "audit_reward"
VERSION = "audit_version"
"""Columns that are added to TRL's batch. It shuffles and splits them with the others."""
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
WHOLE_BATCH_LOSSES = ("dapo", "cispo")
ESTIMATORS = {"group": "grpo", "batch": "grpo_batch_std", "none": "dr_grpo"}
AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
    "luspo": "sequence_mean_token_sum",
    "dapo": "token_mean",
    "cispo": "token_mean",
}
CORRECTIONS = {"token_truncate": "token", "sequence_truncate": "sequence"}
NOT_COMPUTED = "TRL does not compute it with these settings"


def record_steps(trainer: Any, folder: str | Path) -> "StepRecorder":
    """Record every step of a GRPOTrainer in `folder`. Call it before `trainer.train()`."""
    if trainer.accelerator.num_processes > 1:
        raise DataError(
            f"num_processes={trainer.accelerator.num_processes}: a recorder sees the rows of its process "
            "alone. Record a run of one process."
        )
    recorder = StepRecorder(trainer, Path(folder))
    trainer.add_callback(recorder)
    return recorder


@dataclass(frozen=True)
class MicroBatch:
    """What one call of the loss read and returned. inputs: TRL's batch. logprobs: [B, T] of completions.

    iteration: 0 when its samples are trained for the first time.
    """

    step: int
    number: int
    iteration: int
    inputs: Mapping[str, Any]
    logprobs: torch.Tensor
    loss: float


class StepRecorder(TrainerCallback):  # type: ignore[misc]
    """Wraps the methods of a trainer that know rewards, log-probs and loss.

    A bundle has a whole number of generated batches and of optimiser steps, so that groups are complete.
    It is written at the next micro-batch, when the gradient norm has been logged.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer = trainer
        self.folder = folder
        self.micro_batches: list[MicroBatch] = []
        self.gradient_norms: dict[int, float] = {}
        self.generated_rows = 0
        self.logprobs: torch.Tensor | None = None
        self.generate = trainer._generate_and_score_completions
        self.compute_logprobs = trainer._get_per_token_logps_and_entropies
        self.compute_loss = trainer._compute_loss
        trainer._generate_and_score_completions = self._generate
        trainer._get_per_token_logps_and_entropies = self._compute_logprobs
        trainer._compute_loss = self._compute_loss

    def _generate(self, inputs: Any) -> Any:
        output = self.generate(inputs)
        count = len(output["completion_ids"])
        logged = self.trainer._logs["rewards"]
        columns = [list(logged[name])[-count:] for name in self.trainer.reward_func_names]
        weights = self.trainer.reward_weights.cpu().double()
        rewards = (torch.tensor(columns, dtype=torch.float64).T * weights).nansum(1)
        output[ROW] = torch.arange(count) + self.generated_rows
        output[REWARD] = rewards
        output[VERSION] = torch.full((count,), self.trainer.state.global_step)
        self.generated_rows += count
        return output

    def _compute_logprobs(self, *arguments: Any, **named_arguments: Any) -> Any:
        result = self.compute_logprobs(*arguments, **named_arguments)
        self.logprobs = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if not self.trainer.model.training:
            return self.compute_loss(model, inputs)
        self._write_full_step()
        loss = self.compute_loss(model, inputs)
        step = self.trainer.state.global_step + 1
        number = len(self.micro_batches)
        assert self.logprobs is not None
        iteration = self.trainer._step // self.trainer.args.steps_per_generation
        iteration %= self.trainer.num_iterations
        self.micro_batches.append(
            MicroBatch(step, number, iteration, inputs, self.logprobs, float(loss.detach()))
        )
        return loss

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any
    ) -> None:
        if logs and "grad_norm" in logs:
            self.gradient_norms[state.global_step] = float(logs["grad_norm"])

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._write_full_step()
        if self.micro_batches:
            print(
                f"not recorded: the last {len(self.micro_batches)} micro-batches, of an unfinished batch"
            )

    def _write_full_step(self) -> None:
        arguments = self.trainer.args
        size = math.lcm(
            arguments.steps_per_generation, arguments.gradient_accumulation_steps
        )
        if len(self.micro_batches) < size:
            return
        micro_batches = self.micro_batches
        self.micro_batches = []
        write_step(self.trainer, self.folder, micro_batches, self.gradient_norms)


def write_step(
    trainer: Any,
    folder: Path,
    micro_batches: list[MicroBatch],
    gradient_norms: Mapping[int, float],
) -> Path:
    """Write micro-batches as a bundle."""
    steps = sorted({micro_batch.step for micro_batch in micro_batches})
    rows = [row for micro_batch in micro_batches for row in _rows(trainer, micro_batch)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    losses = [
        sum(batch.loss for batch in micro_batches if batch.step == step) for step in steps
    ]
    algorithm, missing = describe_algorithm(trainer, micro_batches)
    for name in ("sampler_logprobs", "reference_logprobs"):
        if name not in columns:
            missing[name] = NOT_COMPUTED
    if micro_batches[0].iteration:
        # The first optimiser step of a bundle has ratios of 1, which those of a later iteration have not.
        missing["mini_batch"] = (
            "a later iteration over the samples, whose old log-probs are of earlier weights"
        )
        del columns["mini_batch"]
    norms = [gradient_norms.get(step) for step in steps]
    if None in norms:
        missing["gradient_norm"] = "TRL logs it with logging_steps=1"
    denominators = {}
    if (
        algorithm.get("aggregation") == "token_mean"
        and trainer.loss_type in WHOLE_BATCH_LOSSES
    ):
        denominators["tokens"] = _logged_denominators(micro_batches, steps)
    template = trainer._tokenizer.chat_template or ""
    return ballast.audit.record(
        folder / f"step-{steps[-1]}",
        step=steps[-1],
        algorithm=algorithm,
        loss=losses,
        gradient_norm=None if None in norms else norms,
        weight_version=steps[0] - 1,
        learning_rate=trainer.args.learning_rate,
        sampled=len(rows),
        denominators=denominators,
        model={"name": str(trainer.model.config._name_or_path)},
        template={
            "hash": hashlib.sha256(template.encode()).hexdigest() if template else ""
        },
        end_tokens=trainer.eos_token_ids,
        precision=_precision(trainer),
        writer="trl",
        missing=missing,
        **columns,
    )


def _rows(trainer: Any, micro_batch: MicroBatch) -> list[dict[str, Any]]:
    inputs = micro_batch.inputs
    logprobs = {
        "new_logprobs": micro_batch.logprobs,
        # Without them TRL takes the new ones, detached.
        "old_logprobs": inputs.get("old_per_token_logps", micro_batch.logprobs),
        "sampler_logprobs": inputs.get("sampling_per_token_logps"),
        "reference_logprobs": inputs.get("ref_per_token_logps"),
    }
    mask = _loss_mask(inputs)
    rows = []
    for number in range(len(mask)):
        prompt = inputs["prompt_ids"][number][inputs["prompt_mask"][number].bool()]
        length = _completion_length(trainer, inputs, number)
        completion = inputs["completion_ids"][number, :length]
        before = np.zeros(len(prompt))
        row = {
            "token_ids": torch.cat([prompt, completion]).tolist(),
            "loss_mask": [*before.astype(int), *mask[number, :length].tolist()],
            "rewards": float(inputs[REWARD][number]),
            "group": int(inputs[ROW][number]) // trainer.num_generations,
            "prompt_length": len(prompt),
            "truncated": int(
                not length or int(completion[-1]) not in trainer.eos_token_ids
            ),
            "mini_batch": micro_batch.step,
            "micro_batch": micro_batch.number,
            "weight_versions": [int(inputs[VERSION][number])] * (len(prompt) + length),
        }
        for name, values in logprobs.items():
            if values is not None:
                row[name] = [*before, *values[number, :length].tolist()]
        advantages = inputs["advantages"][number]
        if advantages.dim():
            row["advantages"] = [*before, *advantages[:length].tolist()]
        else:
            row["advantages"] = float(advantages)
        rows.append(row)
    return rows


def _loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _completion_length(trainer: Any, inputs: Mapping[str, Any], number: int) -> int:
    """Count a completion's tokens. `mask_truncated_completions` clears the mask of whole completions."""
    is_token = inputs["completion_ids"][number] != trainer._tokenizer.pad_token_id
    is_token |= inputs["completion_mask"][number].bool()
    places = torch.nonzero(is_token)
    return int(places[-1]) + 1 if len(places) else 0


def _logged_denominators(micro_batches: list[MicroBatch], steps: list[int]) -> list[float]:
    """Return the tokens by which TRL divided. All micro-batches of a generated batch hold them."""
    totals = {
        batch.step: float(batch.inputs["num_items_in_batch"]) for batch in micro_batches
    }
    return [totals[step] for step in steps]


def _precision(trainer: Any) -> str:
    if trainer.args.bf16 or next(trainer.model.parameters()).dtype == torch.bfloat16:
        return "bfloat16"
    return "float32"


def describe_algorithm(
    trainer: Any, micro_batches: list[MicroBatch]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a trainer's settings as the bundle names them, and reasons for those without a name."""
    arguments = trainer.args
    loss_type = trainer.loss_type
    algorithm: dict[str, Any] = {
        "group_size": trainer.num_generations,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "dual_clip": arguments.delta or 0.0,
        "clip_low": trainer.epsilon_low,
        "clip_high": trainer.epsilon_high,
        "kl_coefficient": trainer.beta,
        "kl_estimator": "k3",
        "kl_in_reward": 0.0,
        "entropy_coefficient": trainer.entropy_coef,
        "correction": "none",
        "loss": "ppo_clip",
        "aggregation": AGGREGATIONS.get(loss_type),
        "constant_length": trainer.max_completion_length,
    }
    missing = {}
    if trainer.multi_objective_aggregation == "sum_then_normalize":
        algorithm["estimator"] = ESTIMATORS[trainer.scale_rewards]
        algorithm["epsilon"] = 0.0 if trainer.scale_rewards == "none" else 1e-4
    else:
        missing["algorithm.estimator"] = (
            "multi_objective_aggregation normalises each reward function"
        )
    if loss_type == "cispo":
        # TRL clips ratios to at most epsilon_high itself, and has no lower bound.
        algorithm |= {
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": trainer.epsilon_high - 1,
        }
    elif trainer.importance_sampling_level == "sequence":
        algorithm["loss"] = "gspo"
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        algorithm["correction"] = CORRECTIONS.get(trainer.vllm_importance_sampling_mode)
        algorithm["correction_cap"] = trainer.vllm_importance_sampling_clip_max
    if reason := _why_no_loss(trainer, micro_batches):
        algorithm["loss"] = None
        missing["algorithm.loss"] = reason
    if reason := _why_no_aggregation(trainer, micro_batches):
        algorithm["aggregation"] = None
        missing["algorithm.aggregation"] = reason
    return algorithm, missing


def _why_no_loss(trainer: Any, micro_batches: list[MicroBatch]) -> str:
    arguments = trainer.args
    if trainer.loss_type not in (*CLIPPED_LOSSES, "cispo"):
        return f"loss_type={trainer.loss_type} has no formula in the bundle's format"
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        mode = trainer.vllm_importance_sampling_mode
        if mode not in CORRECTIONS or trainer.vllm_importance_sampling_clip_min is not None:
            return f"vllm_importance_sampling_mode={mode} has no name in the format"
    if trainer.top_entropy_quantile < 1:
        return "top_entropy_quantile masks tokens by entropies, which the format lacks"
    if trainer.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold masks rows in the loss"
    has_old_logprobs = any("old_per_token_logps" in batch.inputs for batch in micro_batches)
    # Else ratios are 1.
    if trainer.beta and arguments.use_bias_correction_kl and has_old_logprobs:
        return "use_bias_correction_kl multiplies the KL"
    if trainer.aux_loss_enabled:
        return "the loss has an auxiliary loss of the router"
    return ""


def _why_no_aggregation(trainer: Any, micro_batches: list[MicroBatch]) -> str:
    arguments = trainer.args
    loss_type = trainer.loss_type
    if micro_batches[0].iteration and len({batch.step for batch in micro_batches}) > 1:
        return "a later iteration has several optimiser steps, see mini_batch"
    if loss_type == "bnpo" and arguments.gradient_accumulation_steps > 1:
        return "loss_type=bnpo averages the token means of micro-batches"
    if loss_type in WHOLE_BATCH_LOSSES:
        if arguments.steps_per_generation != arguments.gradient_accumulation_steps:
            return f"loss_type={loss_type} divides by a share of the tokens of the generated batch"
    elif loss_type != "bnpo" and not all(
        _has_loss_tokens(batch) for batch in micro_batches
    ):
        return f"loss_type={loss_type} counts rows without loss tokens"
    return ""


def _has_loss_tokens(micro_batch: MicroBatch) -> bool:
    """Return whether every row has loss tokens."""
    mask = _loss_mask(micro_batch.inputs)
    return bool(mask.any(dim=1).all())
