"""Rows in which sequences share their prefixes, and attention over them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from balancing import plan_batch
from balancing.basics.alignment import zigzag_positions
from balancing.prefixes.groups import fewest_worth_sharing
from tests.refusals import refused
from tests.workers.model.attention.flash4_twin import twin_in_use
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    save_tiny_model,
)
from workers.batch.dataproto import DataProto
from workers.config.roles import ModelConfig
from workers.errors import UnsupportedModelError
from workers.model.attention import flash_kernels as merged_attention
from workers.model.attention import ring_attention, shared_attention, state_rows
from workers.model.attention.attention import PackedAttention
from workers.model.attention.flash_kernels import Block, flash_backward, flash_forward
from workers.model.attention.ring_attention import RingAttention
from workers.model.attention.shared_attention import SharedAttention, ring_blocks
from workers.model.layout import RowLayout
from workers.model.model import load_model
from workers.model.numerics_check import check_numerics
from workers.model.rows.packing import PackedRow, pack, read_last
from workers.model.rows.prefix_rows import Run, SharedRow, pack_shared
from workers.model.rules.model_rules import shares_prefixes
from workers.model.timing import MicroStepClock

CPU = torch.device("cpu")


def sequences_of_ids(rows: list[Tensor]) -> DataProto:
    """All but the first token of each are predicted."""
    return DataProto.from_list(
        [{"input_ids": ids, "loss_mask": torch.arange(len(ids)) > 0} for ids in rows]
    )


def sequences_of(*rows: str) -> DataProto:
    """A letter a token."""
    return sequences_of_ids([torch.tensor(list(map(ord, row))) for row in rows])


def groups(*shapes: tuple[int, list[int]]) -> DataProto:
    """(prompt's tokens, tokens of its responses) of each."""
    rows = []
    for group, (prompt, responses) in enumerate(shapes):
        for index, response in enumerate(responses):
            ids = torch.tensor([1000 + group] * prompt + [index] * response)
            rows.append(ids)
    return sequences_of_ids(rows)


def letters(row: SharedRow) -> str:
    return "".join(chr(token) for token in row.input_ids[0].tolist())


def test_a_row_computes_each_shared_token_once():
    """The picture of the module."""
    sequences = sequences_of("pppbbc", "pppaa", "pppbbdd")
    row = pack_shared(sequences)
    assert letters(row) == "pppaabbcdd"
    assert row.position_ids[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 5, 6]
    assert row.cells.tolist() == [0, 1, 2, 5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 8, 9]
    assert [(run.parent, run.shared, run.level) for run in row.runs] == [
        (-1, 0, 0),
        (0, 3, 1),
        (1, 2, 2),
    ]
    assert list(row.shared) == [0, 3, 5]
    assert read_last(row, sequences).predicting.tolist() == [7, 4, 9]
    # The last p predicts the first token of every response.
    assert row.predicting.tolist() == [0, 1, 2, 5, 6, 0, 1, 2, 3, 0, 1, 2, 5, 6, 8]
    assert "".join(map(chr, row.targets.tolist())) == "ppbbcppaappbbdd"
    assert row.sequence_index.tolist() == [0] * 5 + [1] * 4 + [2] * 6
    padded = pack_shared(sequences_of("pppaa", "pppb"), multiple=4)
    assert (padded.input_ids.shape, padded.lengths, padded.padded_lengths) == (
        (1, 8),
        (6,),
        (8,),
    )


@pytest.mark.parametrize(
    ("sequences", "minimum", "row"),
    [
        (["pppaab", "pppaac", "pppd", "pq"], 1, "pppaabcdq"),
        # Aa is two more than ppp; p is one.
        (["pppaab", "pppaac", "pppd", "pq"], 2, "pppaabcdpq"),
        # Ppp alone is too short for d.
        (["pppaab", "pppaac", "pppd", "pq"], 4, "pppaabcpppdpq"),
        (["pppaab", "pppaac", "pppd", "pq"], 6, "pppaabpppaacpppdpq"),
        # up to 16 own tokens for each that is shared
        (["p" + "a" * 16, "p" + "b" * 16], 1, "p" + "a" * 16 + "b" * 16),
        (["p" + "a" * 16, "p" + "b" * 17], 1, "p" + "a" * 16 + "p" + "b" * 17),
        # Equal sequences share all but their last token.
        (["abc", "abc", "abc"], 1, "abccc"),
    ],
)
def test_prefixes_that_are_too_short_are_computed_again(sequences, minimum, row):
    assert letters(pack_shared(sequences_of(*sequences), minimum=minimum)) == row


@given(
    st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 4])
)
@settings(deadline=None, max_examples=60)
def test_random_trees_give_back_every_sequence(seed, count, minimum, multiple):
    sequences = random_sequences(count, seed, branching=True)
    row = pack_shared(sequences, multiple, minimum)
    used = sum(run.length for run in row.runs)
    assert used == sequences.num_tokens - sum(row.shared)
    assert sorted(
        cell for run in row.runs for cell in range(run.first, run.first + run.length)
    ) == list(range(used))
    packed = pack(sequences)
    assert row.targets.equal(packed.targets)
    assert row.position_ids[0, row.predicting].equal(
        packed.position_ids[0, packed.predicting]
    )
    assert row.input_ids[0, row.predicting].equal(packed.input_ids[0, packed.predicting])


