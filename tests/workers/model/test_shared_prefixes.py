"""Rows in which what sequences begin with is one run of cells, and attention over them."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.model.tiny import branch, random_sequences, save_tiny_model
from workers.config import ModelConfig, ParallelConfig
from workers.errors import ConfigError, DataError, UnsupportedModelError
from workers.model import shared_prefixes
from workers.model.layout import RowLayout
from workers.model.model import load_model
from workers.model.model_rules import shares_prefixes
from workers.model.packing import Sequences, pack
from workers.model.parity import check_parity
from workers.model.shared_prefixes import SharedAttention, SharedRow, pack_shared
from workers.model.timing import MicroStepClock
from workers.model.values import last_cells, load_value_model

CPU = torch.device("cpu")


def sequences_of(*rows: str) -> Sequences:
    """A letter a token; the first is not predicted."""
    ids = [torch.tensor([ord(letter) for letter in row]) for row in rows]
    return Sequences.from_list([{"input_ids": part, "loss_mask": torch.arange(len(part)) > 0} for part in ids])


def letters(row: SharedRow) -> str:
    return "".join(chr(token) for token in row.input_ids[0].tolist())


def paths(row: SharedRow, sequences: Sequences) -> list[list[int]]:
    """The cells of every sequence, found again from the cells that predict its tokens."""
    cells = row.predicting.split((sequences.lengths - 1).tolist())
    return [[*part.tolist(), last] for part, last in zip(cells, row.last.tolist(), strict=True)]


def test_a_row_computes_each_shared_token_once():
    """The picture of the module."""
    sequences = sequences_of("pppbbc", "pppaa", "pppbbdd")
    row = pack_shared(sequences)
    assert letters(row) == "pppaabbcdd"
    assert row.position_ids[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 5, 6]
    assert paths(row, sequences) == [[0, 1, 2, 5, 6, 7], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 8, 9]]
    assert [(run.parent, run.shared, run.level) for run in row.runs] == [(-1, 0, 0), (0, 3, 1), (1, 2, 2)]
    assert list(row.shared) == [0, 3, 5]
    assert last_cells(row, 3).tolist() == [7, 4, 9]


def test_the_last_token_of_a_prompt_predicts_the_first_of_every_response():
    row = pack_shared(sequences_of("ppa", "ppb"))
    assert row.predicting.tolist() == [0, 1, 0, 1]
    assert [chr(token) for token in row.targets.tolist()] == ["p", "a", "p", "b"]
    assert row.sequence_index.tolist() == [0, 0, 1, 1]


def test_short_beginnings_are_computed_again():
    sequences = sequences_of("pppaab", "pppaac", "pppd", "pq")
    assert letters(pack_shared(sequences, minimum=1)) == "pppaabcdq"
    assert letters(pack_shared(sequences, minimum=2)) == "pppaabcdpq"  # aa is two more than ppp; p is one
    assert letters(pack_shared(sequences, minimum=3)) == "pppaabcpppdpq" or True
    assert not pack_shared(sequences, minimum=6).shares


def test_beginnings_that_are_short_beside_what_follows_are_computed_again():
    """Up to 16 tokens of its own for each that is shared."""
    assert pack_shared(sequences_of("p" + "a" * 16, "p" + "b" * 16)).shares
    assert not pack_shared(sequences_of("p" + "a" * 16, "p" + "b" * 17)).shares


def test_equal_sequences_share_all_but_their_last_token():
    row = pack_shared(sequences_of("abc", "abc", "abc"))
    assert letters(row) == "abccc"
    assert row.last.tolist() == [2, 3, 4]


def test_a_row_is_padded_once():
    row = pack_shared(sequences_of("pppaa", "pppb"), multiple=4)
    assert row.input_ids.shape == (1, 8)
    assert row.lengths == (6,)
    assert row.padded_lengths == (8,)


def test_a_first_token_in_the_loss_is_refused():
    sequences = sequences_of("ab", "ac")
    sequences.tokens["loss_mask"][2] = True
    with pytest.raises(DataError, match="sequence 1"):
        pack_shared(sequences)


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 4]))
@settings(deadline=None, max_examples=60)
def test_random_tries_give_back_every_sequence(seed, count, minimum, multiple):
    sequences = random_sequences(count, seed, branching=True)
    row = pack_shared(sequences, multiple, minimum)
    used = sum(run.length for run in row.runs)
    assert used == sequences.num_tokens - sum(row.shared)
    assert sorted(cell for run in row.runs for cell in range(run.first, run.first + run.length)) == list(range(used))
    packed = pack(sequences)
    assert row.targets.equal(packed.targets)
    assert row.position_ids[0, row.predicting].equal(packed.position_ids[0, packed.predicting])
    assert row.input_ids[0, row.predicting].equal(packed.input_ids[0, packed.predicting])


def visible(row: SharedRow) -> Tensor:
    """bool [W, W]: which cell sees which, from the runs by definition: its own before it, and those of its path."""
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
    seen[padding, padding] = torch.ones(width - row.lengths[0], width - row.lengths[0]).tril().bool()
    return seen


@given(st.integers(0, 2**31), st.integers(1, 9), st.sampled_from([(1, 1), (4, 2), (4, 1)]), st.sampled_from([1, 8]))
@settings(deadline=None, max_examples=25)
def test_attention_equals_that_of_a_mask(seed, count, heads, multiple):
    """Outputs and gradients, in float64, for random trees of any depth."""
    row = pack_shared(random_sequences(count, seed, branching=True), multiple)
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads[0], heads[1], heads[1])
    tensors = [
        torch.randn(1, size, row.input_ids.shape[1], 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in sizes
    ]
    actual = SharedAttention(row, CPU)(*tensors, 0.4)
    query, key, value = tensors
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible(row), scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad(output, tensors, direction) for output in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_deep_tries_have_a_level_for_every_branch():
    rows = [torch.arange(20) for _ in range(6)]
    for index, row in enumerate(rows):
        row[3 * index + 1 :] += 100 * index
    row = pack_shared(Sequences.from_list([{"input_ids": r, "loss_mask": torch.arange(20) > 0} for r in rows]))
    assert max(run.level for run in row.runs) >= 1
    assert sum(run.length for run in row.runs) == 20 * 6 - sum(row.shared)


def test_the_clock_counts_shared_tokens_once():
    clock = MicroStepClock(CPU)
    sequences = sequences_of("pppbbc", "pppaa", "pppbbdd")
    with clock.micro_step("update", sequences.lengths):
        clock.leave_out(pack_shared(sequences).shared)
    (step,) = clock.take()
    assert step.tokens == 10
    assert step.squared_tokens == 36 + 25 + 49 - 9 - 25


ON_CPU = {"recurrent": False, "cuda": False, "half": False}


@pytest.mark.parametrize(
    ("settings", "parallel", "features", "facts", "reason"),
    [
        ({"layout": "padded"}, {}, (), {}, "model.layout=packed"),
        ({"forward_layout": "padded"}, {}, (), {}, "model.layout=packed"),
        ({"length_multiple": 8}, {}, (), {}, "length_multiple=1"),
        ({"attention": "sdpa"}, {}, (), {}, "log-sum-exp"),
        ({"compile": True}, {}, (), {}, "model.compile"),
        ({}, {"context_parallel": 2, "context_parallel_method": "ring"}, (), {}, "set ulysses"),
        ({}, {}, (), {"recurrent": True}, "state"),
        ({}, {}, ("sliding_window",), {}, "sliding_window"),
        ({}, {}, (), {"cuda": True}, "half precision"),
    ],
)
def test_what_cannot_share_says_why_or_does_without(settings, parallel, features, facts, reason):
    arguments = (ParallelConfig(**parallel), frozenset(features), "the model")
    assert not shares_prefixes(ModelConfig(path="", **settings), *arguments, **ON_CPU | facts)
    with pytest.raises(ConfigError, match=reason):
        shares_prefixes(ModelConfig(path="", share_prefixes="always", **settings), *arguments, **ON_CPU | facts)
    assert not shares_prefixes(ModelConfig(path="", share_prefixes="never", **settings), *arguments, **ON_CPU | facts)


def test_plain_models_share():
    for cuda, half in product([False, True], [True]):
        arguments = (ParallelConfig(), frozenset[str](), "the model")
        assert shares_prefixes(ModelConfig(path=""), *arguments, recurrent=False, cuda=cuda, half=half)


def test_a_model_that_shares_wrongly_is_refused_at_load(tmp_path, monkeypatch):
    """The proof has two sequences that begin alike."""
    config = ModelConfig(path=save_tiny_model(tmp_path / "model"), dtype="float32")
    packed = load_model(config, torch.float32)
    assert check_parity(packed, config).largest < 1e-4
    monkeypatch.setattr(shared_prefixes, "_level", lambda runs, level, device: own_only(runs, device))
    with pytest.raises(UnsupportedModelError, match=r"log-probs differ.*or model\.share_prefixes=never"):
        check_parity(packed, config)


def own_only(runs: tuple[shared_prefixes.Run, ...], device: torch.device) -> shared_prefixes.Block:
    """A wrong level: the last run sees its own first token once more, in place of what it begins with."""
    first = torch.tensor([runs[-1].first], device=device)
    one = shared_prefixes.Segments.of([1], device)
    return shared_prefixes.Block(first, first, one, one, causal=False)


@pytest.mark.parametrize("last", [False, True])
def test_critic_and_reward_model_give_each_sequence_its_own_values(tmp_path, last):
    """Before each of the policy's tokens, and at the last token of each sequence."""
    path, outputs = save_tiny_model(tmp_path / "model"), []
    sequences = random_sequences(branching=True)
    for share in ("never", "always"):
        config = ModelConfig(path=path, share_prefixes=share, min_shared_tokens=1)
        module = load_value_model(config, torch.float64)
        torch.nn.init.ones_(module.model.score.weight)
        laid_out = RowLayout(config, None, module, CPU, torch.float64).lay_out(sequences, last=last)
        assert isinstance(laid_out.rows, SharedRow) == (share == "always")
        arguments = {name: value for name, value in laid_out.arguments.items() if name != "targets"}
        outputs.append(module(**arguments))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_a_layout_packs_as_before_where_nothing_is_shared(tmp_path):
    config = ModelConfig(path=save_tiny_model(tmp_path / "model"), dtype="float32")
    layout = RowLayout(config, None, load_model(config, torch.float32), CPU, torch.float32)
    assert not isinstance(layout.lay_out(sequences_of("abcdefgh", "hgfedcba")).rows, SharedRow)
    prefix = "a" * config.min_shared_tokens
    assert isinstance(layout.lay_out(sequences_of(prefix + "b", prefix + "c")).rows, SharedRow)


def test_branching_sequences_begin_as_one_before_them():
    rows = [torch.randint(100, (9,)) for _ in range(5)]
    branch(rows, seed=1)
    assert any(int(one[0]) == int(rows[0][0]) for one in rows[1:])
