"""Hooks on the routers of a mixture of experts: replay, losses, and the load metric; none for a dense model.

    router's choice [T, k] --cells that hold a token--> tokens of each expert [layers, E] --over all ranks--> sums
        --largest over mean, of the worst layer--> expert_load_max_over_mean: 1 is even, E / k is one set for all

Load is counted where experts are called, with or without expert parallelism. Padding and empty rows do not count; a
shared token counts once, as it is computed once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.config import ModelConfig
from workers.dataproto import DataProto
from workers.metrics import Reduction
from workers.model.forward_backward import RouterHook
from workers.model.losses import Statistic, Statistics
from workers.model.model import PackedModel
from workers.model.moe.router_losses import RouterLosses
from workers.model.moe.router_replay import RouterReplay
from workers.model.rows.packing import ModelInput
from workers.model.sharding.parallel import Parallel
from workers.model.sharding.tensor_parallel import find_experts, own_cells


class ExpertLoad(RouterHook):
    """Count the tokens that each expert computes in training. model: before its experts are split over ranks."""

    def __init__(self, model: nn.Module, parallel: Parallel, device: torch.device) -> None:
        modules = find_experts(model)
        sizes = [next(module.parameters()).shape[0] for module in modules]
        self._counts = torch.zeros(len(modules), max(sizes, default=0), dtype=torch.int64, device=device)
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self._tensor = parallel.tensor
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> Tensor:
        """Return bool [T], the cells of this rank with a token."""
        return own_cells(rows.source >= 0, self._tensor).to(self._counts.device)

    def take(self) -> Statistics:
        if not len(self._sizes):
            return {}
        dist.all_reduce(self._counts)  # no two ranks compute the same tokens in the same layers
        counts = self._counts.double()
        # A layer that saw no token counts as even.
        load = counts.amax(1) * self._sizes / counts.sum(1)
        self._counts.zero_()
        worst = load.nan_to_num(nan=1.0).max()
        return {"expert_load_max_over_mean": Statistic(Reduction.MEAN, worst, 1)}

    def _hook(self, layer: int) -> Any:
        def count(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            chosen = (named["top_k_index"] if "top_k_index" in named else given[1]).flatten(0, -2)
            if self.counting:
                taken = self.current[:, None].expand_as(chosen).reshape(-1)
                self._counts[layer].index_add_(0, chosen.reshape(-1), taken.to(torch.int64))

        return torch.compiler.disable(count)


class Routing:
    """Hold the hooks of one engine. packed: before layers are split over stages and experts over ranks.

    Raises UnsupportedModelError for settings that need experts, with a model without.
    """

    def __init__(
        self, packed: PackedModel, config: ModelConfig, parallel: Parallel, device: torch.device, *, trained: bool
    ) -> None:
        self._replay = RouterReplay(packed, config.router_replay, parallel, device)
        self._losses = RouterLosses(packed, config, parallel, device, trained=trained)
        self._load = ExpertLoad(packed, parallel, device)

    @property
    def hooks(self) -> Sequence[RouterHook]:
        return self._replay, self._losses, self._load

    def begin(self, micro_batches: Sequence[DataProto], groups: Sequence[dist.ProcessGroup]) -> None:
        """Start the passes of a mini-batch, of which this rank holds `micro_batches`; collective."""
        self._losses.begin(micro_batches, groups)

    def take(self) -> list[Statistics]:
        """Return the metrics since the last call; collective."""
        return [self._load.take(), self._replay.take(), self._losses.take()]

    def without_losses(self) -> AbstractContextManager[None]:
        """Inside, a mini-batch's gradient excludes the router losses."""
        return self._losses.left_out()

    def with_own_choices(self, sequences: DataProto) -> DataProto:
        """Return `sequences` without recorded choices: routers use their own."""
        return self._replay.with_own_choices(sequences)