def visible(row: PackedRow) -> Tensor:
    """bool [W, W]: which cell sees which, from the runs by definition: its own before it, and those of its
    path.
    """
    if not isinstance(row, SharedRow):
        return torch.block_diag(
            *(torch.ones(length, length).tril() for length in row.padded_lengths)
        ).bool()
    width = row.input_ids.shape[1]
    seen = torch.eye(width, dtype=torch.bool)
    for run in row.runs:
        end, parent, shared = run.first + run.length, run.parent, run.shared
        own = slice(run.first, end)
        seen[own, own] = torch.ones(run.length, run.length).tril().bool()
        while parent >= 0:
            above = row.runs[parent]
            seen[own, above.first : above.first + shared] = True
            parent, shared = above.parent, above.shared
    padding = slice(row.lengths[0], width)
    seen[padding, padding] = (
        torch.ones(width - row.lengths[0], width - row.lengths[0]).tril().bool()
    )
    return seen


def random_inputs(
    row: PackedRow, heads: tuple[int, int], seed: int, dim: int = 8
) -> list[Tensor]:
    """query, key, value and the gradient of the output, for the whole row."""
    generator = torch.Generator().manual_seed(seed)
    width, (query_heads, key_heads) = row.input_ids.shape[1], heads
    shapes = [
        (1, query_heads, width, dim),
        (1, key_heads, width, dim),
        (1, key_heads, width, dim),
        (1, width, query_heads, dim),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]


def by_mask(row: PackedRow, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
    output = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=visible(row), scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def computed(attention: PackedAttention, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
    output = attention(*leaves, 0.4)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


HEADS = st.sampled_from([(1, 1), (4, 2), (4, 1)])
WAYS = ("tree", "level", "path")


@given(st.integers(0, 2**31), st.integers(1, 9), HEADS, st.sampled_from([1, 8]))
@settings(deadline=None, max_examples=25)
def test_attention_equals_that_of_a_mask(seed, count, heads, multiple):
    row = pack_shared(random_sequences(count, seed, branching=True), multiple)
    inputs = random_inputs(row, heads, seed)
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedAttention, "_way", lambda *_, way=way: way)
            assert_equal(computed(SharedAttention(row, CPU), inputs), by_mask(row, inputs))


@pytest.mark.parametrize("way", ["level", "path"])
def test_attention_by_flash_attention_4_equals_that_of_a_mask(way, monkeypatch):
    row = pack_shared(random_sequences(7, 3, branching=True), 8)
    inputs = random_inputs(row, (4, 2), 3)
    monkeypatch.setattr(SharedAttention, "_way", lambda *_: way)
    with twin_in_use(monkeypatch) as calls:
        assert_equal(computed(SharedAttention(row, CPU), inputs), by_mask(row, inputs))
    levels = 1 + max(run.level for run in row.runs)
    assert len(calls) == (levels if way == "level" else 1)


def test_small_trees_are_a_call_each_and_others_are_computed_level_by_level(monkeypatch):
    """40 responses that differ in their last token alone, and 4 that have 60 tokens of their own."""
    calls: list[Tensor | None] = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        shared_attention.F,
        "scaled_dot_product_attention",
        lambda q, k, v, mask, **options: (
            calls.append(mask) or attend(q, k, v, mask, **options)
        ),
    )
    for samples, own, expected in ((40, 1, 2), (4, 60, 0)):
        row = pack_shared(groups(*[(41, [own] * samples)] * 2))
        calls.clear()
        query = torch.randn(1, 8, row.lengths[0], 64)
        key = torch.randn(1, 2, row.lengths[0], 64)
        SharedAttention(row, CPU)(query, key, key, 0.1)
        assert len(calls) == expected


