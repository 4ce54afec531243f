"""Hooks on the routers of a mixture of experts: replay, losses, and the load metric. A dense model has none.

Replay: tokens use the experts that the sampler chose for them (R3, arXiv:2510.11370).

    engine --routed_experts [T, L, k]--> batch --cells of the row--> router of layer l:
        scores [C, E] --top k--> own choice  --compare--> router_mismatch
                      --gather at the sampler's choice--> weights of the experts

Engine and trainer round differently. If two experts have close scores they choose different ones, and the
token's log-prob jumps. With `replay` only the choice is the sampler's. Scores and gradients are the
trainer's. A token without a recorded choice (the last of a sequence, which the engine never reads) uses the
router's own.

Losses: independent of how the mini-batch is split.

    router --logits [C, E], chosen experts [C, k]--> both losses of this rank's cells --attached to the
        weights of the chosen experts--> their gradients join the policy loss's in the backward pass

    balance of a layer = mean over sequences of sum over e of f_e P_e    (DeepSeek-V3, 2412.19437, eq. 17-20)
        f_e = E / (k T) * how many of the sequence's T tokens go through expert e   no gradient
        P_e = 1 / T * sum over its tokens of softmax(logits)_e    1 is even, E / k is one set for all
    z of a layer = mean over tokens of logsumexp(logits)^2               (ST-MoE, arXiv:2202.08906, eq. 5)

Balance is taken over each sequence: over a micro-batch, as most trainers do, it depends on the split. Ranks
that share a sequence add up its f_e. Both means are over the whole mini-batch, prompts included. A shared
cell counts once for each sequence.

Load: counted where experts are called, with or without expert parallelism.

    router's choice [T, k] --cells that hold a token--> tokens by expert [layers, E] --all ranks--> sums
        --largest over mean, of the worst layer--> expert_load_max_over_mean: 1 is even, E / k is one set

T tokens and S sequences of a micro-batch in C cells of this rank, L layers of the model, E experts, k experts
of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workers.batch.dataproto import ROUTED_EXPERTS, DataProto
from workers.batch.metrics import Reduction
from workers.config.roles import ModelConfig
from workers.errors import DataError, UnsupportedModelError
from workers.model.copies import to_device
from workers.model.forward_backward import RouterHook
from workers.model.losses import Statistic, Statistics
from workers.model.model import PackedModel
from workers.model.moe.experts import GroupedExperts
from workers.model.rows.packing import ModelInput
from workers.model.sharding.parallel import Parallel
from workers.model.sharding.tensor_parallel import (
    blocks_with_experts,
    find_experts,
    own_cells,
)


class RouterReplay(RouterHook):
    """Compare the choices of a model's routers with the sampler's, and replace them if `setting`
    is `replay`.
    """

    def __init__(
        self, packed: PackedModel, setting: str, parallel: Parallel, device: torch.device
    ) -> None:
        self.active = setting != "none"
        self._replaces = setting == "replay"
        self._layers = len(packed.layers)
        self._tensor = parallel.tensor
        # Compared choices, and among them the router's different ones.
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        if self.active:
            self._follow_routers(packed)

    def _follow_routers(self, packed: PackedModel) -> None:
        blocks = [
            (index, block)
            for index, layer in enumerate(packed.layers)
            for block in blocks_with_experts(layer)
        ]
        if not blocks:
            raise UnsupportedModelError(
                f"{packed.name} has no routed experts. Set model.router_replay=none."
            )
        for layer, block in blocks:
            block.forward = self._forward_of(block, layer, packed.name)  # type: ignore[method-assign]

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> Tensor | None:
        """Return the sampler's choices by cell, [C, L, k], the type's largest number if missing, or None if
        nothing is replayed. Those of dense layers are not read.

        Raises DataError for a batch without choices.
        """
        if not self.active or not len(micro_batch):
            return None
        if ROUTED_EXPERTS not in micro_batch.tokens:
            raise DataError(
                f"model.router_replay needs the column {ROUTED_EXPERTS!r}, which comes with samples of an "
                f"engine. The batch has {sorted(micro_batch.tokens)}."
            )
        choices = micro_batch.tokens[ROUTED_EXPERTS].cpu()
        source = own_cells(rows.source, self._tensor)
        unknown = torch.iinfo(choices.dtype).max
        (own_choices,) = to_device(
            self._counts.device,
            choices[source].masked_fill_((source < 0)[:, None, None], unknown),
        )
        return own_choices

    def with_own_choices(self, sequences: DataProto) -> DataProto:
        if not self.active:
            return sequences
        column = torch.full((sequences.num_tokens, self._layers, 1), 255, dtype=torch.uint8)
        return replace(sequences, tokens=sequences.tokens | {ROUTED_EXPERTS: column})

    def take(self) -> Statistics:
        if not self.active:
            return {}
        dist.all_reduce(self._counts)
        compared, different = self._counts.clone().unbind()
        self._counts.zero_()
        return {
            "router_mismatch": Statistic(
                Reduction.MEAN, different / compared.clamp(min=1), 1
            )
        }

    def _forward_of(self, block: nn.Module, layer: int, model: str) -> Callable[..., Any]:
        compute = block.forward
        # Of all ranks, not yet divided.
        experts = {moe.num_experts for moe in find_experts(block)}

        def forward(*arguments: Any, **named: Any) -> Any:
            choice = None if self.current is None else self.current[:, layer].long()
            with _TopK(self, choice, experts) as top_k:
                result = compute(*arguments, **named)
            if top_k.found != 1:
                raise UnsupportedModelError(
                    f"{model} does not choose its experts by one top k of their scores, so its choice is "
                    "not replayed. Set model.router_replay=none."
                )
            return result

        return forward

    def chosen(self, own_choice: Tensor, choice: Tensor, experts: int) -> Tensor:
        is_known = ((choice >= 0) & (choice < experts)).all(-1, keepdim=True)
        if self.counting:
            different = (choice[:, :, None] != own_choice[:, None, :]).all(-1) & is_known
            self._counts += torch.stack(
                [is_known.sum() * choice.shape[-1], different.sum()]
            )
        return torch.where(is_known, choice, own_choice) if self._replaces else own_choice


class _TopK(TorchFunctionMode):
    """Inside, the top k of a router's scores [C, E] is taken at `choice` [C, k], or unchanged for None.

    Every family has its own router, which calls torch.topk over the experts. found: the number of such calls.
    """

    def __init__(
        self, replay: RouterReplay, choice: Tensor | None, experts: set[int]
    ) -> None:
        super().__init__()
        self._replay = replay
        self._choice = choice
        self._experts = experts
        self.found = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] not in self._experts:
            return result
        self.found += 1
        if self._choice is None:
            return result
        own_choice = result.indices
        chosen = self._replay.chosen(
            own_choice.reshape(len(self._choice), -1), self._choice, args[0].shape[-1]
        )
        chosen = chosen.reshape(own_choice.shape)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


ROUTERS = ("gate", "router")
"""The names that `families.ROUTER_LOSS_FAMILIES` give to the router of a block."""


@dataclass(frozen=True)
class RoutedTokens:
    """Map the cells of this rank to sequences. is_part: float [C, S], 1 if the cell has a token of the
    sequence.

    lengths: int64 [S], tokens of the sequences on all ranks.
    """

    is_part: Tensor
    lengths: Tensor


class RouterLosses(RouterHook):
    """Add the router losses to the gradient of a mini-batch. Raises UnsupportedModelError without routers."""

    def __init__(
        self,
        packed: PackedModel,
        config: ModelConfig,
        parallel: Parallel,
        device: torch.device,
        *,
        trained: bool,
    ) -> None:
        self._balance = config.router_aux_loss_coefficient
        self._z = config.router_z_loss_coefficient
        self._active = trained and config.has_router_losses
        self._tensor = parallel.tensor
        self._device = device
        shared = [parallel.context, parallel.tensor]
        # Ranks with the same sequences.
        self._groups = [mesh.get_group() for mesh in shared if mesh.size() > 1]
        # Of both losses, over layers.
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        # Counts of the mini-batch.
        self._sequences = self._tokens = torch.ones((), dtype=torch.float64, device=device)
        self._layers = 0
        if self._active:
            self._follow_routers(packed)

    def _follow_routers(self, packed: PackedModel) -> None:
        blocks = blocks_with_experts(packed)
        if not blocks:
            raise UnsupportedModelError(
                f"{packed.name} has no layer with routed experts. Set model.router_aux_loss_coefficient and "
                "model.router_z_loss_coefficient to 0."
            )
        for block in blocks:
            router = next(
                child for name, child in block.named_children() if name in ROUTERS
            )
            router.register_forward_hook(self._add_losses)
        self._layers = len(blocks)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        active = self._active
        self._active = False
        try:
            yield
        finally:
            self._active = active

    def begin(
        self, micro_batches: Sequence[DataProto], groups: Sequence[dist.ProcessGroup]
    ) -> None:
        if not self._active:
            return
        counts = [
            sum(map(len, micro_batches)),
            sum(micro_batch.num_tokens for micro_batch in micro_batches),
        ]
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
        # One row more, for tokens of other ranks.
        is_part = torch.zeros(width + 1, len(micro_batch))
        is_part[torch.where(here, cells, width), owner] = 1
        return RoutedTokens(*to_device(self._device, is_part[:width], micro_batch.lengths))

    def take(self) -> Statistics:
        """Return the losses since the last call, each a mean over layers, without its coefficient.
        Collective.
        """
        if not self._active:
            return {}
        dist.all_reduce(self._sums)
        balance, z = (self._sums / self._layers).unbind()
        self._sums.zero_()
        losses = [
            ("router_aux_loss", self._balance, balance),
            ("router_z_loss", self._z, z),
        ]
        return {
            name: Statistic(Reduction.MEAN, loss, 1)
            for name, coefficient, loss in losses
            if coefficient
        }

    def _add_losses(self, router: nn.Module, arguments: Any, outputs: Any) -> Any:
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
        is_part = self.current.is_part.to(logits.dtype)
        lengths = self.current.lengths[:, None]
        with torch.no_grad():
            token_counts = torch.zeros_like(logits).scatter_add_(
                -1, chosen, torch.ones_like(chosen, dtype=logits.dtype)
            )
            # [S, E], tokens of each sequence by expert.
            token_counts = is_part.T @ token_counts
            for group in self._groups:
                dist.all_reduce(token_counts, group=group)
            load = token_counts * (logits.shape[-1] / chosen.shape[-1]) / lengths
            weights = is_part @ (load / lengths / self._sequences)  # [C, E]
        return (weights * logits.softmax(-1)).sum()

    def _z_loss(self, logits: Tensor) -> Tensor:
        # [C], how many each cell belongs to.
        sequences = self.current.is_part.sum(-1).to(logits.dtype)
        return (sequences / self._tokens * logits.logsumexp(-1).square()).sum()


class _Attach(torch.autograd.Function):
    """Return `carrier` unchanged. If a gradient reaches it, `loss` gets the gradient 1.

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


