"""The training engine that every role uses: forward-only log-probs, forward and backward, optimiser step, weights out.

    Sequences --slice--> micro-batch --pack--> PackedCausalLM --> log_probs, entropy --loss function--> backward
                  (once a micro-batch; gradients are reduced over ranks in the last one)
    optimizer_step: clip --> AdamW --> schedule          named_weights, save_pretrained: gather --> Hugging Face names

It needs torch and transformers only, and runs in a plain process, under torchrun, or inside an actor. Calls are
collective: every rank makes the same calls with the same number of micro-batches.

T tokens and B sequences of this rank.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import ModelConfig, OptimizerConfig
from workers.errors import ConfigError, DataError
from workers.metrics import Metric, Metrics
from workers.model.attention import choose_backend, packed_attention
from workers.model.losses import (
    Denominators,
    LossFunction,
    Predictions,
    Statistics,
    mean,
    rollout_mismatch,
    to_metrics,
)
from workers.model.model import compute_dtype, load_model, load_tokenizer
from workers.model.optimizer import make_optimizer, make_schedule
from workers.model.packing import PackedRow, Sequences, pack
from workers.model.parallel import (
    clip_gradients,
    data_parallel_mesh,
    fsdp_modules,
    full_tensor,
    reshard,
    shard_model,
)

MicroBatch = tuple[int, int]


class Engine:
    """One model, sharded over the data-parallel ranks, with an optimiser unless it is frozen.

    model_config: what to load and how to compute it. optimizer: None for a frozen model. total_steps: optimiser steps
    of the run, for the schedule. temperature: divides the logits, in log-probs and loss alike; that of the rollouts.

    Raises ConfigError or UnsupportedModelError if the model cannot be loaded or packed, before any collective call.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        optimizer: OptimizerConfig | None,
        total_steps: int,
        device: torch.device | str,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        temperature: float = 1.0,
    ) -> None:
        self.device = torch.device(device)
        self.temperature = temperature
        self.reshard_after_forward = reshard_after_forward
        dtype = compute_dtype(model_config.dtype, self.device)
        self.dtype = dtype
        self.attention_backend = choose_backend(model_config.attention, self.device, dtype)
        self.tokenizer = load_tokenizer(model_config.path)
        # Parameters, gradients and optimiser state stay in float32 when the computation is in bfloat16.
        self.module = load_model(model_config, torch.promote_types(dtype, torch.float32))
        self.num_parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.module.requires_grad_(optimizer is not None)
        self.mesh = data_parallel_mesh(self.device)
        shard_model(
            self.module,
            self.module.layers,
            self.mesh,
            compute_dtype=dtype,
            cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward,
        )
        self.optimizer_config = optimizer
        if optimizer is not None:
            self.optimizer = make_optimizer(self.module.parameters(), optimizer)
            self.schedule = make_schedule(self.optimizer, optimizer, total_steps)

    @torch.no_grad()
    def log_probs(self, sequences: Sequences, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Metrics]:
        """Log-probability of every token with `loss_mask`, forward only.

        micro_batches: (start, stop) rows of `sequences`; together they hold every row once, start == stop is a
        micro-batch without work. Returns float32 [T] on the CPU, 0 where nothing is predicted, and the metrics
        `entropy` and, if the batch has `rollout_log_probs`, `rollout_mismatch_mean` and `_max`.

        Raises DataError if the micro-batches leave a row out or name one twice.
        """
        _check_micro_batches(micro_batches, len(sequences), complete=True)
        result = torch.zeros(sequences.num_tokens, dtype=torch.float32)
        statistics: list[Statistics] = []
        for start, stop in micro_batches:
            predictions, row = self._predict(sequences.slice(start, stop))
            first = int(sequences.lengths[:start].sum())
            result[first + row.loss_positions] = predictions.log_probs.float().cpu()
            statistics.append({"entropy": mean(predictions.entropy), **rollout_mismatch(predictions)})
        reshard(self.module)  # without a backward pass nothing else frees the gathered parameters
        return result, to_metrics(statistics)

    def forward_backward(
        self,
        sequences: Sequences,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        denominators: Denominators,
    ) -> Metrics:
        """Add the gradient of a mini-batch's loss to the parameters' gradients; returns the loss function's metrics.

        micro_batches: this rank's share of the mini-batch as (start, stop) rows, one at least and as many on every
        rank; start == stop is a micro-batch without work. denominators: of the whole mini-batch over all ranks. The
        metric `loss` adds up over ranks to the mini-batch's loss.

        Raises ConfigError for an engine without optimiser, DataError for rows that are not there or named twice.
        """
        if self.optimizer_config is None:
            raise ConfigError("this engine is frozen: it was built without an optimizer")
        if not micro_batches:
            raise DataError("a mini-batch needs at least one micro-batch on every rank, if only an empty one")
        _check_micro_batches(micro_batches, len(sequences), complete=False)
        statistics: list[Statistics] = []
        for index, (start, stop) in enumerate(micro_batches):
            self._reduce_gradients_in_next_backward(index == len(micro_batches) - 1)
            predictions, _ = self._predict(sequences.slice(start, stop))
            loss, parts = loss_function(predictions, denominators)
            loss.backward()
            statistics.append(parts)
        return to_metrics(statistics)

    def optimizer_step(self) -> Metrics:
        """Clip, update, advance the schedule, clear the gradients.

        A gradient with NaN or infinity leaves parameters and optimiser state as they are, on every rank alike, and is
        counted. Metrics: `learning_rate`, `skipped_steps` (adds up over ranks to 0 or 1) and, unless skipped,
        `grad_norm` (before clipping).
        """
        if self.optimizer_config is None:
            raise ConfigError("this engine is frozen: it was built without an optimizer")
        norm = clip_gradients(list(self.module.parameters()), self.optimizer_config.max_grad_norm)
        finite = torch.tensor(norm).isfinite().item()
        learning_rate = self.schedule.get_last_lr()[0]
        if finite:
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = {
            "learning_rate": Metric.mean(learning_rate, 1),
            "skipped_steps": Metric.sum(0 if finite else 1 / self.mesh.size()),
        }
        return metrics | ({"grad_norm": Metric.mean(norm, 1)} if finite else {})

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights under their Hugging Face names, one at a time, on `device`; collective.

        `lm_head.weight` comes even if it is tied to the embedding. vLLM keeps a packed copy of the output layer, and a
        list without it would leave that copy at the old weights without a word.
        """
        reshard(self.module)
        # A state dict lists tied weights under both names, unlike named_parameters.
        for name, weight in self.module.model.state_dict().items():
            yield name, full_tensor(weight.to(self.device)).detach()

    def save_pretrained(self, path: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format; collective, rank 0 writes, all ranks return when it stands.

        The folder appears under its name only when complete; one that was there is replaced.
        """
        keep = dist.get_rank() == 0
        tied = self.module.model.all_tied_weights_keys
        weights = {name: weight.cpu() for name, weight in self.named_weights() if keep and name not in tied}
        if keep:
            self._write(Path(path), weights)
        dist.barrier()

    def _write(self, path: Path, weights: dict[str, Tensor]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
        replaced = path.with_name(f"{path.name}.replaced-{os.getpid()}")
        self.module.model.save_pretrained(unfinished, state_dict=weights)
        self.tokenizer.save_pretrained(unfinished)
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _predict(self, micro_batch: Sequences) -> tuple[Predictions, PackedRow]:
        row = pack(micro_batch)
        log_probs, entropy = self.module(
            input_ids=row.input_ids.to(self.device),
            position_ids=row.position_ids.to(self.device),
            predicting=(row.loss_positions - 1).to(self.device),
            targets=row.targets.to(self.device),
            attention=packed_attention(self.attention_backend, row, self.device),
            temperature=self.temperature,
        )
        return Predictions.gather(log_probs, entropy, micro_batch, row), row

    def _reduce_gradients_in_next_backward(self, reduce: bool) -> None:
        """Between the micro-batches of a mini-batch gradients add up locally, and gathered parameters may stay."""
        for module in fsdp_modules(self.module):
            module.set_requires_gradient_sync(reduce, recurse=False)
            module.set_reshard_after_backward(reduce or self.reshard_after_forward, recurse=False)


def _check_micro_batches(micro_batches: Sequence[MicroBatch], rows: int, *, complete: bool) -> None:
    """Every row at most once, and with `complete` every row of the batch."""
    expected = 0
    for start, stop in sorted((start, stop) for start, stop in micro_batches if start != stop):
        if start < expected or stop > rows or stop < start:
            raise DataError(f"micro-batch ({start}, {stop}) overlaps another or leaves the batch of {rows} sequences")
        if complete and start != expected:
            raise DataError(f"no micro-batch holds the sequences {expected} to {start - 1}")
        expected = stop
    if complete and expected != rows:
        raise DataError(f"no micro-batch holds the sequences {expected} to {rows - 1}")