class OnCuda(Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("prompt", "responses", "causal"),
    [(64, [4] * 16, [True]), (900, [300] * 8, [True, False])],
    ids=["a short row is one call over all paths", "a long one is a call a level"],
)
def test_on_cuda_attention_is_one_call_where_that_copies_few_keys(
    prompt, responses, causal, monkeypatch
):
    """The flash kernels for CUDA are replaced by those for CPUs; the crossing is lowered to rows as small as
    these.
    """
    row = pack_shared(groups((prompt, responses)))
    calls: list[bool] = []

    def forward(*arguments: object) -> tuple[Tensor, Tensor]:
        calls.append(arguments[3].causal)
        return flash_forward(*map(plain, arguments))

    monkeypatch.setattr(shared_attention, "COPIES_OF_A_LEVEL", 2**16)
    for module in (shared_attention, merged_attention):
        monkeypatch.setattr(module, "flash_forward", forward)
    monkeypatch.setattr(
        merged_attention,
        "flash_backward",
        lambda *arguments: flash_backward(*map(plain, arguments)),
    )
    inputs = random_inputs(row, (4, 2), seed=0)
    found = computed(
        SharedAttention(row, CPU), [tensor.as_subclass(OnCuda) for tensor in inputs]
    )
    assert calls == causal  # of each call; what a level sees of the level before is not
    assert_equal([*map(plain, found)], by_mask(row, inputs))


