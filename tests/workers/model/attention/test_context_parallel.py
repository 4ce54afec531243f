"""Context-parallel attention by itself: half precision, features and the order of transfers.

The rest, through a model: `test_exactness.py`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from balancing.alignment import zigzag_positions
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import (
    relative_error,
)
from workers.dataproto import DataProto
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
                {"input_ids": 100 * index + torch.arange(length), "loss_mask": torch.arange(length) > 0}
                for index, length in enumerate(lengths)
            ]
        ),
        multiple,
    )


def tensors(row: PackedRow, heads: int, key_value_heads: int) -> list[Tensor]:
    """query, key, value and the gradient of the output, for the whole row; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = row.input_ids.shape[1]
    shapes = [(1, heads, tokens, 8), (1, key_value_heads, tokens, 8), (1, key_value_heads, tokens, 8)]
    shapes.append((1, tokens, heads, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def ring_in_half_precision(lengths: list[int]) -> tuple[Tensor, ...]:
    """On one rank: the positions of its part, output and gradients there."""
    group = dist.group.WORLD
    cp, rank = group.size(), group.rank()
    row = packed(lengths, 2 * cp)
    query, key, value, grad = (tensor.bfloat16() for tensor in tensors(row, 4, 2))
    positions = torch.from_numpy(zigzag_positions(row.padded_lengths, cp, rank))
    inputs = [tensor[:, :, positions].requires_grad_() for tensor in (query, key, value)]
    output = RingAttention(row, group, CPU)(*inputs, SCALE)
    output.backward(grad[:, positions])
    return positions, output.detach(), *(tensor.grad for tensor in inputs)


def whole_row(lengths: list[int], multiple: int, heads: int, key_value_heads: int) -> tuple[Tensor, ...]:
    row = packed(lengths, multiple)
    query, key, value, grad = tensors(row, heads, key_value_heads)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    segments = zip(*(tensor.split(row.padded_lengths, 2) for tensor in inputs), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True) for q, k, v in segments
    ]
    output = torch.cat(outputs, dim=2).transpose(1, 2)
    output.backward(grad)
    return output.detach(), *(tensor.grad for tensor in inputs)


PACKED, ALONE = [9, 1, 30, 16, 4], [37]


def test_ring_in_half_precision_is_off_by_rounding_alone(ranks: RankPool):
    expected = whole_row(PACKED, 8, 4, 2)
    for positions, output, *gradients in ranks.run(ring_in_half_precision, 4, PACKED):
        assert output.dtype == torch.bfloat16
        assert relative_error(output.double(), expected[0][:, positions]) < 2e-2
        for actual, gradient in zip(gradients, expected[1:], strict=True):
            assert relative_error(actual.double(), gradient[:, :, positions]) < 2e-2


def run_with_features(lengths: list[int]) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    row = packed(lengths, 2 * group.size())
    positions = torch.from_numpy(zigzag_positions(row.padded_lengths, group.size(), group.rank()))
    inputs = [tensor[:, :, positions] for tensor in tensors(row, 4, 2)[:3]]
    return positions, Ulysses(packed_attention("sdpa", row, CPU), row, group, CPU)(*inputs, SCALE, **FEATURES)


FEATURES = {"window": 4, "softcap": 1.5, "sinks": torch.arange(4.0, dtype=torch.float64)}


def test_c4_ulysses_hands_windows_soft_capping_and_sinks_on(ranks: RankPool):
    row = packed(PACKED, 8)
    inputs = tensors(row, 4, 2)[:3]
    expected = packed_attention("sdpa", row, CPU)(*inputs, SCALE, **FEATURES)
    plain = packed_attention("sdpa", row, CPU)(*inputs, SCALE)
    assert relative_error(plain, expected) > 0.1
    for positions, output in ranks.run(run_with_features, 4, PACKED):
        assert relative_error(output, expected[:, positions]) < 1e-12


def order_of_events() -> list[str]:
    """On one rank: what a forward pass begins, in order; sends and attention calls only."""
    group = dist.group.WORLD
    row = packed(ALONE, 2 * group.size())
    positions = torch.from_numpy(zigzag_positions(row.padded_lengths, group.size(), group.rank()))
    inputs = [tensor[:, :, positions] for tensor in tensors(row, 4, 2)[:3]]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        RingAttention(row, group, CPU)(*inputs, SCALE)
    kinds = {"c10d::send": "send", "aten::_scaled_dot_product_flash_attention_for_cpu": "attend"}
    begun = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [kinds[event.name] for event in begun if event.name in kinds]


def test_c5_ring_sends_before_it_attends_so_that_both_run_at_a_time(ranks: RankPool):
    for events in ranks.run(order_of_events, 4):
        assert events == ["send", "attend"] * 3 + ["attend"]
