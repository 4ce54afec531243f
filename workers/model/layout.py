"""Lay out a micro-batch as the model's input on one rank.

    DataProto --pack--> PackedRow --attention, cut--> this rank's ModelInput --model--> values --whole--> [N]
              --pack_shared--> SharedRow, where sequences begin with the same tokens
              --pad---> a row for each sequence

Padded rows on shared ranks or a flash kernel are a PackedRow with segments as long as the longest: attention
is causal and padding is at the end, so no token sees it.
"""

import math
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from balancing.basics.alignment import length_multiple
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.config.roles import ModelConfig, ParallelConfig
from workers.errors import UnsupportedModelError
from workers.model.attention.attention import (
    PackedAttention,
    RowAttention,
    choose_backend,
    flash_implementation,
    packed_attention,
    use_flash_implementation,
)
from workers.model.attention.context_parallel import Ulysses, cut
from workers.model.attention.exchange import HeadExchange
from workers.model.attention.ring_attention import RingAttention
from workers.model.attention.shared_attention import SharedAttention
from workers.model.attention.state_rows import StateRow
from workers.model.copies import to_device
from workers.model.model import PackedModel
from workers.model.rows.packing import ModelInput, PackedRow, pack, pad, read_last, read_own
from workers.model.rows.prefix_rows import SharedRow, pack_shared
from workers.model.rules.model_rules import shares_prefixes
from workers.model.sharding.parallel import Parallel


class RowLayout:
    """Lay out the micro-batches of one engine. parallel: None for a process without a process group.

    shared_from: shortest prefix that sequences share, 0 for none. Raises ConfigError or UnsupportedModelError
    if model, layout, attention kernel and parallelism are incompatible.
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
        cp = shares.context_parallel
        tp = shares.tensor_parallel
        self._parallel = parallel
        self._ring = shares.context_parallel_method == "ring"
        self._device = device
        self._config = config
        self._context = cp
        self._tensor = tp
        self._model = model
        self._by_segment = config.attention_layout(shared=cp * tp > 1) == "packed"
        name = model.name
        features = model.required_features
        shares_prefix = shares_prefixes(
            config,
            features,
            name,
            states=model.unshared_states(1),
            cuda=device.type == "cuda",
            half=compute_dtype.itemsize == 2,
        )
        self.shared_from = config.min_shared_tokens if shares_prefix else 0
        heads = model.head_sizes
        self._flash = flash_implementation(
            config.attention, device, compute_dtype, head_sizes=heads
        )
        if self._by_segment and not (self._ring and min(shares.context_degrees) > 1):
            self._backend = choose_backend(
                config.attention,
                device,
                compute_dtype,
                features,
                model=name,
                head_sizes=heads,
            )

    def lay_out(
        self, micro_batch: DataProto, *, forward: bool = False, cells: str = "before"
    ) -> ModelInput:
        """Lay out a micro-batch. The model's inputs are on the device.

        forward: use the layout of forward-only passes. cells: which to read: `before` each token with
        `loss_mask`, its `own`, or each sequence's `last`. Raises DataError if `loss_mask` marks the first
        token of a sequence.
        """
        layout, multiple = self._config.rows(forward=forward)
        chosen = micro_batch.columns.get(CONTEXT_DEGREE)
        # Ranks of an empty micro-batch have nothing to share.
        degree = (
            self._context if chosen is None else int(chosen.max()) if len(chosen) else 1
        )
        multiple = math.lcm(multiple, length_multiple(degree, self._tensor))
        if self._by_segment:
            rows: ModelInput = self._row(
                micro_batch, multiple, to_longest=layout == "padded"
            )
        else:
            rows = pad(micro_batch, multiple)
        # Its row has a token without work, so that the rank takes part in collectives.
        if not len(micro_batch):
            rows = replace(
                rows, source=torch.full_like(rows.source, -1), cells=rows.cells[:0]
            )
        if cells != "before":
            rows = read_own(rows) if cells == "own" else read_last(rows, micro_batch)
        if self._model.vision is not None:
            rows = self._model.vision.lay_out(rows, micro_batch)
        elif "images" in micro_batch.objects:
            raise UnsupportedModelError(
                f"{self._model.name} takes no images. Remove data.image_key, or take another model."
            )
        if isinstance(rows, PackedRow):
            group = (
                self._parallel.context_groups[degree]
                if self._parallel and degree > 1
                else None
            )
            attention = self._attention(rows, group)
            if self._parallel and self._tensor > 1 and self._model.has_states:
                exchange = HeadExchange(
                    rows, self._parallel.token_groups[degree], self._device, self._tensor
                )
                attention = RowAttention(
                    attention, StateRow.of(rows, self._device, exchange)
                )
            rows = cut(rows, group, self._device) if group else rows
            rows = replace(rows, attention=attention)
        if chosen is not None and self._parallel is not None:
            rows = replace(
                rows, degree=degree, counts=self._parallel.context_rank % degree == 0
            )
        return self._on_device(rows)

    def _on_device(self, rows: ModelInput) -> ModelInput:
        names = (
            "input_ids",
            "position_ids",
            "predicting",
            "targets",
            "attention_mask",
            "image_cells",
            "image_source",
        )
        read = {name: value for name in names if (value := getattr(rows, name)) is not None}
        images = rows.images or {}
        sent = to_device(
            self._device, *read.values(), *rows.teacher.values(), *images.values()
        )
        teacher = dict(zip(rows.teacher, sent[len(read) :], strict=False))
        pixels = dict(zip(images, sent[len(sent) - len(images) :], strict=True)) or None
        return replace(
            rows, teacher=teacher, images=pixels, **dict(zip(read, sent, strict=False))
        )

    def _row(self, micro_batch: DataProto, multiple: int, *, to_longest: bool) -> PackedRow:
        if self.shared_from:
            row = pack_shared(micro_batch, multiple, self.shared_from)
            if row.shares:
                return row
        return pack(micro_batch, multiple, to_longest=to_longest)

    def _attention(self, row: PackedRow, group: ProcessGroup | None) -> PackedAttention:
        # Another engine of this process may have another one.
        use_flash_implementation(self._flash)
        if group and self._ring:
            return RingAttention(row, group, self._device)
        if self._config.batch_invariant:
            from workers.model.batch_invariant.paged_row import paged_attention

            kernel = paged_attention(row, self._device)
            return RowAttention(kernel, StateRow.of(row, self._device))
        if isinstance(row, SharedRow):
            attention: PackedAttention = SharedAttention(row, self._device)
        else:
            attention = packed_attention(self._backend, row, self._device)
        return Ulysses(attention, row, group, self._device) if group else attention
