"""Ranks that hold a model and compute under a plan: reference, teacher, and all roles with an optimiser."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from balancing import RankPlan
from workers.batch.dataproto import ROUTED_EXPERTS, DataProto
from workers.batch.dispatch import Join, RankCoordinates, Split, dispatch
from workers.batch.metrics import Metrics
from workers.config.optimizer import StepSettings
from workers.config.roles import ModelConfig, OptimizerConfig, ParallelConfig
from workers.model.engine import CONFIGURED, TrainingEngine
from workers.model.losses import Denominators
from workers.model.losses.distillation import (
    TopTokens,
    WholeLayer,
    at_tokens_of,
    hidden_states,
    log_probs,
    with_teacher_prompts,
)
from workers.model.losses.returns import sequence_kl
from workers.model.model import Read
from workers.model.optimizer.optimizer import clear_state
from workers.model.timing import MicroStepTime
from workers.roles.base import Worker


class ModelWorker(Worker):
    """One rank of a role that holds a model. `build` is collective, so it follows `join_group`."""

    head = "lm"  # the output of the role's model, see `TrainingEngine`

    def __init__(
        self,
        role: str,
        coordinates: RankCoordinates,
        world_size: int,
        *,
        model: ModelConfig,
        models: Mapping[str, ModelConfig] = MappingProxyType({}),
        device: str,
        temperature: float,
        threads: int = 0,
        cpu_offload: bool = False,
        optimizer_offload: bool = False,
        reshard_after_forward: bool = True,
        parallel: ParallelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 0,
    ) -> None:
        """models: several by name, instead of `model`. temperature: the sampler's, so that log-probs are of
        the sampled distribution.
        """
        super().__init__(role, coordinates, world_size, device=device, threads=threads)
        self._engine_arguments = {
            "optimizer": optimizer,
            "total_steps": total_steps,
            "device": self.device,
            "cpu_offload": cpu_offload,
            "optimizer_offload": optimizer_offload,
            "reshard_after_forward": reshard_after_forward,
            "temperature": temperature,
            "parallel": parallel,
            "head": self.head,
            "check_numerics": True,
        }
        self._models = models or {"": model}
        self._sent_copies: list[Any] = []
        self.unread = (ROUTED_EXPERTS,) if model.router_replay == "none" else ()

    @dispatch(Split.ALL)
    def build(self, checkpointing: Mapping[str, Any] = MappingProxyType({})) -> int:
        """Load and shard the models. Returns the number of parameters. checkpointing: settings that replace
        `auto`.
        """
        self.engines = {
            name: TrainingEngine(replace(model, **checkpointing), **self._engine_arguments)
            for name, model in self._models.items()
        }
        self.engine = next(iter(self.engines.values()))
        self.free_cached_memory()
        return sum(engine.num_parameters for engine in self.engines.values())

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs",))
    def log_probs(self, batch: DataProto, plan: RankPlan) -> tuple[DataProto, Metrics]:
        """Return `log_probs` of a forward-only pass, float32, ragged like `input_ids`, 0 where `loss_mask` is
        False.
        """
        log_probs, metrics = self.engine.log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return token_block(batch, log_probs=log_probs), metrics

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs", "entropies"))
    def log_probs_and_entropies(
        self, batch: DataProto, plan: RankPlan
    ) -> tuple[DataProto, Metrics]:
        """Return `log_probs` and `entropies` (nats) of a forward-only pass, in the form of `log_probs`."""
        log_probs, entropies, metrics = self.engine.log_probs_and_entropies(
            batch, micro_batches_of(plan)
        )
        self.free_cached_memory()
        return token_block(batch, log_probs=log_probs, entropies=entropies), metrics

    @dispatch(Split.PLAN, Join.ROWS)
    def sequence_log_probs(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """Return from a forward-only pass the summed log-prob of each sequence's `loss_mask` tokens, float64
        [B].
        """
        summed = self.engine.sequence_log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return summed.numpy()

    @dispatch(Split.PLAN, Join.ROWS)
    def kl(self, batch: DataProto, plan: RankPlan, estimator: str) -> np.ndarray:
        """Estimate the KL of each sequence, nats, float64 [B], from `old_log_probs` and
        `reference_log_probs`.
        """
        return sequence_kl(batch, estimator).numpy()

    @dispatch(Split.ALL)
    def take_micro_step_times(self) -> list[MicroStepTime]:
        return [time for engine in self.engines.values() for time in engine.clock.take()]

    def counted_tokens(self, batch: DataProto) -> torch.Tensor:
        """Return which tokens with `loss_mask` this rank counts (see `TrainingEngine.counted`): bool [N]."""
        return self.engine.counted(batch)[batch.owner[batch.tokens["loss_mask"]]]

    def free_cached_memory(self) -> None:
        """Return torch's cached memory to the device, for other roles and a colocated engine."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class TrainedWorker(ModelWorker):
    cells = "before"  # the cells that the loss reads, see `RowLayout.lay_out`

    def loss_function(self, loss: Any) -> Callable[..., Any]:
        """Return the loss that settings describe. Raises ConfigError for settings of another role."""
        raise NotImplementedError

    @dispatch(Split.PLAN, Join.METRICS)
    def forward_backward(self, batch: DataProto, plan: RankPlan, loss: Any) -> Metrics:
        """Add the gradient of a loss to those since the last `optimizer_step`. The plan has one mini-batch.

        batch: `input_ids`, `loss_mask`, and the columns that the loss reads, [B] or ragged.
        """
        return self.engine.forward_backward(batch, *self._work(plan, loss), self.cells)

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs",))
    def forward_backward_log_probs(
        self, batch: DataProto, plan: RankPlan, loss: Any
    ) -> tuple[DataProto, Metrics]:
        """Return also the `log_probs` that the loss has seen, in the form of `log_probs`."""
        log_probs, metrics = self.engine.forward_backward_log_probs(
            batch, *self._work(plan, loss)
        )
        return token_block(batch, log_probs=log_probs), metrics

    def _work(
        self, plan: RankPlan, loss: Any
    ) -> tuple[Any, Callable[..., Any], Denominators]:
        (mini_batch,) = plan.mini_batches
        denominators = Denominators(
            mini_batch.loss_tokens, mini_batch.sequences, mini_batch.groups
        )
        return mini_batch.micro_batches, self.loss_function(loss), denominators

    @dispatch(Split.ALL, Join.METRICS)
    def optimizer_step(
        self, settings: StepSettings = CONFIGURED, *, last: bool = True
    ) -> Metrics:
        """Step along the gradients. settings: of this step alone. last: of a series, which frees
        memory.
        """
        metrics = self.engine.optimizer_step(settings)
        if last:
            self.free_cached_memory()
        return metrics

    @dispatch(Split.ALL)
    def save_checkpoint(
        self, path: str, step: int, extra: dict[str, Any], *, policy: str = ""
    ) -> None:
        """Start to save with the driver's `extra`. Raises CheckpointError if the previous save failed."""
        self.engine.save_checkpoint(path, step=step, extra=extra, policy=policy)

    @dispatch(Split.ALL)
    def wait_for_checkpoint(self) -> None:
        self.engine.wait_for_checkpoint()

    @dispatch(Split.ALL, Join.RANK_ZERO)
    def load_checkpoint(
        self, path: str, *, optimizer: bool = True, policy: str = ""
    ) -> dict[str, Any]:
        """Resume, and return the driver's `extra`. optimizer: False begins with a fresh optimiser state.
        policy: the only one to load, or empty for all. Raises CheckpointError for a broken or foreign
        checkpoint.
        """
        extra = self.engine.load_checkpoint(path, policy=policy)
        if not optimizer:
            states = self.engine.states
            for state in [states.current] if policy else states.all.values():
                clear_state(state.optimizer)
        return extra

    @dispatch(Split.ALL)
    def wait_for_copies(self) -> None:
        """Wait until this rank's last copies have arrived. A lost holder is the driver's matter."""
        import ray

        if self._sent_copies:
            ray.wait(self._sent_copies, num_returns=len(self._sent_copies))

    @dispatch(Split.ALL)
    def send_copies(
        self, step: int, extra: dict[str, Any], holders: list[list[Any]]
    ) -> None:
        """Copy this rank's state, and start to send it to its holders. holders: actors, by rank."""
        import ray

        copy = ray.put(self.engine.checkpointer.copy(extra))
        index = self.coordinates.index
        self._sent_copies = [
            holder.hold.remote(self.role, index, step, copy) for holder in holders[index]
        ]

    @dispatch(Split.ALL, Join.RANK_ZERO)
    def load_copies(self, step: int, holders: list[Any]) -> dict[str, Any]:
        """Load this rank's copy, and return the driver's `extra`. holders: an actor for each rank."""
        import ray

        index = self.coordinates.index
        copy = ray.get(holders[index].read.remote(self.role, index, step))
        return self.engine.checkpointer.load_copy(copy)

    @dispatch(Split.ALL)
    def save_pretrained(self, path: str) -> None:
        """Write model and tokenizer in Hugging Face format, shared by all ranks. Raises OutputError."""
        self.engine.save_pretrained(path)
        self.free_cached_memory()


