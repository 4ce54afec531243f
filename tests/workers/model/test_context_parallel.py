"""Context-parallel attention by itself: every rank computes its part, and the parts are those of the whole."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from balancing.alignment import cumulative_lengths, length_multiple, zigzag_positions
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    save_tiny_model,
    unpacked_log_probs,
)
from workers.config import ModelConfig, ParallelConfig
from workers.dataproto import DataProto
from workers.model.attention import packed_attention
from workers.model.context_parallel import Ulysses, cut, gather_tokens
from workers.model.engine import TrainingEngine
from workers.model.packing import PackedRow, pack
from workers.model.ring_attention import RingAttention

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


def run_part(
    method: str, lengths: list[int], heads: int, key_value_heads: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """On one rank: the positions of its part, output and gradients there."""
    group = dist.group.WORLD
    cp, rank = group.size(), group.rank()
    row = packed(lengths, 2 * cp)
    query, key, value, grad = (tensor.to(dtype) for tensor in tensors(row, heads, key_value_heads))
    positions = torch.from_numpy(zigzag_positions(row.padded_lengths, cp, rank))
    inputs = [tensor[:, :, positions].requires_grad_() for tensor in (query, key, value)]
    if method == "ring":
        attention = RingAttention(row, group, CPU)
    else:
        attention = Ulysses(packed_attention("sdpa", row, CPU), row, group, CPU)
    output = attention(*inputs, SCALE)
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


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("lengths", [PACKED, ALONE], ids=["packed", "one sequence"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_c1_parts_of_both_methods_are_those_of_the_whole_attention(ranks: RankPool, method, lengths, cp):
    """C1, C4; key-value heads fewer than cp ranks for cp = 4. Ring goes by kernels that torch does not document."""
    expected = whole_row(lengths, 2 * cp, 4, 2)
    for positions, output, *gradients in ranks.run(run_part, cp, method, lengths, 4, 2):
        assert relative_error(output, expected[0][:, positions]) < 1e-12
        for actual, gradient in zip(gradients, expected[1:], strict=True):
            assert relative_error(actual, gradient[:, :, positions]) < 1e-12


def test_c2_ring_takes_any_number_of_heads(ranks: RankPool):
    expected = whole_row(PACKED, 8, 3, 1)
    for positions, output, *gradients in ranks.run(run_part, 4, "ring", PACKED, 3, 1):
        assert relative_error(output, expected[0][:, positions]) < 1e-12
        for actual, gradient in zip(gradients, expected[1:], strict=True):
            assert relative_error(actual, gradient[:, :, positions]) < 1e-12


def test_ring_in_half_precision_is_off_by_rounding_alone(ranks: RankPool):
    expected = whole_row(PACKED, 8, 4, 2)
    for positions, output, *gradients in ranks.run(run_part, 4, "ring", PACKED, 4, 2, torch.bfloat16):
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


def test_c5_documentation_says_how_long_a_chunk_must_be():
    """Tokens from which a step's attention takes as long as its exchange: K / H * FLOP/s / bandwidth."""
    text = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    for link, bytes_per_s in (("450 GB/s", 450e9), ("50 GB/s", 50e9)):
        (line,) = [line for line in text.splitlines() if f", {link} |" in line]
        chunk, whole, shared = (float(cell.replace(",", "")) for cell in line.split("|")[2:5])
        assert chunk == pytest.approx(5e14 / bytes_per_s, rel=0.02)
        assert whole == pytest.approx(2 * 5e14 / bytes_per_s, rel=0.02)
        assert shared == pytest.approx(2 * 5e14 / 8 / bytes_per_s, rel=0.02)


def gather_on_rank() -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    row = packed(PACKED, 2 * group.size())
    part = cut(row, group.size(), group.rank())
    values = part.targets.double().requires_grad_()
    whole = gather_tokens(values, part.selected, len(row.targets), group)
    whole.backward(3 * row.targets.double())
    return whole.detach(), values.grad / values.detach()


@pytest.mark.parametrize("cp", [2, 4])
def test_c6_predictions_come_back_whole_and_in_order_and_gradients_go_to_their_rank_once(ranks: RankPool, cp):
    row = packed(PACKED, 2 * cp)
    for whole, ratio in ranks.run(gather_on_rank, cp):
        assert torch.equal(whole, row.targets.double())
        assert torch.equal(ratio, torch.full_like(ratio, 3))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_state_before_a_target_predicts_it_in_every_part(cp):
    row = packed(PACKED, 2 * cp)
    parts = [cut(row, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat([part.selected for part in parts]).tolist()) == list(range(len(row.targets)))
    for part in parts:
        # With ids 100 * sequence + position, the token before a target is its id less one.
        assert torch.equal(part.input_ids[0, part.predicting], part.targets - 1)
        assert torch.equal(part.position_ids[0, part.predicting], (part.targets - 1) % 100)


def worked_example() -> PackedRow:
    """The example of the requirements: sequence i consists of the id i; padding, here id 0, is known by its cell."""
    lengths = [2, 4, 6, 1]
    rows = [{"input_ids": [index] * length, "loss_mask": [False] * length} for index, length in enumerate(lengths)]
    return pack(DataProto.from_list(rows), length_multiple(2, 1))


def test_p4_worked_example_of_zigzag_parts():
    row = worked_example()
    assert row.padded_lengths == (4, 4, 8, 4)
    is_padding = torch.ones(20, dtype=torch.bool)
    for start, length in zip(row.cu_seqlens_padded.tolist(), row.lengths, strict=False):
        is_padding[start : start + length] = False
    parts = []
    for rank in range(2):
        ids, positions = cut(row, 2, rank).input_ids[0].tolist(), zigzag_positions(row.padded_lengths, 2, rank)
        parts.append("".join("p" if is_padding[cell] else str(id) for id, cell in zip(ids, positions, strict=True)))
    assert parts == ["0p1122pp3p", "0p112222pp"]


def test_p5_worked_example_of_bounds():
    row = worked_example()
    assert row.cu_seqlens.tolist() == [0, 2, 6, 12, 13]
    assert row.cu_seqlens_padded.tolist() == cumulative_lengths(row.padded_lengths).tolist() == [0, 4, 8, 16, 20]
    bounds = (row.cu_seqlens_padded // 2).tolist()
    assert bounds == [0, 2, 4, 8, 10]
    for rank in range(2):
        ids = cut(row, 2, rank).input_ids[0]
        for index, (start, stop) in enumerate(pairwise(bounds)):
            assert set(ids[start:stop].tolist()) <= {index, 0}


def entropies_on_rank(model: str, cp: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, float32 [T], of three sequences in two micro-batches."""
    parallel = ParallelConfig(context_parallel=cp, context_parallel_method="ring")
    config = ModelConfig(path=model, dtype="float64")
    engine = TrainingEngine(config, optimizer=None, total_steps=0, device="cpu", parallel=parallel)
    return engine.log_probs_and_entropies(random_sequences(), [(0, 5), (5, 11)])[:2]


def test_p16_entropies_of_a_forward_pass_come_back_in_place_under_context_parallelism(ranks: RankPool, tmp_path):
    model, sequences = save_tiny_model(tmp_path), random_sequences()
    with torch.no_grad():
        alone = unpacked_log_probs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), sequences)
    mask = sequences.tokens["loss_mask"]
    for found in ranks.run(entropies_on_rank, 2, model, 2):
        for column, expected in zip(found, zip(*alone, strict=True), strict=True):
            assert torch.allclose(column.double(), torch.cat(expected) * mask, atol=1e-6)
