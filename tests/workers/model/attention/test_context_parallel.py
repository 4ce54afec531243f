"""Context-parallel attention by itself: features and the order of transfers.

The rest, through a model: `test_exactness.py`."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from balancing.basics.alignment import zigzag_positions
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import (
    relative_error,
)
from workers.batch.dataproto import DataProto
from workers.model.attention.attention import packed_attention
from workers.model.attention.context_parallel import Ulysses
from workers.model.attention.ring_attention import RingAttention
from workers.model.rows.packing import PackedRow, pack

CPU = torch.device("cpu")
SCALE = 0.3


def packed(lengths: list[int], multiple: int) -> PackedRow:
    """Token ids 100 * sequence + position; all but the first token of each sequence are predicted."""
    return pack(
        DataProto.from_list(
            [
                {
                    "input_ids": 100 * index + torch.arange(length),
                    "loss_mask": torch.arange(length) > 0,
                }
                for index, length in enumerate(lengths)
            ]
        ),
        multiple,
    )


def tensors(row: PackedRow) -> list[Tensor]:
    """query, key and value of the whole row; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, row.input_ids.shape[1], 8) for heads in (4, 2, 2)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]


PACKED, ALONE = [9, 1, 30, 16, 4], [37]


def run_with_features(lengths: list[int]) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    row = packed(lengths, 2 * group.size())
    positions = torch.from_numpy(
        zigzag_positions(row.padded_lengths, group.size(), group.rank())
    )
    inputs = [tensor[:, :, positions] for tensor in tensors(row)]
    return positions, Ulysses(packed_attention("sdpa", row, CPU), row, group, CPU)(
        *inputs, SCALE, **FEATURES
    )


FEATURES = {"window": 4, "softcap": 1.5, "sinks": torch.arange(4.0, dtype=torch.float64)}


def test_c4_ulysses_hands_windows_soft_capping_and_sinks_on(ranks: RankPool):
    row = packed(PACKED, 8)
    inputs = tensors(row)
    expected = packed_attention("sdpa", row, CPU)(*inputs, SCALE, **FEATURES)
    plain = packed_attention("sdpa", row, CPU)(*inputs, SCALE)
    assert relative_error(plain, expected) > 0.1
    for positions, output in ranks.run(run_with_features, 4, PACKED):
        assert relative_error(output, expected[:, positions]) < 1e-12


def order_of_events() -> list[str]:
    group = dist.group.WORLD
    row = packed(ALONE, 2 * group.size())
    positions = torch.from_numpy(
        zigzag_positions(row.padded_lengths, group.size(), group.rank())
    )
    inputs = [tensor[:, :, positions] for tensor in tensors(row)]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        RingAttention(row, group, CPU)(*inputs, SCALE)
    kinds = {
        "c10d::send": "send",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attend",
    }
    begun = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [kinds[event.name] for event in begun if event.name in kinds]


def test_c5_ring_sends_before_it_attends_so_that_both_run_at_a_time(ranks: RankPool):
    for events in ranks.run(order_of_events, 4):
        assert events == ["send", "attend"] * 3 + ["attend"]
