"""What teacher and student read at their output layers, for `algorithm.loss.distillation`.

    samples --with_teacher_prompts--> what the teacher reads --at_tokens_of--> columns of the samples
    teacher: TopTokens --> teacher_top_ids, teacher_top_log_probs     hidden_states --> teacher_hidden
             its WholeLayer, once, on the host --on--> TeacherLayer on each rank of the student
    student: Distilled --> log-probs, entropy and the divergence from these columns

Logits exist for a chunk of tokens at a time, and never travel.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.config.loss import DistillationConfig
from workers.model.losses.divergence import TeacherLayer, linear_divergence, top_log_probs
from workers.model.losses.logprobs import Head, OutputLayer, log_probs_of
from workers.model.rows.packing import ModelInput


@dataclass(frozen=True)
class WholeLayer:
    """A teacher's output layer on the host. weight: [V, H'], bias: [V] or None, NumPy, bfloat16 as int16."""

    weight: Any
    bias: Any
    softcap: float | None
    factor: float
    dtype: torch.dtype

    def on(self, layer: OutputLayer) -> TeacherLayer:
        """Return the part of the tokens that this rank has in the student's `layer`, on its device."""
        head = layer.head
        rows = slice(head.first_id, head.first_id + len(layer.weight))
        weight, bias = (
            None
            if array is None
            else as_tensor(np.array(array[rows]), self.dtype).to(layer.weight.device)
            for array in (self.weight, self.bias)
        )
        return TeacherLayer(
            weight,
            bias,
            Head(head.temperature, self.softcap, self.factor, head.group, head.first_id),
        )


def as_numpy(values: Tensor) -> Any:
    """Return a tensor as NumPy, bfloat16 as int16, which `as_tensor` reverses."""
    return (
        (values.view(torch.int16) if values.dtype == torch.bfloat16 else values)
        .cpu()
        .numpy()
    )


def as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(values)
    return (
        tensor.view(dtype)
        if dtype == torch.bfloat16 and tensor.dtype == torch.int16
        else tensor
    )


@dataclass(frozen=True)
class TopTokens:
    """Read the `count` likeliest of the first `tokens` tokens."""

    count: int
    tokens: int

    def __call__(self, rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
        return top_log_probs(layer, count=self.count, tokens=self.tokens)


def log_probs(rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
    return (log_probs_of(layer, rows.targets)[0],)


def hidden_states(rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
    return (layer.hidden.clone(),)  # FSDP needs outputs that are not views


def with_teacher_prompts(batch: DataProto) -> DataProto:
    """Replace the prompts by the ids of the column `teacher_prompt`, if the batch has it.

    batch: `length` and `prompt_tokens` count the tokens with these prompts.
    """
    if "teacher_prompt" not in batch.objects or not len(batch):
        return batch
    response_lengths = batch.columns["length"] - batch.columns["prompt_tokens"]
    rows = []
    for index, prompt in enumerate(map(torch.from_numpy, batch.objects["teacher_prompt"])):
        row = batch.row(index)
        start = len(row["input_ids"]) - int(response_lengths[index])
        ids, mask = (row[name][start:] for name in ("input_ids", "loss_mask"))
        rows.append(
            {
                "input_ids": torch.cat([prompt, ids]),
                "loss_mask": torch.cat([prompt < 0, mask]),
            }
        )
    shared = {
        name: values for name, values in batch.columns.items() if name == CONTEXT_DEGREE
    }
    return DataProto.from_list(rows, shared)


def at_tokens_of(batch: DataProto, read: DataProto, values: Any) -> Any:
    """Return NumPy `values` [T', ...] of the tokens of `read` as [T, ...] of `batch`, 0 outside its
    `loss_mask`.
    """
    if read is batch:
        return values
    batch_values = np.zeros((batch.num_tokens, *values.shape[1:]), values.dtype)
    batch_values[batch.tokens["loss_mask"].numpy()] = values[
        read.tokens["loss_mask"].numpy()
    ]
    return batch_values


class Distilled:
    """Read log-probs, entropy and the divergence from a teacher. whole: its layer, over the vocabulary.

    Not a dataclass: FSDP2 copies dataclasses among a module's inputs, and a copy's `own` would be lost.
    """

    def __init__(self, divergence: str, whole: WholeLayer | None = None) -> None:
        self.divergence = divergence
        self.whole = whole
        self.own: TeacherLayer | None = None

    def __call__(self, rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
        outputs = log_probs_of(layer, rows.targets)
        # Such as of a rank without sequences, which have no columns.
        if not len(rows.targets):
            return *outputs, outputs[0]
        teacher = rows.teacher
        if self.whole is None:
            top = {
                "ids": teacher["teacher_top_ids"].long(),
                "log_probs": teacher["teacher_top_log_probs"],
            }
            return *outputs, linear_divergence(layer, self.divergence, **top)
        # For one mini-batch, because colocated engines need the memory between updates.
        if self.own is None:
            self.own = self.whole.on(layer)
        hidden = as_tensor(teacher["teacher_hidden"], self.whole.dtype)
        divergence = linear_divergence(
            layer, self.divergence, teacher=self.own, teacher_hidden=hidden
        )
        return *outputs, divergence


@dataclass
class WithHidden:
    """Also read the hidden states."""

    read: Distilled | None

    def __call__(self, rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
        outputs = (
            log_probs_of(layer, rows.targets)
            if self.read is None
            else self.read(rows, layer)
        )
        return *outputs, layer.hidden.clone()


def distilled(
    loss_function: Any, teacher_layer: WholeLayer | None
) -> Distilled | WithHidden | None:
    """Return what a model with this loss reads, or None for log-probs and entropy."""
    settings: DistillationConfig | None = getattr(loss_function, "distillation", None)
    read = None
    if settings is not None and settings.compares_distributions:
        read = Distilled(
            settings.divergence, teacher_layer if settings.over == "vocabulary" else None
        )
    return WithHidden(read) if getattr(loss_function, "reads_hidden", False) else read
