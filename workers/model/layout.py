"""From a micro-batch to the model's arguments on one rank, and from its outputs back to the whole micro-batch.

    DataProto --pack--> PackedRow --cut--> this rank's part --model--> values of its tokens --whole--> [N]
              --pack_shared--> SharedRow, where sequences begin with the same tokens
              --pad---> PaddedRows ----------------------------------> values of all tokens

Padded rows on shared ranks or a flash kernel are a PackedRow with segments as long as the longest: attention is causal
and padding is at the end, so no token sees it.

T tokens and N predicted tokens of the micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from balancing.alignment import length_multiple
from workers.config import ModelConfig, ParallelConfig
from workers.dataproto import DataProto
from workers.model.attention.attention import PackedAttention, choose_backend, packed_attention
from workers.model.attention.context_parallel import Ulysses, cut, gather_tokens
from workers.model.attention.ring_attention import RingAttention
from workers.model.attention.shared_attention import SharedAttention
from workers.model.model import PackedModel
from workers.model.rows.packing import ModelInput, PackedRow, pack, pad
from workers.model.rows.prefix_rows import SharedRow, pack_shared
from workers.model.rules.model_rules import shares_prefixes
from workers.model.sharding.parallel import Parallel
from workers.model.value_head import after_last


@dataclass(frozen=True)
class LaidOut:
    """Hold a micro-batch as laid out. rows: the whole. arguments: of the model on this rank, on its device.

    source: int64 [number of cells], on the CPU: the token in each cell of this rank, along the ragged axis of the
    sequences; -1 if none. cells: int64 [T], the cell of each token; -1 on other ranks.

    whole: values [n, ...] of this rank's predicted tokens -> [N, ...] of all, on every rank of the group.
    """

    rows: ModelInput
    arguments: dict[str, Any]
    source: Tensor
    cells: Tensor
    whole: Callable[[Tensor], Tensor]


class RowLayout:
    """Lay out the micro-batches of one engine. parallel: None for a process without a process group.

    Raises ConfigError or UnsupportedModelError if model, layout, attention kernel and parallelism are incompatible.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel | None,
        model: PackedModel,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> None:
        shares = parallel.config if parallel else ParallelConfig()
        cp, tp = shares.context_parallel, shares.tensor_parallel
        self._context = parallel.context if parallel and cp > 1 else None
        self._ring = cp > 1 and shares.context_parallel_method == "ring"
        self._device, self._config, self._sharing = device, config, length_multiple(cp, tp)
        self._by_segment = config.attention_layout(shared=cp * tp > 1) == "packed"
        name, features = model.name, model.required_features
        shares_prefix = shares_prefixes(
            config,
            features,
            name,
            recurrent=model.is_recurrent,
            cuda=device.type == "cuda",
            half=compute_dtype.itemsize == 2,
        )
        self.shared_from = config.min_shared_tokens if shares_prefix else 0
        """Shortest prefix that sequences share; 0 shares none."""
        if self._by_segment and not self._ring:
            self._backend = choose_backend(config.attention, device, compute_dtype, features, model=name)

    def lay_out(self, micro_batch: DataProto, *, forward: bool = False, last: bool = False) -> LaidOut:
        """Lay out a micro-batch.

        forward: use the layout of forward-only passes. last: read the last cell of each sequence instead of the cell
        before each token with `loss_mask`. Raises DataError if `loss_mask` marks the first token of a sequence.
        """
        layout, multiple = self._config.rows(forward=forward)
        multiple = math.lcm(multiple, self._sharing)
        if not self._by_segment:
            rows = pad(micro_batch, multiple)
            rows = after_last(rows, micro_batch) if last else rows
            mask = {"attention": None, "attention_mask": rows.attention_mask.to(self._device)}
            return LaidOut(rows, self._cells(rows) | mask, *_tokens(rows, micro_batch), lambda values: values)
        row = self._row(micro_batch, multiple, to_longest=layout == "padded")
        row = after_last(row, micro_batch) if last else row
        if self._context is None:
            attention = self._attention(row)
            arguments = self._cells(row) | {"attention": attention}
            return LaidOut(row, arguments, *_tokens(row, micro_batch), lambda values: values)
        return self._part_of(row, micro_batch, self._context)

    def _row(self, micro_batch: DataProto, multiple: int, *, to_longest: bool) -> PackedRow:
        if self.shared_from:
            row = pack_shared(micro_batch, multiple, self.shared_from)
            if row.shares:
                return row
        return pack(micro_batch, multiple, to_longest=to_longest)

    def _attention(self, row: PackedRow) -> PackedAttention:
        if isinstance(row, SharedRow):
            return SharedAttention(row, self._device)
        return packed_attention(self._backend, row, self._device)

    def _part_of(self, row: PackedRow, micro_batch: DataProto, context: DeviceMesh) -> LaidOut:
        group, size = context.get_group(), len(row.targets)
        part = cut(row, context.size(), context.get_local_rank())
        selected = part.selected.to(self._device)
        if self._ring:
            attention: Any = RingAttention(row, group, self._device)
        else:
            attention = Ulysses(self._attention(row), row, group, self._device)
        arguments = self._cells(part) | {"attention": attention}
        tokens = _tokens(part, micro_batch)
        return LaidOut(row, arguments, *tokens, lambda values: gather_tokens(values, selected, size, group))

    def _cells(self, cells: Any) -> dict[str, Tensor]:
        names = ("input_ids", "position_ids", "predicting", "targets")
        return {name: getattr(cells, name).to(self._device) for name in names}


def _tokens(part: Any, micro_batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return `source` and `cells` of a LaidOut. part: a ModelInput or RowPart.

    The row of an empty micro-batch has a token without work, so that the rank takes part in collectives.
    """
    source, cells = part.source.flatten(), part.cells
    return (source, cells) if len(micro_batch) else (torch.full_like(source, -1), cells[:0])
