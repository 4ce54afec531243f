"""ModelWorker: a rank that holds a model and computes under a plan; base of all roles with a model."""

import numpy as np
import torch

from balancing import RankPlan
from workers.base import Worker
from workers.config import ModelConfig, OptimizerConfig, ParallelConfig
from workers.dataproto import DataProto
from workers.dispatch import Join, RankCoordinates, Split, dispatch
from workers.errors import DataError
from workers.metrics import Metrics
from workers.model.credit import sequence_kl
from workers.model.engine import TrainingEngine
from workers.model.packing import Sequences
from workers.model.timing import MicroStepTime
from workers.remote_batch import TokenBlock


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
    def log_probs(self, batch: DataProto, plan: RankPlan) -> tuple[TokenBlock, Metrics]:
        """Forward-only pass: `log_probs` float32, 0 where `loss_mask` is False, ragged like `input_ids`."""
        sequences = sequences_from(batch)
        log_probs, metrics = self.engine.log_probs(sequences, micro_batches_of(plan))
        self.free_cached_memory()
        return token_block(sequences, {"log_probs": log_probs.numpy()}), metrics

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs", "entropies"))
    def log_probs_and_entropies(self, batch: DataProto, plan: RankPlan) -> tuple[TokenBlock, Metrics]:
        """Forward-only pass: `log_probs`, and `entropies` in nats, float32, each as `log_probs` gives them."""
        sequences = sequences_from(batch)
        log_probs, entropies, metrics = self.engine.log_probs_and_entropies(sequences, micro_batches_of(plan))
        self.free_cached_memory()
        return token_block(sequences, {"log_probs": log_probs.numpy(), "entropies": entropies.numpy()}), metrics

    @dispatch(Split.PLAN, Join.ROWS)
    def sequence_log_probs(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """Forward-only pass: log-prob of each sequence's tokens with `loss_mask` together, float64 [B]."""
        summed = self.engine.sequence_log_probs(sequences_from(batch), micro_batches_of(plan))
        self.free_cached_memory()
        return summed.numpy()

    @dispatch(Split.PLAN, Join.ROWS)
    def kl(self, batch: DataProto, plan: RankPlan, estimator: str) -> np.ndarray:
        """Estimated KL of each sequence, nats, float64 [B]; the batch has `old_log_probs` and `reference_log_probs`."""
        return sequence_kl(sequences_from(batch), estimator).numpy()

    @dispatch(Split.ALL)
    def take_micro_step_times(self) -> list[MicroStepTime]:
        """Times of every micro-step since the last call, in order."""
        return self.engine.clock.take()

    def free_cached_memory(self) -> None:
        """Return memory that torch's allocator caches to the device, which other roles and a colocated engine share."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def sequences_from(batch: DataProto) -> Sequences:
    """The ragged columns of a DataProto, concatenated, beside its per-sequence numbers and objects, and its meta data.

    Raises DataError if there is no `input_ids` column, which defines the ragged axis.
    """
    columns = dict(batch.batch.items()) if batch.batch is not None else {}
    if "input_ids" not in columns:
        raise DataError(f"a training batch needs a ragged column 'input_ids', it has {sorted(columns)}.")
    lengths = columns["input_ids"].offsets().diff().cpu()
    tokens = {name: column.values() for name, column in columns.items() if column.is_nested}
    tokens["input_ids"] = tokens["input_ids"].to(torch.int64)
    rows = {name: column for name, column in columns.items() if not column.is_nested}
    return Sequences(lengths, tokens, rows, objects=batch.non_tensor_batch, meta=batch.meta_info)


def micro_batches_of(plan: RankPlan) -> list[tuple[int, int]]:
    """All micro-batches of a rank, mini-batch after mini-batch, as (start, stop) rows."""
    return [bounds for mini_batch in plan.mini_batches for bounds in mini_batch.micro_batches]


def token_block(sequences: Sequences, columns: dict[str, np.ndarray]) -> TokenBlock:
    """Columns [T] of the sequences, a row for each, as a worker returns them."""
    offsets = np.concatenate([[0], np.cumsum(sequences.lengths.numpy())]).astype(np.int64)
    return TokenBlock(offsets, columns)


def token_column(mask: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """float32 [T] with `values` [N] where `mask` is True and 0 elsewhere."""
    column = torch.zeros(len(mask), dtype=torch.float32)
    column[mask] = values.float()
    return column.numpy()
