"""PolicyWorker: trains under a plan and hands its weights to the engines. OfflinePolicyWorker: on given
sequences.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from balancing import RankPlan
from workers.batch.dataproto import DataProto
from workers.batch.dispatch import Join, Split, dispatch
from workers.batch.metrics import Metric, Metrics
from workers.config.loss import SumLossConfig, WeightedLossConfig
from workers.config.roles import LossConfig, SupervisedLossConfig
from workers.engine.placement import needs_frozen_tower
from workers.engine.weights.weight_delta import DeltaPacker, Payload
from workers.engine.weights.weight_transfer import pack_weights
from workers.errors import ConfigError, WorkerError
from workers.model.losses import (
    make_policy_loss,
    make_sft_loss,
    make_sum_loss,
    weighted_log_probs,
)
from workers.model.losses.distillation import WholeLayer
from workers.model.losses.returns import (
    KlPenalty,
    discounted_returns,
    discounts,
    token_rewards,
    turns_of,
    whiten,
)
from workers.roles.model_worker import (
    TeacherWorker,
    TrainedWorker,
    micro_batches_of,
    token_block,
    token_column,
)

if TYPE_CHECKING:
    from workers.engine.weights.gpu_transfer import WeightSender


class PolicyWorker(TrainedWorker, TeacherWorker):
    """One rank of the policy, which may be its own teacher."""

    _sender: "WeightSender | None" = None
    _epoch = 0  # of the transfer group that it sends to

    def loss_function(self, loss: Any) -> Callable[..., Any]:
        """A `LossConfig` reads `advantages` and, if it needs them, `group_tokens` [B], and `old_log_probs`,
        `reference_log_probs` and `rollout_log_probs`, ragged. Others: `workers.model.losses.sums`,
        `supervised`.
        """
        if isinstance(loss, LossConfig):
            return make_policy_loss(loss)
        if isinstance(loss, SumLossConfig):
            return make_sum_loss(loss)
        if isinstance(loss, SupervisedLossConfig):
            return make_sft_loss(loss.aggregation, loss.constant_length)
        if isinstance(loss, WeightedLossConfig):
            return weighted_log_probs
        raise ConfigError(f"loss={loss!r:.80}: not the settings of a loss of the policy.")

    @dispatch(Split.PLAN, Join.TOKENS, returns=("advantages",))
    def token_advantages(
        self,
        batch: DataProto,
        plan: RankPlan,
        gamma: float,
        penalty: KlPenalty | None = None,
        gamma_per: str = "token",
    ) -> tuple[DataProto, Metrics]:
        """Return REINFORCE++'s advantages of the policy's tokens, 0 elsewhere, float32 and ragged.

            A_t = whiten(G_t)        G_t: `discounted_returns` of `token_rewards`

        Whitened over the tokens of all ranks. batch: `input_ids`, `loss_mask`, `reward` [B], `by_turn` [B]
        (optional, see `turns_of`) and, with a penalty, `old_log_probs` and `reference_log_probs`.
        """
        lengths = batch.loss_token_counts.numpy()
        gammas = discounts(batch, gamma, gamma_per)
        returns = torch.from_numpy(
            discounted_returns(token_rewards(batch, penalty).numpy(), lengths, gammas)
        )
        advantages = whiten(
            returns,
            self.engine.data_parallel_groups,
            self.engine.device,
            self.counted_tokens(batch),
        )
        return token_block(
            batch, advantages=token_column(batch.tokens["loss_mask"], advantages)
        ), {}

    @dispatch(Split.PLAN, Join.TOKENS, returns=("advantages",))
    def turn_advantages(
        self, batch: DataProto, plan: RankPlan
    ) -> tuple[DataProto, Metrics]:
        """Return for each token of the policy its turn's number in `by_turn`, 0 elsewhere, float32 and
        ragged.
        """
        ends, numbers = turns_of(batch)
        advantages = numbers.repeat_interleave(ends.diff(prepend=ends.new_tensor([-1])))
        return token_block(
            batch, advantages=token_column(batch.tokens["loss_mask"], advantages)
        ), {}

    @dispatch(Split.ALL)
    def take_teacher_layer(self, layer: WholeLayer) -> None:
        """Keep the teacher's output layer, for divergences over the vocabulary."""
        self.engine.teacher_layer = layer

    @dispatch(Split.ALL)
    def save_adapters(self, path: str) -> None:
        """Write the adapters in peft's format. Raises OutputError, and ConfigError for a policy without
        adapters.
        """
        self.engine.save_adapters(path)
        self.free_cached_memory()

    @dispatch(Split.ALL)
    def use_adapters(self, name: str) -> None:
        """Let the following calls be of another LoRA policy. Raises as `TrainingEngine.use_adapters`."""
        self.engine.use_adapters(name)

    @dispatch(Split.ALL, Join.RANK_ZERO_REFERENCE)
    def export_adapters(self) -> tuple[dict[str, np.ndarray], Metrics]:
        """Return the adapters as `EngineAdapters.load` takes them, on rank zero. Collective."""
        return self.engine.adapter_files(), {}

    @dispatch(Split.ALL, Join.RANK_ZERO_REFERENCE)
    def export_weights(self) -> tuple[np.ndarray | None, Metrics]:
        """Return all weights as safetensors bytes, uint8, on rank zero. Collective."""
        packed = pack_weights(self.engine.named_weights(self.engine.dtype, keeper=0))
        return (packed if self.coordinates.index == 0 else None), {}

    @dispatch(Split.ALL, Join.RANK_ZERO_REFERENCE)
    def export_changed_weights(self, check: bool) -> tuple[Payload | None, Metrics]:
        """Return what changed since the last call, see `DeltaPacker.pack`, on rank zero. Collective."""
        packed = self._packer.pack(
            self.engine.named_weights(self.engine.dtype, keeper=0), check
        )
        return packed if self.coordinates.index == 0 else (None, {})

    @cached_property
    def _packer(self) -> DeltaPacker:
        return DeltaPacker()

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs",))
    def reference_log_probs(
        self, batch: DataProto, plan: RankPlan
    ) -> tuple[DataProto, Metrics]:
        """Return `log_probs` without the adapters, LoRA's reference. Raises ConfigError without adapters."""
        with self.engine.without_adapters():
            return self.log_probs(batch, plan)

    @dispatch(Split.ALL)
    def connect_engines(
        self, engines: list[Any], placement: str, tensor_parallel: int, epoch: int
    ) -> None:
        """Connect to the engines, started actors, for transfers between GPUs, in place of those before.

        placement: `colocated` or `apart`. epoch: the group's, which `send_weights` names.
        """
        # Late, because it imports vLLM.
        from workers.engine.weights.gpu_transfer import WeightSender

        if self._sender is not None:
            self._sender.close()
            self._sender = None
        meeting = [self.address() if self.coordinates.index == 0 else ("", 0)]
        torch.distributed.broadcast_object_list(meeting)
        address, port = meeting[0]
        # A colocated engine reads the weights of its rank. Over the network one rank sends.
        keeper = None if placement == "colocated" else 0
        dtype = self.engine.dtype  # the engines' dtype: half the bytes of float32 weights
        frozen_tower = needs_frozen_tower(placement)
        self._sender = WeightSender(
            placement,
            engines,
            partial(self.engine.named_weights, dtype, keeper, frozen_tower=frozen_tower),
            self.engine.weights_metadata(dtype, frozen_tower=frozen_tower),
            rank=self.coordinates.index,
            tensor_parallel=tensor_parallel,
            address=address,
            port=port,
        )
        self._epoch = epoch

    @dispatch(Split.ALL)
    def send_weights(self, version: int, epoch: int) -> list[int]:
        """Send all weights as `version` to the group of `epoch`. Returns positions of engines that were lost.

        Raises RolloutError if an engine refuses them, WorkerError for another group.
        """
        if self._sender is None or epoch != self._epoch:
            raise WorkerError(
                f"transfer group {epoch} does not exist here: the last was {self._epoch}."
            )
        lost = self._sender.send(version)
        self.free_cached_memory()
        return lost


class OfflinePolicyWorker(PolicyWorker):
    @dispatch(Split.PLAN, Join.METRICS)
    def measure_tokens(self, batch: DataProto, plan: RankPlan) -> Metrics:
        """Return `loss`, the mean negative log-likelihood of `loss_mask` tokens, and `entropy`."""
        log_probs, metrics = self.engine.log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        counted = self.counted_tokens(batch)
        total = -float(log_probs[batch.tokens["loss_mask"]][counted].double().sum())
        return {"loss": Metric.mean(total, int(counted.sum()), "tokens")} | metrics

    @dispatch(Split.PLAN, Join.ROWS)
    def reference_sequence_log_probs(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """Return `sequence_log_probs` without the adapters. Raises ConfigError for a policy that has none."""
        with self.engine.without_adapters():
            return self.sequence_log_probs(batch, plan)
