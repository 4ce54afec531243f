"""From a micro-batch to the arguments of the model on one rank, and from its outputs back to the whole micro-batch.

    Sequences --pack--> PackedRow --cut--> this rank's part --model--> values of its tokens --whole--> [N]
              --pad---> PaddedRows ----------------------------------> values of all tokens

Padded rows that ranks share, or that a flash kernel computes, are a PackedRow whose segments are all as long as the
longest: attention is causal and padding stands at the end, so that no token sees it.

T cells of the row, N predicted tokens of the micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from balancing.alignment import length_multiple
from workers.config import ModelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.attention import choose_backend, packed_attention
from workers.model.context_parallel import Ulysses, check_heads, check_ring, cut, gather_tokens
from workers.model.model import PackedCausalLM
from workers.model.packing import ModelInput, PackedRow, Sequences, pack
from workers.model.padded import pad
from workers.model.parallel import Parallel
from workers.model.ring_attention import RingAttention
from workers.model.values import after_last


@dataclass(frozen=True)
class LaidOut:
    """rows: the whole micro-batch. arguments: those of the model on this rank, on its device.

    whole: values [n, ...] of this rank's predicted tokens -> [N, ...] of all, on every rank of the group.
    """

    rows: ModelInput
    arguments: dict[str, Any]
    whole: Callable[[Tensor], Tensor]


class Layout:
    """How one engine lays out its micro-batches. parallel: None is a process alone, without a process group.

    Raises ConfigError or UnsupportedModelError if model, layout, attention kernel and parallelism do not go together.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel | None,
        model: PackedCausalLM,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> None:
        cp, tp = (parallel.context.size(), parallel.tensor.size()) if parallel else (1, 1)
        self._context = parallel.context if parallel and cp > 1 else None
        self._ring = parallel is not None and cp > 1 and parallel.method == "ring"
        self._device, self._config, self._sharing = device, config, length_multiple(cp, tp)
        self._by_segment = config.attention_layout(shared=cp * tp > 1) == "packed"
        if cp > 1 and model.is_recurrent:
            raise UnsupportedModelError(
                f"{type(model.model).__name__} carries a state from token to token, which ranks that share a sequence "
                "do not hand on; set parallel.context_parallel=1"
            )
        if self._ring and config.attention != "auto":
            raise ConfigError(f"model.attention={config.attention} does nothing with ring attention; set auto")
        if self._ring:
            check_ring(model.required_features, device, compute_dtype)
        elif self._by_segment:
            check_heads(model.model.config, context_parallel=cp, tensor_parallel=tp)
            self._backend = choose_backend(config.attention, device, compute_dtype, model.required_features)

    def lay_out(self, micro_batch: Sequences, *, forward: bool = False, last: bool = False) -> LaidOut:
        """forward: as in forward-only passes, not in training. last: in place of what is before each token with
        `loss_mask`, what is after the last token of each sequence.

        Raises DataError if `loss_mask` marks the first token of a sequence.
        """
        layout, multiple = self._config.rows(forward=forward)
        multiple = math.lcm(multiple, self._sharing)
        if not self._by_segment:
            rows = pad(micro_batch, multiple)
            rows = after_last(rows, micro_batch) if last else rows
            mask = {"attention": None, "attention_mask": rows.attention_mask.to(self._device)}
            return LaidOut(rows, self._cells(rows) | mask, lambda values: values)
        row = pack(micro_batch, multiple, to_longest=layout == "padded")
        row = after_last(row, micro_batch) if last else row
        if self._context is None:
            attention = packed_attention(self._backend, row, self._device)
            return LaidOut(row, self._cells(row) | {"attention": attention}, lambda values: values)
        return self._part_of(row, self._context)

    def _part_of(self, row: PackedRow, context: DeviceMesh) -> LaidOut:
        """This rank's part of a row that the ranks of `context` share."""
        group, size = context.get_group(), len(row.targets)
        part = cut(row, context.size(), context.get_local_rank())
        selected = part.selected.to(self._device)
        if self._ring:
            attention: Any = RingAttention(row, group, self._device)
        else:
            attention = Ulysses(packed_attention(self._backend, row, self._device), row, group, self._device)
        arguments = self._cells(part) | {"attention": attention}
        return LaidOut(row, arguments, lambda values: gather_tokens(values, selected, size, group))

    def _cells(self, cells: Any) -> dict[str, Tensor]:
        names = ("input_ids", "position_ids", "predicting", "targets")
        return {name: getattr(cells, name).to(self._device) for name in names}
