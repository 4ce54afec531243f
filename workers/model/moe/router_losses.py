"""Router auxiliary and z-losses, independent of how the mini-batch is split.

    router --logits [C, E], chosen experts [C, k]--> both losses of this rank's cells --attached to the weights of the
        chosen experts--> their gradients join the gradient of the policy's loss in the backward pass

    balance of a layer = mean over sequences of sum over e of f_e P_e         (DeepSeek-V3, arXiv:2412.19437, eq. 17-20)
        f_e = E / (k T) * how many of the sequence's T tokens go through expert e    no gradient
        P_e = 1 / T * sum over its tokens of softmax(logits)_e                       1 is even, E / k is one set for all
    z of a layer = mean over tokens of logsumexp(logits)^2                    (ST-MoE, arXiv:2202.08906, eq. 5)

Balance is taken over each sequence: over a micro-batch, as most trainers do, it depends on the split. Ranks that share
a sequence add up its f_e. Both means are over the whole mini-batch, prompts included; a shared cell counts once for
each sequence.

C cells of this rank's row, S sequences of the micro-batch, E experts, k experts of a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.config import ModelConfig
from workers.dataproto import DataProto
from workers.errors import UnsupportedModelError
from workers.metrics import Reduction
from workers.model.forward_backward import RouterHook
from workers.model.losses import Statistic, Statistics
from workers.model.model import PackedModel
from workers.model.rows.packing import ModelInput
from workers.model.sharding.parallel import Parallel
from workers.model.sharding.tensor_parallel import blocks_with_experts

ROUTERS = ("gate", "router")
"""The names that `families.ROUTER_LOSS_FAMILIES` give to the router of a block."""


@dataclass(frozen=True)
class RoutedTokens:
    """Map the cells of this rank to sequences. is_part: float [C, S], 1 if the cell has a token of the sequence.

    lengths: int64 [S], tokens of the sequences on all ranks.
    """

    is_part: Tensor
    lengths: Tensor


class RouterLosses(RouterHook):
    """Add the router losses to the gradient of a mini-batch, and measure them.

    packed: before layers are split over stages and experts over ranks. Raises UnsupportedModelError without routers.
    """

    def __init__(
        self, packed: PackedModel, config: ModelConfig, parallel: Parallel, device: torch.device, *, trained: bool
    ) -> None:
        self._balance, self._z = config.router_aux_loss_coefficient, config.router_z_loss_coefficient
        self._active = trained and config.has_router_losses
        self._tensor, self._device = parallel.tensor, device
        shared = [parallel.context, parallel.tensor]
        self._groups = [mesh.get_group() for mesh in shared if mesh.size() > 1]  # ranks with the same sequences
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # of both losses, over layers
        self._sequences = self._tokens = torch.ones((), dtype=torch.float64, device=device)  # of the mini-batch
        self._layers = 0
        if self._active:
            self._follow_routers(packed)

    def _follow_routers(self, packed: PackedModel) -> None:
        blocks = blocks_with_experts(packed)
        if not blocks:
            raise UnsupportedModelError(
                f"{packed.name} has no layer with routed experts; set model.router_aux_loss_coefficient and "
                "model.router_z_loss_coefficient to 0"
            )
        for block in blocks:
            router = next(child for name, child in block.named_children() if name in ROUTERS)
            router.register_forward_hook(self._add_losses)
        self._layers = len(blocks)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def begin(self, micro_batches: Sequence[DataProto], groups: Sequence[dist.ProcessGroup]) -> None:
        """Set the mini-batch, of which this rank holds `micro_batches`, for the means; collective."""
        if not self._active:
            return
        counts = [sum(map(len, micro_batches)), sum(each.num_tokens for each in micro_batches)]
        totals = torch.tensor(counts, dtype=torch.float64, device=self._device)
        for group in groups:
            dist.all_reduce(totals, group=group)
        self._sequences, self._tokens = totals.unbind()

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> RoutedTokens | None:
        if not self._active or not len(micro_batch):
            return None
        mesh = self._tensor
        width = rows.source.numel() // mesh.size()
        cells = rows.cells - mesh.get_local_rank() * width
        here = (rows.cells >= 0) & (cells >= 0) & (cells < width)
        owner = micro_batch.owner
        is_part = torch.zeros(width + 1, len(micro_batch))  # one row more, for tokens of other ranks
        is_part[torch.where(here, cells, width), owner] = 1
        return RoutedTokens(is_part[:width].to(self._device), micro_batch.lengths.to(self._device))

    def take(self) -> Statistics:
        """Return the losses since the last call, each a mean over layers, without its coefficient; collective."""
        if not self._active:
            return {}
        dist.all_reduce(self._sums)
        balance, z = (self._sums / self._layers).unbind()
        self._sums.zero_()
        losses = [("router_aux_loss", self._balance, balance), ("router_z_loss", self._z, z)]
        return {name: Statistic(Reduction.MEAN, loss, 1) for name, coefficient, loss in losses if coefficient}

    def _add_losses(self, router: nn.Module, given: Any, outputs: Any) -> Any:
        if not torch.is_grad_enabled() or self.current is None:
            return None
        logits, weights, chosen = outputs
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = torch.stack([self._balance_loss(wide, chosen), self._z_loss(wide)])
        if self.counting:
            self._sums += losses.detach()
        added = self._balance * losses[0] + self._z * losses[1]
        return logits, _Attach.apply(weights, added), chosen

    def _balance_loss(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return this rank's part of a layer's balance. logits: float [C, E]. chosen: int64 [C, k]."""
        is_part, lengths = self.current.is_part.to(logits.dtype), self.current.lengths[:, None]
        with torch.no_grad():
            taken = torch.zeros_like(logits).scatter_add_(-1, chosen, torch.ones_like(chosen, dtype=logits.dtype))
            taken = is_part.T @ taken  # [S, E], tokens of each sequence by expert
            for group in self._groups:
                dist.all_reduce(taken, group=group)
            load = taken * (logits.shape[-1] / chosen.shape[-1]) / lengths
            weights = is_part @ (load / lengths / self._sequences)  # [C, E]
        return (weights * logits.softmax(-1)).sum()

    def _z_loss(self, logits: Tensor) -> Tensor:
        """Return this rank's part of a layer's z-loss. logits: float [C, E]."""
        sequences = self.current.is_part.sum(-1).to(logits.dtype)  # [C], how many each cell belongs to
        return (sequences / self._tokens * logits.logsumexp(-1).square()).sum()


class _Attach(torch.autograd.Function):
    """Return `carrier` unchanged; if a gradient reaches it, `loss` gets the gradient 1.

    So a layer's loss needs no path to the end of the model, which may be on another rank.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.loss
        return grad, torch.ones((), dtype=dtype, device=device)
