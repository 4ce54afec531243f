"""Router replay: tokens use the experts that the sampler chose for them (R3; arXiv:2510.11370).

    engine --routed_experts [T, L, k]--> batch --cells of the row--> router of layer l:
        scores [C, E] --top k--> own choice  --compare--> router_mismatch
                      --gather at the sampler's choice--> weights of the experts

Engine and trainer round differently. If two experts have close scores they choose different ones, and the token's
log-prob jumps. With `replay` only the choice is the sampler's; scores and gradients are the trainer's. A token without
a recorded choice (the last of a sequence, which the engine never reads) uses the router's own.

T tokens of a micro-batch in C cells of this rank, L layers of the model, E experts, k experts a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workers.dataproto import DataProto
from workers.errors import DataError, UnsupportedModelError
from workers.metrics import Reduction
from workers.model.forward_backward import RouterHook
from workers.model.losses import Statistic, Statistics
from workers.model.model import PackedModel
from workers.model.rows.packing import ModelInput
from workers.model.sharding.parallel import Parallel
from workers.model.sharding.tensor_parallel import blocks_with_experts, find_experts, own_cells

COLUMN = "routed_experts"
"""int16 [T, L, k], per token: the experts that the sampler chose in each layer; rows of dense layers are not read."""
UNKNOWN = -1


class RouterReplay(RouterHook):
    """Compare the choices of a model's routers with the sampler's, and replace them if `setting` is `replay`.

    packed: before layers are split over stages and experts over ranks. Raises UnsupportedModelError without experts.
    """

    def __init__(self, packed: PackedModel, setting: str, parallel: Parallel, device: torch.device) -> None:
        self.active, self._replaces = setting != "none", setting == "replay"
        self._layers = len(packed.layers)
        self._tensor = parallel.tensor
        # Choices that are compared, and those of them that the router does not make.
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        if self.active:
            self._follow_routers(packed)

    def _follow_routers(self, packed: PackedModel) -> None:
        blocks = [(index, block) for index, layer in enumerate(packed.layers) for block in blocks_with_experts(layer)]
        if not blocks:
            raise UnsupportedModelError(f"{packed.name} has no routed experts; set model.router_replay=none")
        for layer, block in blocks:
            block.forward = self._forward_of(block, layer, packed.name)  # type: ignore[method-assign]

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> Tensor | None:
        """Return the sampler's choices by cell, int16 [C, L, k], UNKNOWN if missing; None if nothing is replayed.

        Raises DataError for a batch without choices.
        """
        if not self.active or not len(micro_batch):
            return None
        if COLUMN not in micro_batch.tokens:
            raise DataError(
                f"model.router_replay needs the column {COLUMN!r}, which comes with samples of an engine; "
                f"the batch has {sorted(micro_batch.tokens)}."
            )
        choices, source = micro_batch.tokens[COLUMN].cpu(), own_cells(rows.source, self._tensor)
        return torch.where((source < 0)[:, None, None], UNKNOWN, choices[source]).to(self._counts.device)

    def with_own_choices(self, sequences: DataProto) -> DataProto:
        if not self.active:
            return sequences
        column = torch.full((sequences.num_tokens, self._layers, 1), UNKNOWN, dtype=torch.int16)
        return replace(sequences, tokens=sequences.tokens | {COLUMN: column})

    def take(self) -> Statistics:
        if not self.active:
            return {}
        dist.all_reduce(self._counts)
        compared, different = self._counts.clone().unbind()
        self._counts.zero_()
        return {"router_mismatch": Statistic(Reduction.MEAN, different / compared.clamp(min=1), 1)}

    def _forward_of(self, block: nn.Module, layer: int, model: str) -> Callable[..., Any]:
        compute = block.forward
        experts = {each.num_experts for each in find_experts(block)}  # of all ranks, not yet divided

        def forward(*given: Any, **named: Any) -> Any:
            choice = None if self.current is None else self.current[:, layer].long()
            with _TopK(self, choice, experts) as top_k:
                result = compute(*given, **named)
            if top_k.found != 1:
                raise UnsupportedModelError(
                    f"{model} does not choose its experts by one top k of their scores, so its choice is not replayed; "
                    "set model.router_replay=none"
                )
            return result

        return forward

    def chosen(self, own: Tensor, choice: Tensor) -> Tensor:
        """Return the experts to use: int64 [C, k]. own: the router's. choice: the sampler's, or UNKNOWN."""
        known = (choice >= 0).all(-1, keepdim=True)
        if self.counting:
            different = (choice[:, :, None] != own[:, None, :]).all(-1) & known
            self._counts += torch.stack([known.sum() * choice.shape[-1], different.sum()])
        return torch.where(known, choice, own) if self._replaces else own


class _TopK(TorchFunctionMode):
    """Inside, the top k of a router's scores [C, E] is taken at `choice` [C, k]; None changes nothing.

    Every family has its own router, which calls torch.topk over the experts. found: the number of such calls.
    """

    def __init__(self, replay: RouterReplay, choice: Tensor | None, experts: set[int]) -> None:
        super().__init__()
        self._replay, self._choice, self._experts, self.found = replay, choice, experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] not in self._experts:
            return result
        self.found += 1
        if self._choice is None:
            return result
        own = result.indices
        chosen = self._replay.chosen(own.reshape(len(self._choice), -1), self._choice).reshape(own.shape)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