class ReferenceWorker(ModelWorker):
    """One rank of the reference, the frozen policy of a KL."""


class TeacherWorker(ModelWorker):
    """One rank that reads samples as a teacher, with its own prompts (see `with_teacher_prompts`). teacher:
    its name, if there are several. Columns are of the tokens with `loss_mask`, ragged like `input_ids`.
    """

    @dispatch(Split.PLAN, Join.TOKENS, returns=("teacher_log_probs",))
    def teacher_log_probs(
        self, batch: DataProto, plan: RankPlan, teacher: str
    ) -> tuple[DataProto, Metrics]:
        return self._read(batch, plan, teacher, log_probs, "teacher_log_probs")

    @dispatch(Split.PLAN, Join.TOKENS, returns=("teacher_top_ids", "teacher_top_log_probs"))
    def top_tokens(
        self, batch: DataProto, plan: RankPlan, teacher: str, count: int, tokens: int
    ) -> tuple[DataProto, Metrics]:
        """Return the likeliest of the first `tokens` tokens, and log-probs, see `top_log_probs`: [T, k], [T,
        k + 1].
        """
        return self._read(
            batch,
            plan,
            teacher,
            TopTokens(count, tokens),
            "teacher_top_ids",
            "teacher_top_log_probs",
        )

    @dispatch(Split.PLAN, Join.TOKENS, returns=("teacher_hidden",))
    def hidden_states(
        self, batch: DataProto, plan: RankPlan, teacher: str
    ) -> tuple[DataProto, Metrics]:
        """Return the last hidden states [T, H], bfloat16 as int16."""
        return self._read(batch, plan, teacher, hidden_states, "teacher_hidden")

    @dispatch(Split.ALL, Join.RANK_ZERO_REFERENCE)
    def output_layer(self) -> tuple[WholeLayer | None, Metrics]:
        layer = self.engine.output_layer()
        return (layer if self.coordinates.index == 0 else None), {}

    def _read(
        self, batch: DataProto, plan: RankPlan, teacher: str, read: Read, *names: str
    ) -> tuple[DataProto, Metrics]:
        teacher_batch = with_teacher_prompts(batch)
        outputs = self.engines[teacher].read_outputs(
            teacher_batch, micro_batches_of(plan), read
        )
        self.free_cached_memory()
        # Of a rank without micro-batches.
        outputs = outputs or [np.zeros(0, np.float32)] * len(names)
        columns = {
            name: at_tokens_of(batch, teacher_batch, values)
            for name, values in zip(names, outputs, strict=True)
        }
        return DataProto(batch.lengths.numpy(), columns), {}


def micro_batches_of(plan: RankPlan) -> list[tuple[int, int]]:
    return [
        bounds for mini_batch in plan.mini_batches for bounds in mini_batch.micro_batches
    ]


def token_block(batch: DataProto, **tokens: torch.Tensor) -> DataProto:
    """A worker's result: columns [T] over the sequences of a batch."""
    return DataProto(
        batch.lengths.numpy(), {name: values.numpy() for name, values in tokens.items()}
    )


def token_column(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scatter `values` [N] to a float32 [T] where `mask` is True, 0 elsewhere."""
    column = torch.zeros(len(mask), dtype=torch.float32)
    column[mask] = values.float()
    return column
