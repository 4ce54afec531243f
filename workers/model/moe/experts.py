"""The experts of a layer on this rank: rows sorted by expert, one grouped product a matrix.

    [T, H] --gather--> [T k, H] --up, gate--> [T k, I] --times its weight, down--> [T k, H] --sum--> [T, H]

transformers reads and writes [T k, H] more than twice as often: it weights the outputs instead of the
narrower inner values, and its gradient of a gather adds row by row. Here gather and sum are each other's
gradient. A product keeps no output for the backward pass, so recomputation ends before the last product, and
before outputs travel.

With expert parallelism the ranks of an ep group exchange rows twice:

    rows by expert --all-to-all--> rows by (rank, own expert) --gather--> by own expert ... and back

A layer's route (sorting and counts) is made once a micro-batch: gradient checkpointing's recomputation reads
it again, without exchange and without waiting.

    host     sort, counts, gather --waits for counts--> all-to-alls --> sort by own expert, products, ...
    device   sort | counts ------> host | gather       | all-to-alls                       | sort, ...

The device gathers rows while the host waits, and then finds the all-to-alls first. The next kernels are
launched while rows travel. Without expert parallelism every size is known and the host never waits. A
buffer for the worst case would need no wait either. It holds the tokens of the whole group times k, so
elementwise kernels would move ep times as much, and smaller buffers drop tokens.

T tokens, k experts of a token, H hidden size, I inner size, R rows that a rank receives.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from workers.batch.dataproto import DataProto
from workers.model.forward_backward import RouterHook
from workers.model.moe.expert_adapters import ExpertAdapter, adapter_of
from workers.model.rows.packing import ModelInput

ROW_BYTES = 16
"""A grouped product's rows in bfloat16 begin at multiples."""


