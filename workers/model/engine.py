"""The training engine of every role: forward-only log-probs, forward and backward, and the optimiser step.

    DataProto --slice--> micro-batch --lay out--> PackedCausalLM --> log_probs, entropy --loss--> backward
              (once a micro-batch, adds its gradients to the shards of the ranks, `parallel.prepare_backward`)
    optimizer_step: clip --> optimiser --> schedule

`ShardedModel` loads and shards the model, and gives its weights. The engine needs only torch and
transformers, and runs in a plain process, under torchrun, or inside an actor. Calls are collective: every
rank makes the same calls with the same number of micro-batches. Ranks that share sequences or layers
(`sharding/parallel.py`) get the same sequences and return the same results. A caller counts one of them.

T tokens and B sequences of this rank. micro_batches: (start, stop) rows of `sequences`, empty if equal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.batch.metrics import Metric, Metrics
from workers.config.optimizer import StepSettings
from workers.config.roles import ModelConfig, OptimizerConfig, ParallelConfig
from workers.errors import ConfigError, DataError
from workers.model.checkpoint.checkpoint import Checkpointer
from workers.model.checkpoint.lora import without_adapters
from workers.model.forward_backward import EnginePass, TokenOutputs
from workers.model.losses import (
    Denominators,
    LossFunction,
    Predictions,
    Statistics,
    ValueLossFunction,
    ValuePredictions,
    mean,
    prepare,
    rollout_mismatch,
    to_metrics,
    total,
)
from workers.model.losses.distillation import WholeLayer, as_numpy, distilled
from workers.model.model import Read
from workers.model.optimizer.nonfinite_guard import NonfiniteGuard
from workers.model.optimizer.optimizer import changed_groups, make_optimizer, make_schedule
from workers.model.optimizer.training_states import TrainingState, TrainingStates
from workers.model.rows.packing import (
    MicroBatch,
    ModelInput,
    check_micro_batches,
    check_sequences,
)
from workers.model.sharded_model import ShardedModel
from workers.model.sharding.parallel import reshard
from workers.model.sharding.stage_layers import Passing
from workers.model.stages.stage_pipeline import clip_over_stages

CONFIGURED = StepSettings()


class TrainingEngine(ShardedModel):
    """Train or evaluate one model, sharded over the ranks. Without an optimiser it is frozen.

    total_steps: optimiser steps of the run, for the schedule. temperature: divides the logits, as in the
    rollouts. parallel: how ranks share sequences and layers, or None to shard parameters over all. head: `lm`
    for log-probs, `value` for a critic's values (`value_head.py`). check_numerics: compare with the model's
    own forward pass. cpu_offload: keep parameters, gradients and optimiser state in host memory.
    optimizer_offload: the state alone.

    Raises ConfigError or UnsupportedModelError, on every rank, if the model cannot be loaded or packed.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        optimizer: OptimizerConfig | None,
        total_steps: int,
        device: torch.device | str,
        cpu_offload: bool = False,
        optimizer_offload: bool = False,
        reshard_after_forward: bool = True,
        temperature: float = 1.0,
        parallel: ParallelConfig | None = None,
        head: str = "lm",
        check_numerics: bool = False,
    ) -> None:
        super().__init__(
            model_config,
            trained=optimizer is not None,
            device=device,
            cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward,
            temperature=temperature,
            parallel=parallel,
            head=head,
            check_numerics=check_numerics,
        )
        self.optimizer_config = optimizer
        self.teacher_layer: WholeLayer | None = None
        if optimizer is not None:
            begin = partial(
                self._begin_state, optimizer, total_steps, offload=optimizer_offload
            )
            trained = [
                parameter
                for parameter in self.module.parameters()
                if parameter.requires_grad
            ]
            self.states = TrainingStates(trained, begin, model_config.lora.policies)
        self._compare_numerics()

    def _begin_state(
        self, config: OptimizerConfig, total_steps: int, *, offload: bool
    ) -> TrainingState:
        # A tied weight, of two stages too, has one name: noise of rounding is by name.
        named = [
            (self.stage.first_name(name), weight)
            for name, weight in self.module.named_parameters()
        ]
        sets = (self.module.layer_matrices, self.module.tower)
        optimizer = make_optimizer(named, config, *sets, offload=offload)
        schedule = make_schedule(optimizer, config, total_steps)
        return TrainingState(optimizer, schedule, NonfiniteGuard(config.max_skipped_steps))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.states.current.optimizer

    @torch.no_grad()
    def log_probs(
        self, sequences: DataProto, micro_batches: Sequence[MicroBatch]
    ) -> tuple[Tensor, Metrics]:
        """Return the log-probability of every token with `loss_mask`, forward only: float32 [T] on the CPU, 0
        elsewhere.

        Metrics: `entropy` and, with `rollout_log_probs`, `rollout_mismatch_mean` and `_max`. Raises
        ConfigError for an engine with a value head, DataError if a row is in none or several of the
        micro-batches.
        """
        self._check_head("lm")
        (log_probs,), metrics = self._forward_only(
            "log_probs", sequences, micro_batches, ("log_probs",), _measure
        )
        return log_probs, metrics

    @torch.no_grad()
    def log_probs_and_entropies(
        self, sequences: DataProto, micro_batches: Sequence[MicroBatch]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return `log_probs` and, from the same forward pass, the entropy at each of these
        tokens, in nats.
        """
        self._check_head("lm")
        columns = ("log_probs", "entropy")
        (log_probs, entropies), metrics = self._forward_only(
            "log_probs", sequences, micro_batches, columns, _measure
        )
        return log_probs, entropies, metrics

    @torch.no_grad()
    def sequence_log_probs(
        self, sequences: DataProto, micro_batches: Sequence[MicroBatch]
    ) -> Tensor:
        """Return the summed log-prob of each sequence's tokens with `loss_mask`, forward only: float64 [B] on
        the CPU.
        """
        self._check_head("lm")
        result = torch.zeros(len(sequences), dtype=torch.float64, device=self.device)

        def finish(start: int, stop: int, rows: ModelInput, outputs: Any) -> None:
            predictions = self._predictions(sequences.slice(start, stop), rows, outputs)
            result[start:stop].index_add_(
                0, predictions.sequence_index, predictions.log_probs.double()
            )

        self._forward_passes("log_probs", sequences, micro_batches, finish)
        return self.stage.from_last(result.cpu())

    @torch.no_grad()
    def read_outputs(
        self, sequences: DataProto, micro_batches: Sequence[MicroBatch], read: Read
    ) -> list[Any]:
        """Return what `read` makes of every token with `loss_mask`, forward only: NumPy [T, ...] each, 0
        elsewhere.
        """
        self._check_head("lm")
        columns: list[Any] = []

        def finish(start: int, stop: int, rows: ModelInput, outputs: Any) -> None:
            positions = int(sequences.offsets[start]) + rows.loss_positions.numpy()
            parts = [as_numpy(rows.whole(output)) for output in outputs]
            columns.extend(
                np.zeros((sequences.num_tokens, *part.shape[1:]), part.dtype)
                for part in parts[len(columns) :]
            )
            for column, part in zip(columns, parts, strict=True):
                column[positions] = part

        self._forward_passes("log_probs", sequences, micro_batches, finish, read=read)
        return self.stage.from_last(columns)

    @torch.no_grad()
    def values(
        self,
        sequences: DataProto,
        micro_batches: Sequence[MicroBatch],
        measure: Callable[[ValuePredictions], Statistics] = lambda predictions: {
            "values": mean(predictions.values)
        },
        cells: str = "before",
    ) -> tuple[Tensor, Metrics]:
        """Return the value of the state before every token with `loss_mask`, like `log_probs`, and metrics.

        cells: see `RowLayout.lay_out`.
        """
        self._check_head("value")
        (values,), metrics = self._forward_only(
            "values", sequences, micro_batches, ("values",), measure, cells
        )
        return values, metrics

    @torch.no_grad()
    def scores(self, sequences: DataProto, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the value head's output at the last token of each sequence, forward only: float64 [B] on the
        CPU.
        """
        self._check_head("value")
        result = torch.zeros(len(sequences), dtype=torch.float64, device=self.device)

        def finish(start: int, stop: int, rows: ModelInput, outputs: Any) -> None:
            result[start:stop] = rows.whole(outputs).double()

        self._forward_passes("scores", sequences, micro_batches, finish, cells="last")
        return self.stage.from_last(result.cpu())

    def _forward_only(
        self,
        name: str,
        sequences: DataProto,
        micro_batches: Sequence[MicroBatch],
        columns: Sequence[str],
        measure: Callable[[Any], Statistics],
        cells: str = "before",
    ) -> tuple[list[Tensor], Metrics]:
        tokens = TokenOutputs()
        statistics = list[Statistics]()

        def finish(start: int, stop: int, rows: ModelInput, outputs: Any) -> None:
            predictions = self._predictions(sequences.slice(start, stop), rows, outputs)
            tokens.add(
                int(sequences.offsets[start]),
                rows,
                [getattr(predictions, column) for column in columns],
            )
            if rows.counts:
                statistics.append(measure(predictions))

        self._forward_passes(name, sequences, micro_batches, finish, cells=cells)
        result = tokens.columns(len(columns), sequences.num_tokens)
        return self.stage.from_last((list(result), to_metrics(statistics)))

    def _forward_passes(
        self,
        name: str,
        sequences: DataProto,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[[int, int, ModelInput, Any], None],
        *,
        cells: str = "before",
        read: Read | None = None,
    ) -> None:
        check_sequences(sequences, self.vocabulary, self.positions)
        check_micro_batches(micro_batches, len(sequences), complete=True)
        rounds = self.stage.whole_rounds(micro_batches)
        slices = [sequences.slice(*rows) for rows in rounds]

        def finish_slice(index: int, rows: ModelInput, outputs: Any) -> None:
            finish(*rounds[index], rows, outputs)

        work = EnginePass(
            name, slices, self._computed(read), finish_slice, forward=True, cells=cells
        )
        self.runner.run(work)
        # Without a backward pass nothing else frees the gathered parameters.
        reshard(self.module)

    def _check_trained(self) -> OptimizerConfig:
        if self.optimizer_config is None:
            raise ConfigError("this engine is frozen: it was built without an optimizer")
        return self.optimizer_config

    def forward_backward(
        self,
        sequences: DataProto,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction | ValueLossFunction,
        denominators: Denominators,
        cells: str = "before",
    ) -> Metrics:
        """Add the gradient of a mini-batch's loss to the parameters' gradients. Returns the loss function's
        metrics.

        micro_batches: this rank's share of the mini-batch, at least one and as many on every rank.
        denominators: of the whole mini-batch over all ranks. cells: see `RowLayout.lay_out`. The metric
        `loss` adds up over ranks to the mini-batch's loss.

        Raises ConfigError for an engine without optimiser, DataError for missing or repeated rows.
        """
        return self._forward_backward(
            sequences, micro_batches, loss_function, denominators, cells, None
        )

    def forward_backward_log_probs(
        self,
        sequences: DataProto,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        denominators: Denominators,
    ) -> tuple[Tensor, Metrics]:
        """As `forward_backward`, and return the log-probs that the loss has seen, in the form of
        `log_probs`.
        """
        self._check_head("lm")
        tokens = TokenOutputs()
        metrics = self._forward_backward(
            sequences, micro_batches, loss_function, denominators, "before", tokens
        )
        (log_probs,) = self.stage.from_last(tokens.columns(1, sequences.num_tokens))
        return log_probs, metrics

    def _forward_backward(
        self,
        sequences: DataProto,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction | ValueLossFunction,
        denominators: Denominators,
        cells: str,
        tokens: TokenOutputs | None,
    ) -> Metrics:
        self._check_trained()
        if not micro_batches:
            raise DataError(
                "a mini-batch needs at least one micro-batch on every rank, if only an empty one"
            )
        check_sequences(sequences, self.vocabulary, self.positions)
        check_micro_batches(micro_batches, len(sequences), complete=False)
        micro_batches = self.stage.whole_rounds(micro_batches)
        slices = [sequences.slice(*rows) for rows in micro_batches]
        parts = prepare(loss_function, slices, denominators, self.data_parallel_groups)
        statistics: list[Statistics] = []

        def finish(index: int, rows: ModelInput, outputs: Any) -> Tensor:
            predictions = self._predictions(parts[index], rows, outputs)
            loss, measured = loss_function(predictions, denominators)
            if tokens is not None:
                tokens.add(
                    int(sequences.offsets[micro_batches[index][0]]),
                    rows,
                    [predictions.log_probs],
                )
            self.states.current.nonfinite_guard.watch(
                sequences, *micro_batches[index], loss
            )
            statistics.append(
                measured if rows.counts else {"loss": total(torch.zeros_like(loss))}
            )
            return loss

        self.routing.begin(parts, self.data_parallel_groups)
        read = distilled(loss_function, self.teacher_layer)
        self.runner.run(
            EnginePass(
                "update", parts, self._computed(read), finish, trains=True, cells=cells
            )
        )
        return self.stage.from_last(to_metrics([*statistics, *self.routing.take()]))

    def optimizer_step(self, settings: StepSettings = CONFIGURED) -> Metrics:
        """Clip, update, advance the schedule, clear the gradients. Skip on every rank if a loss or gradient
        is not finite. settings: of this step alone.

        Metrics: `learning_rate`, `skipped_steps` (adds up over ranks to 0 or 1) and, unless skipped,
        `grad_norm` (before clipping). Raises NonFiniteError, naming the sequences, after
        `optimizer.max_skipped_steps` skipped steps in a row, and ConfigError for a setting that the optimiser
        does not have.
        """
        config = self._check_trained()
        state = self.states.current
        longest = (
            config.max_grad_norm
            if settings.max_grad_norm is None
            else settings.max_grad_norm
        )
        norm = clip_over_stages(self.stage, self.module, longest)
        finite = state.nonfinite_guard.takes_step(norm, self.device)
        with changed_groups(state.optimizer, config, settings, self.module.vectors):
            # Own optimisers may keep a tensor.
            learning_rate = float(state.optimizer.param_groups[0]["lr"])
            if finite:
                state.optimizer.step()
        if finite:
            state.schedule.step()
        state.optimizer.zero_grad(set_to_none=True)
        metrics = {
            "learning_rate": Metric.mean(learning_rate, 1),
            "skipped_steps": Metric.sum(0 if finite else 1 / self.parallel.counted_ranks),
        }
        return metrics | ({"grad_norm": Metric.mean(norm, 1)} if finite else {})

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the engine is the base model: with LoRA, the reference. Raises ConfigError without
        adapters.
        """
        self._check_adapters("be its own reference")
        with without_adapters(self.module.model):
            yield

    def use_adapters(self, name: str) -> None:
        """Train and evaluate another LoRA policy from here on. A new one begins as the base model.

        Raises ConfigError for an engine without adapters, and for one policy more than model.lora.policies.
        """
        self._check_adapters("have several policies")
        reshard(self.module)
        self.states.use(name)

    @cached_property
    def checkpointer(self) -> Checkpointer:
        self._check_trained()
        return Checkpointer(self.module, self.states, self.device, self.stage)

    def save_checkpoint(
        self,
        path: str | Path,
        *,
        step: int,
        extra: dict[str, Any] | None = None,
        policy: str = "",
    ) -> None:
        """Start to save the training state in the background, with the caller's `extra`. See
        `Checkpointer.save`. Collective.
        """
        self.checkpointer.save(path, step=step, extra=extra, policy=policy)

    def wait_for_checkpoint(self) -> None:
        self.checkpointer.wait()

    def load_checkpoint(self, path: str | Path, *, policy: str = "") -> dict[str, Any]:
        """Resume from a checkpoint, see `Checkpointer.load`. Returns the caller's `extra`. Collective."""
        return self.checkpointer.load(path, policy=policy).extra

    def _computed(self, read: Read | None) -> Callable[[ModelInput, Passing], Any]:
        arguments = () if read is None else (read,)  # a value head's model takes none
        return lambda rows, passing: self.module(
            rows, self.temperature, passing, *arguments
        )

    def _predictions(self, micro_batch: DataProto, rows: ModelInput, outputs: Any) -> Any:
        """Return (Value)Predictions of the whole micro-batch, on every rank of a context-parallel group."""
        if self.head == "value":
            return ValuePredictions.gather(rows.whole(outputs), micro_batch, rows)
        matrices = [output if output.dim() == 2 else output[:, None] for output in outputs]
        sizes = [matrix.shape[1] for matrix in matrices]
        dtype = outputs[0].dtype
        parts = rows.whole(
            torch.cat([matrix.to(dtype) for matrix in matrices], dim=-1)
        ).split(sizes, dim=-1)
        columns = [
            part.squeeze(-1) if size == 1 else part
            for part, size in zip(parts, sizes, strict=True)
        ]
        return Predictions.gather(columns, micro_batch, rows)


def _measure(predictions: Any) -> Statistics:
    return {"entropy": mean(predictions.entropy), **rollout_mismatch(predictions)}