class ExpertLoad(RouterHook):
    """Count the tokens that each expert computes in training."""

    def __init__(self, model: nn.Module, parallel: Parallel, device: torch.device) -> None:
        modules = find_experts(model)
        sizes = [next(module.parameters()).shape[0] for module in modules]
        self._counts = torch.zeros(
            len(modules), max(sizes, default=0), dtype=torch.int64, device=device
        )
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self._tensor = parallel.tensor
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> Tensor | None:
        if not len(self._sizes):
            return None
        (is_real,) = to_device(
            self._counts.device, own_cells(rows.source >= 0, self._tensor)
        )
        return is_real

    def take(self) -> Statistics:
        if not len(self._sizes):
            return {}
        # No two ranks compute the same tokens in the same layers.
        dist.all_reduce(self._counts)
        counts = self._counts.double()
        # A layer that saw no token counts as even.
        load = counts.amax(1) * self._sizes / counts.sum(1)
        self._counts.zero_()
        worst = load.nan_to_num(nan=1.0).max()
        return {"expert_load_max_over_mean": Statistic(Reduction.MEAN, worst, 1)}

    def _hook(self, layer: int) -> Any:
        def count(
            module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            chosen = (
                named["top_k_index"] if "top_k_index" in named else arguments[1]
            ).flatten(0, -2)
            if self.counting:
                is_real = self.current[:, None].expand_as(chosen).reshape(-1)
                self._counts[layer].index_add_(
                    0, chosen.reshape(-1), is_real.to(torch.int64)
                )

        return count


class Routing:
    """Hold the hooks of one engine. packed: before layers are split over stages and experts over ranks.

    Raises UnsupportedModelError for settings that need experts, with a model without.
    """

    def __init__(
        self,
        packed: PackedModel,
        config: ModelConfig,
        parallel: Parallel,
        device: torch.device,
        *,
        trained: bool,
    ) -> None:
        self._replay = RouterReplay(packed, config.router_replay, parallel, device)
        self._losses = RouterLosses(packed, config, parallel, device, trained=trained)
        self._load = ExpertLoad(packed, parallel, device)
        self.grouped = GroupedExperts()
        self.hooks: Sequence[RouterHook] = (
            self._replay,
            self._losses,
            self._load,
            self.grouped,
        )

    def begin(
        self, micro_batches: Sequence[DataProto], groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Start the passes of a mini-batch, of which this rank holds `micro_batches`. Collective."""
        self._losses.begin(micro_batches, groups)

    def take(self) -> list[Statistics]:
        return [self._load.take(), self._replay.take(), self._losses.take()]

    def without_losses(self) -> AbstractContextManager[None]:
        return self._losses.left_out()

    def with_own_choices(self, sequences: DataProto) -> DataProto:
        """Return `sequences` without recorded choices: routers use their own."""
        return self._replay.with_own_choices(sequences)