@dataclass(frozen=True)
class Order:
    """Choices of tokens, sorted by expert. choices: int32 [T k], which one comes next. places: int32 [T, k],
    where each went. experts: int64 [T k], sorted. ends: int32 [E], the choices up to the end of each expert.
    """

    choices: Tensor
    places: Tensor
    experts: Tensor
    ends: Tensor

    @staticmethod
    def by_expert(chosen: Tensor, count: int) -> "Order":
        """chosen: int64 [T, k], below `count`."""
        experts, order = chosen.flatten().sort(stable=True)
        choices = order.to(torch.int32)
        numbers = torch.arange(len(order), dtype=torch.int32, device=order.device)
        places = torch.empty_like(numbers).scatter_(0, order, numbers).view_as(chosen)
        expert_numbers = torch.arange(count, device=order.device)
        return Order(
            choices,
            places,
            experts,
            torch.searchsorted(experts, expert_numbers, right=True, out_int32=True),
        )

    def rows(self, tokens: Tensor) -> Tensor:
        """[T, H] -> [T k, H], by expert."""
        return _Gather.apply(tokens, self.choices // self.places.shape[1], self.places)

    def values(self, values: Tensor) -> Tensor:
        """[T, k] -> [T k], by expert."""
        return _Gather.apply(values.flatten(), self.choices, self.places.view(-1, 1))

    def sums(self, rows: Tensor) -> Tensor:
        """[T k, H], by expert -> [T, H]."""
        return _Sum.apply(rows, self.choices // self.places.shape[1], self.places)


class _Gather(torch.autograd.Function):
    """Indices are attributes of `ctx`, not saved tensors: recomputation goes on until the last
    one is saved.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return tokens.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, ctx.places), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.index = index
        return _summed(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.index), None, None


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    if places.shape[1] == 1:
        return rows.index_select(0, places.flatten())
    return F.embedding_bag(places, rows, mode="sum")  # one kernel, adds in float32


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.reverse = received, sent, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, *ctx.reverse), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Return the received rows, or a row of zeros if there are none, so that every rank computes
    and reduces.
    """
    count = sum(received)
    result = (rows.new_empty if count else rows.new_zeros)(max(1, count), *rows.shape[1:])
    dist.all_to_all_single(
        result[:count], rows[: sum(sent)].contiguous(), received, sent, group=group
    )
    return result


class Route:
    """The way of a micro-batch's tokens through the experts of a layer. group: the ranks that share them."""

    def __init__(
        self, chosen: Tensor, experts: int, group: dist.ProcessGroup | None
    ) -> None:
        self.order = Order.by_expert(chosen, experts)
        if group is None:
            return
        ends = self.order.ends
        sent = ends.diff(prepend=ends.new_zeros(1)).view(group.size(), -1)
        self._received = torch.empty_like(sent)  # [rank, own expert]
        dist.all_to_all_single(self._received, sent, group=group)
        self._sizes = torch.stack([sent.sum(1), self._received.sum(1)]).to(
            "cpu", non_blocking=True
        )
        self._copied = torch.get_device_module(ends.device).Event()
        self._copied.record()

    @cached_property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Rows for each rank, and rows from each rank. The host waits for them."""
        self._copied.synchronize()
        sent, received = on_host(self._sizes, len(self.order.choices))
        return sent, received

    @cached_property
    def received_order(self) -> Order:
        """The order of received rows by own expert. Read it after the rows are on their way."""
        ends = self._received.flatten().cumsum(0)
        local_experts = self._received.shape[1]
        rows = torch.arange(max(1, sum(self.sizes[1])), device=ends.device)
        chosen = torch.searchsorted(ends, rows, right=True) % local_experts
        return Order.by_expert(chosen[:, None], local_experts)


def on_host(sizes: Tensor, rows: int) -> list[list[int]]:
    return sizes.tolist()


class GroupedExperts(RouterHook):
    """Compute experts in place of transformers' functions, and keep a micro-batch's routes for its
    recomputation.
    """

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> dict[nn.Module, Route]:
        return {}

    def compute(self, experts: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Replace the forward pass of a module of experts, in place. group: the ranks that share them."""
        count = next(experts.parameters()).shape[0]  # of all ranks
        experts.forward = partial(self._forward, experts, count, group)  # type: ignore[method-assign]

    def _forward(
        self,
        experts: nn.Module,
        count: int,
        group: dist.ProcessGroup | None,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        route = self._route(experts, top_k_index, count, group)
        rows = route.order.rows(hidden_states)
        weights = route.order.values(top_k_weights)
        if group is None:
            rows = _computed(experts, rows, weights, route.order)
        else:
            sent, received = self._sizes(route)
            rows = _Exchange.apply(rows, sent, received, group)
            weights = _Exchange.apply(weights, sent, received, group)
            order = self._received_order(route)
            rows = _computed(
                experts, order.rows(rows), order.values(weights[:, None]), order
            )
            rows = _Exchange.apply(order.sums(rows), received, sent, group)
        return route.order.sums(rows)

    @torch.compiler.disable
    def _route(
        self,
        experts: nn.Module,
        chosen: Tensor,
        count: int,
        group: dist.ProcessGroup | None,
    ) -> Route:
        routes = {} if self.current is None else self.current
        if experts not in routes:
            routes[experts] = Route(chosen, count, group)
        return routes[experts]

    @torch.compiler.disable
    def _sizes(self, route: Route) -> tuple[list[int], list[int]]:
        return route.sizes

    @torch.compiler.disable
    def _received_order(self, route: Route) -> Order:
        return route.received_order


def _computed(experts: Any, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Return the experts' outputs times `weights` [R] for rows by expert, [R, H]."""
    local = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in experts.named_parameters(recurse=False)
    }
    weights = weights[:, None]
    both = _product(rows, local["gate_up_proj"], order, experts.is_transposed)
    both = _adapted(both, rows, adapter_of(experts, "gate_up_proj"), order)
    if experts.has_bias:
        both = both + local["gate_up_proj_bias"][order.experts]
    inner = (experts._apply_gate(both) * weights).to(rows.dtype)
    outputs = _product(inner, local["down_proj"], order, experts.is_transposed)
    outputs = _adapted(outputs, inner, adapter_of(experts, "down_proj"), order)
    if experts.has_bias:
        outputs = (outputs + local["down_proj_bias"][order.experts] * weights).to(
            rows.dtype
        )
    return outputs


def _adapted(
    outputs: Tensor, rows: Tensor, adapter: ExpertAdapter | None, order: Order
) -> Tensor:
    """Add what a weight's adapter makes of `rows`, by expert."""
    if adapter is None:
        return outputs
    a, b = _aligned(*adapter.factors())
    inner = _product(rows, a, order, transposed=False)
    return outputs + _product(inner, b, order, transposed=False) * adapter.scaling


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Fill ranks up with zeros to what grouped products take: rows of a multiple of 16 bytes."""
    missing = -a.shape[1] % (ROW_BYTES // a.itemsize)
    if a.dtype != torch.bfloat16 or not missing:
        return a, b
    return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))


def _product(rows: Tensor, weight: Tensor, order: Order, transposed: bool) -> Tensor:
    weight = weight if transposed else weight.transpose(-2, -1)
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weight, offs=order.ends)
    # torch's takes no float64.
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, order.ends)
