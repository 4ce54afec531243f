"""ModelWorker: a rank that holds a model and computes under a plan; base of all roles with a model."""

import numpy as np
import torch

from balancing import RankPlan
from workers.base import Worker
from workers.config import ModelConfig, OptimizerConfig, ParallelConfig
from workers.dataproto import DataProto
from workers.dispatch import Join, RankCoordinates, Split, dispatch
from workers.metrics import Metrics
from workers.model.credit import sequence_kl
from workers.model.engine import TrainingEngine
from workers.model.timing import MicroStepTime


class ModelWorker(Worker):
    """One rank of a role that holds a model. `build` comes after the process group, because it is collective."""

    head = "lm"  # the output of the role's model, see `TrainingEngine`

    def __init__(
        self,
        role: str,
        coordinates: RankCoordinates,
        world_size: int,
        *,
        model: ModelConfig,
        device: str,
        temperature: float,
        threads: int = 0,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        parallel: ParallelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 0,
    ) -> None:
        """`temperature`: that of the sampler, so that log-probs are of the distribution that was sampled from."""
        super().__init__(role, coordinates, world_size, device=device, threads=threads)
        self._engine_arguments = {
            "optimizer": optimizer,
            "total_steps": total_steps,
            "device": self.device,
            "cpu_offload": cpu_offload,
            "reshard_after_forward": reshard_after_forward,
            "temperature": temperature,
            "parallel": parallel,
            "head": self.head,
            "check_parity": True,
        }
        self._model = model

    @dispatch(Split.ALL)
    def build(self) -> int:
        """Load and shard the model; returns its number of parameters."""
        self.engine = TrainingEngine(self._model, **self._engine_arguments)
        self.free_cached_memory()
        return self.engine.num_parameters

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs",))
    def log_probs(self, batch: DataProto, plan: RankPlan) -> tuple[DataProto, Metrics]:
        """Forward-only pass: `log_probs` float32, 0 where `loss_mask` is False, ragged like `input_ids`."""
        log_probs, metrics = self.engine.log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return token_block(batch, log_probs=log_probs), metrics

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs", "entropies"))
    def log_probs_and_entropies(self, batch: DataProto, plan: RankPlan) -> tuple[DataProto, Metrics]:
        """Forward-only pass: `log_probs`, and `entropies` in nats, float32, each as `log_probs` gives them."""
        log_probs, entropies, metrics = self.engine.log_probs_and_entropies(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return token_block(batch, log_probs=log_probs, entropies=entropies), metrics

    @dispatch(Split.PLAN, Join.ROWS)
    def sequence_log_probs(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """Forward-only pass: log-prob of each sequence's tokens with `loss_mask` together, float64 [B]."""
        summed = self.engine.sequence_log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return summed.numpy()

    @dispatch(Split.PLAN, Join.ROWS)
    def kl(self, batch: DataProto, plan: RankPlan, estimator: str) -> np.ndarray:
        """Estimated KL of each sequence, nats, float64 [B]; the batch has `old_log_probs` and `reference_log_probs`."""
        return sequence_kl(batch, estimator).numpy()

    @dispatch(Split.ALL)
    def take_micro_step_times(self) -> list[MicroStepTime]:
        """Times of every micro-step since the last call, in order."""
        return self.engine.clock.take()

    def free_cached_memory(self) -> None:
        """Return memory that torch's allocator caches to the device, which other roles and a colocated engine share."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def micro_batches_of(plan: RankPlan) -> list[tuple[int, int]]:
    """All micro-batches of a rank, mini-batch after mini-batch, as (start, stop) rows."""
    return [bounds for mini_batch in plan.mini_batches for bounds in mini_batch.micro_batches]


def token_block(batch: DataProto, **tokens: torch.Tensor) -> DataProto:
    """Columns [T] of the sequences of a batch, as a worker returns them."""
    return DataProto(batch.lengths.numpy(), {name: values.numpy() for name, values in tokens.items()})


def token_column(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float32 [T] with `values` [N] where `mask` is True and 0 elsewhere."""
    column = torch.zeros(len(mask), dtype=torch.float32)
    column[mask] = values.float()
    return column