class Operators(TorchDispatchMode):
    """Counts operators that compute: not views, nor what allocates without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        without_kernel = operator.is_view or operator.name() in (
            "aten::empty_like",
            "aten::promote_types",
        )
        self.count += not without_kernel
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("way", "least", "most"), [("path", 7, 9), ("level", 32, 36)])
def test_one_call_over_all_paths_takes_few_operators_more_than_none_shared(
    way, least, most, monkeypatch
):
    """As docs/gpu-benchmark.md says: on a layer's attention, forward and backward, besides the kernels
    themselves.
    """
    row = pack_shared(groups((512, [64] * 16)))
    sums = torch.zeros(8, row.lengths[0])
    for module in (shared_attention, merged_attention):
        monkeypatch.setattr(
            module,
            "flash_forward",
            lambda query, *_: (torch.empty_like(query), sums[:, : len(query)]),
        )
    monkeypatch.setattr(
        merged_attention,
        "flash_backward",
        lambda *given: tuple(map(torch.empty_like, given[1:4])),
    )
    monkeypatch.setattr(SharedAttention, "_way", lambda *_: way)
    by_token = [
        torch.zeros(1, row.lengths[0], heads, 16, dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    ]
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in by_token]
    attention = SharedAttention(row, CPU)
    attention(*leaves, 0.4)  # makes the blocks
    with Operators() as operators:
        output = attention(*leaves, 0.4)
    gradient = torch.zeros_like(output)
    with operators:
        torch.autograd.grad(output, leaves, gradient)
    assert least <= operators.count <= most


def plain(value: object) -> object:
    return value.as_subclass(Tensor) if isinstance(value, OnCuda) else value


class RingOfThreads:
    """A rank of a ring whose ranks are threads of this process, in place of a process group."""

    def __init__(self, rank: int, mailboxes: list[Queue]) -> None:
        self._rank, self._mailboxes = rank, mailboxes

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._mailboxes)

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._mailboxes[(self._rank + 1) % self.size()].put(tensor.clone())
        return lambda: self._mailboxes[self._rank].get(timeout=60)


def by_ring(row: PackedRow, inputs: list[Tensor], size: int) -> list[Tensor]:
    cells = [row.cells_of(size, rank) for rank in range(size)]
    mailboxes: list[Queue] = [Queue() for _ in range(size)]

    def on_rank(rank: int) -> list[Tensor]:
        part = [
            *(tensor[:, :, cells[rank]] for tensor in inputs[:3]),
            inputs[3][:, cells[rank]],
        ]
        return computed(RingAttention(row, RingOfThreads(rank, mailboxes), CPU), part)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as threads:
        patch.setattr(
            ring_attention._Ring, "pass_on", lambda ring, tensor: ring.group.pass_on(tensor)
        )
        parts = list(zip(*threads.map(on_rank, range(size)), strict=True))
    in_order = torch.cat(cells).argsort()
    return [
        torch.cat(part, dim).index_select(dim, in_order)
        for part, dim in zip(parts, (1, 2, 2, 2), strict=True)
    ]


@given(st.integers(0, 2**31), st.integers(1, 9), HEADS, st.sampled_from([2, 3, 4]))
@settings(deadline=None, max_examples=25)
def test_attention_by_ring_equals_that_of_a_mask(seed, count, heads, size):
    """For random trees; runs shorter than the ring among them."""
    row = pack_shared(random_sequences(count, seed, branching=True), 2 * size)
    inputs = random_inputs(row, heads, seed)
    assert_equal(by_ring(row, inputs, size), by_mask(row, inputs))


@pytest.mark.parametrize("lay_out", [pack, pack_shared])
def test_a_ring_in_half_precision_is_off_by_rounding_alone(lay_out):
    row = lay_out(random_sequences(9, seed=2, branching=True), 8)
    inputs = random_inputs(row, (4, 2), seed=2)
    found = by_ring(row, [tensor.bfloat16() for tensor in inputs], 4)
    for one, other in zip(found, by_mask(row, inputs), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one.double(), other) < 2e-2


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_ring_have_as_many_cells_of_every_run_and_compute_each_pair_once(size):
    row = pack_shared(random_sequences(30, seed=3, branching=True), 2 * size)
    held = [row.cells_of(size, rank) for rank in range(size)]
    for run in row.runs:
        counts = [
            int(((cells >= run.first) & (cells < run.first + run.length)).sum())
            for cells in held
        ]
        assert max(counts) - min(counts) <= 1
    assert work_of_a_ring(row, size).sum() == int(visible(row).sum())


def test_ranks_of_a_ring_have_the_same_work_in_every_step_where_zigzag_segments_would_not():
    """As docs/prefixes.md says: a prompt of 500 tokens with 16 responses of about 600, on 8 ranks."""
    responses = np.random.default_rng(0).lognormal(np.log(600), 0.6, 16).astype(int) + 1
    row = pack_shared(groups((500, responses.tolist())), 16)
    work = work_of_a_ring(row, 8)
    assert work.sum(1).max() / work.sum(1).mean() - 1 == pytest.approx(0.001, abs=0.0005)
    assert work.max(0).sum() < 1.01 * work.sum(1).mean()
    seen = row.position_ids[0].numpy() + 1
    zigzag = np.array(
        [seen[zigzag_positions(row.padded_lengths, 8, rank)].sum() for rank in range(8)]
    )
    assert zigzag.max() / zigzag.mean() - 1 == pytest.approx(0.29, abs=0.01)


def work_of_a_ring(row: SharedRow, size: int) -> np.ndarray:
    """int64 [rank, step]: pairs of query and key that the kernels compute."""
    return np.array(
        [
            [pairs(step) for step in ring_blocks(row, rank, size, CPU)]
            for rank in range(size)
        ]
    )


def pairs(blocks: tuple[Block, ...]) -> int:
    total = 0
    for block in blocks:
        for queries, keys in zip(
            block.query_segments.lengths, block.key_segments.lengths, strict=True
        ):
            total += queries * (queries + 1) // 2 if block.causal else queries * keys
    return total


@given(st.integers(0, 2**31), st.sampled_from([2, 4, 8, 12]), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_rows_with_their_padding_keep_the_cap_of_a_plan_that_counts_prompts_once(
    seed, multiple, minimum
):
    generator = np.random.default_rng(seed)
    group = np.repeat(np.arange(6), generator.integers(1, 6))
    prompts = generator.integers(1, 80, 6)[group]
    lengths = prompts + generator.integers(1, 120, len(prompts))
    worth = prompts >= np.maximum(fewest_worth_sharing(lengths - prompts), minimum)
    plan = plan_batch(
        lengths,
        ranks=int(generator.integers(1, 4)),
        max_tokens=int(
            -(-lengths.max() // multiple) * multiple + generator.integers(0, 150)
        ),
        length_multiple=multiple,
        prefix_groups=group,
        prefix_lengths=np.where(worth, prompts, 0),
    )
    for rows in (
        rows
        for part in plan.mini_batches
        for step in part.micro_steps
        for rows in step.ranks
        if len(rows)
    ):
        ids = [
            torch.where(torch.arange(lengths[row]) < prompts[row], 1000 + group[row], row)
            for row in rows
        ]
        sequences = sequences_of_ids(ids)
        row = pack_shared(sequences, multiple, minimum)
        width = (row if row.shares else pack(sequences, multiple)).input_ids.shape[1]
        assert width <= plan.sizes[rows].sum() <= plan.max_tokens


def test_the_clock_counts_shared_tokens_once():
    clock = MicroStepClock(CPU)
    sequences = sequences_of("pppbbc", "pppaa", "pppbbdd")
    with clock.micro_step("update", sequences.lengths) as step:
        step.leave_out(pack_shared(sequences).shared)
    (step,) = clock.take()
    assert step.tokens == 10
    assert step.squared_tokens == 36 + 25 + 49 - 9 - 25


ON_CPU = {"states": "", "cuda": False, "half": False}


@pytest.mark.parametrize(
    ("settings", "features", "facts", "reason"),
    [
        ({"layout": "padded"}, (), {}, "model.layout=packed"),
        ({"forward_layout": "padded"}, (), {}, "model.layout=packed"),
        ({"length_multiple": 8}, (), {}, "length_multiple=1"),
        ({"attention": "sdpa"}, (), {}, "log-sum-exp"),
        ({}, (), {"states": "a scan"}, "a scan"),
        ({}, ("sliding_window",), {}, "sliding_window"),
        ({}, (), {"cuda": True}, "half precision"),
    ],
)
def test_what_cannot_share_says_why_or_does_without(settings, features, facts, reason):
    arguments = (frozenset(features), "the model")
    assert shares_prefixes(ModelConfig(path=""), frozenset(), "the model", **ON_CPU)
    assert shares_prefixes(
        ModelConfig(path=""),
        frozenset(),
        "the model",
        **ON_CPU | {"cuda": True, "half": True},
    )
    assert not shares_prefixes(
        ModelConfig(path="", **settings), *arguments, **ON_CPU | facts
    )
    with refused(reason):
        shares_prefixes(
            ModelConfig(path="", share_prefixes="always", **settings),
            *arguments,
            **ON_CPU | facts,
        )
    assert not shares_prefixes(
        ModelConfig(path="", share_prefixes="never", **settings),
        *arguments,
        **ON_CPU | facts,
    )


def without_states(row: PackedRow) -> tuple[list[int], list[int]]:
    return list(row.padded_lengths), [state_rows.NO_PARENT]


def own_only(runs: tuple[Run, ...], level: int) -> list[tuple[range, range]]:
    """A wrong level: the last run sees its own first token once more, in place of its prefix."""
    first = range(runs[-1].first, runs[-1].first + 1)
    return [(first, first)]


WRONG = {
    "qwen2": [
        (shared_attention, "PRODUCTS_OF_A_CALL", 0),
        (shared_attention, "_level", own_only),
    ],
    "nemotron_h": [(state_rows, "cut_runs", without_states)],
}


@pytest.mark.parametrize("family", WRONG)
def test_a_model_that_shares_wrongly_or_hands_on_no_state_is_refused_at_load(
    tmp_path, monkeypatch, family
):
    path = save_tiny_model(tmp_path / "model", family)
    config = ModelConfig(path=path, dtype="float32")
    packed = load_model(config, torch.float32)
    assert check_numerics(packed, config).largest < 1e-4
    for patch in WRONG[family]:
        monkeypatch.setattr(*patch)
    with pytest.raises(UnsupportedModelError, match=r"model\.share_prefixes=never"):
        check_numerics(packed, config)


def test_a_layout_packs_as_before_where_nothing_is_shared(model):
    config = ModelConfig(path=model, dtype="float32")
    layout = RowLayout(config, None, load_model(config, torch.float32), CPU, torch.float32)
    assert not isinstance(layout.lay_out(sequences_of("abcdefgh", "hgfedcba")), SharedRow)
    prefix = "a" * config.min_shared_tokens
    assert isinstance(layout.lay_out(sequences_of(prefix + "b", prefix + "c")), SharedRow)
