"""Mixers over packed rows, against the same mixers with one sequence at a time, in float64."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from tests.benchmarks.families.measuring import fill_zeros
from tests.benchmarks.families.shrinking import tiny_config
from tests.workers.model import tiny
from tests.workers.model.float64 import compute_states_in_float64
from workers.batch.dataproto import DataProto
from workers.model.attention.attention import RowAttention
from workers.model.attention.mixers import find_mixers, split_by_segment
from workers.model.attention.state_rows import CHUNK, StateRow, like_segments
from workers.model.attention.states import follows_rows, sharing_problem
from workers.model.rows.prefix_rows import pack_shared
from workers.model.rules.families import unshared_states

LENGTHS = (3, 70, 1, 130, 64, 5, 2)
FAMILIES = {
    "qwen3_next": True,
    "qwen3_5_text": True,
    "kimi_linear": True,
    "nemotron_h": True,
    "falcon_h1": True,
    "lfm2": True,
    "jamba": False,  # Mamba-1
}
"""Whether a family's mixers look along the sequence by functions that follow the row."""


class Layer(nn.Module):
    """A layer with nothing but a mixer, called as transformers' layers call theirs."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        linears = (part for part in mixer.modules() if isinstance(part, nn.Linear))
        self.size = next(linears).in_features

    def forward(self, hidden: Tensor, packed_attention: Any = None) -> Tensor:
        output = self.mixer(hidden)
        return output if isinstance(output, Tensor) else output[0]


def layer_of(family: str) -> Layer:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(family), dtype=torch.float64
    ).eval()
    fill_zeros(model)
    compute_states_in_float64(model)
    (mixer, *_) = (
        mixer for layer in model.base_model.layers for mixer in find_mixers(layer)
    )
    return Layer(mixer)


def outcome(layer: Layer, hidden: Tensor, weights: Tensor, *, packed: bool) -> list[Tensor]:
    """The output [1, T, H], and the gradients of its weighted sum."""
    hidden = hidden.clone().requires_grad_()
    if packed:
        row = StateRow(LENGTHS, hidden.device)
        output = layer(hidden, packed_attention=RowAttention(lambda: hidden, row))
    else:
        output = torch.cat([layer(part) for part in hidden.split(LENGTHS, dim=1)], dim=1)
    trained = [hidden, *layer.parameters()]
    gradients = torch.autograd.grad((output * weights).sum(), trained, allow_unused=True)
    return [output, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_computed_as_its_sequences_alone(family: str) -> None:
    layer = layer_of(family)
    assert follows_rows(layer.mixer) == FAMILIES[family]
    hidden = torch.randn(1, sum(LENGTHS), layer.size, dtype=torch.float64)
    weights = torch.randn_like(hidden)
    expected = outcome(layer, hidden, weights, packed=False)
    split_by_segment([layer])
    actual = outcome(layer, hidden, weights, packed=True)
    assert len(actual) == len(expected) > 3
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def branching_ids(*draws: tuple[int, int, int]) -> list[Tensor]:
    """Sequences of so many tokens, each of which begins as an earlier one does for so many."""
    rows: list[Tensor] = []
    for index, (parent, shared, length) in enumerate(draws):
        own = (
            torch.full((length,), index)
            if parent < 0
            else torch.cat([rows[parent][:shared], torch.full((length - shared,), index)])
        )
        rows.append(own)
    return rows


TREES = {
    "a prompt": branching_ids(
        (-1, 0, 70), *[(0, 65, length) for length in (66, 130, 200, 68)]
    ),
    "levels": branching_ids(
        (-1, 0, 100), (0, 80, 90), (1, 82, 160), (2, 150, 151), (0, 80, 83), (-1, 0, 5)
    ),
    "shorter than a convolution": branching_ids(
        (-1, 0, 1), (0, 1, 3), (1, 2, 4), (2, 3, 9), (-1, 0, 2)
    ),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "family", [family for family, follows in FAMILIES.items() if follows]
)
def test_shared_tokens_hand_on_their_state_and_its_gradient(family: str, tree: str) -> None:
    rows = [
        {"input_ids": ids, "loss_mask": torch.arange(len(ids)) > 0} for ids in TREES[tree]
    ]
    sequences = DataProto.from_list(rows)
    row = pack_shared(sequences, multiple=7)
    assert row.shares
    layer = layer_of(family)
    hidden = torch.randn(1, row.padded_lengths[0], layer.size, dtype=torch.float64)
    cells = row.cells.split(sequences.lengths.tolist())
    weights = [torch.randn_like(hidden[:, part]) for part in cells]

    def outcome_of(outputs: list[Tensor], hidden: Tensor) -> list[Tensor]:
        total = torch.stack(
            [(part * weight).sum() for part, weight in zip(outputs, weights, strict=True)]
        ).sum()
        gradients = torch.autograd.grad(
            total, [hidden, *layer.parameters()], allow_unused=True
        )
        return [*outputs, *(gradient for gradient in gradients if gradient is not None)]

    hidden.requires_grad_()
    expected = outcome_of([layer(hidden[:, part]) for part in cells], hidden)
    split_by_segment([layer])
    attention = RowAttention(torch.zeros_like, StateRow.of(row, hidden.device))
    output = layer(hidden, packed_attention=attention)
    actual = outcome_of([output[:, part] for part in cells], hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_share_states_by_heads_and_channels_that_they_divide(family: str) -> None:
    mixer = layer_of(family).mixer
    problems = [sharing_problem([mixer], ranks) for ranks in (1, 2, 7)]
    assert [bool(problem) for problem in problems] == [
        not FAMILIES[family],
        not FAMILIES[family],
        True,
    ]
    assert bool(unshared_states(tiny_config(family).to_dict(), 1)) == bool(problems[0])
    assert all(type(mixer).__name__ in problem for problem in problems if problem)


def test_a_compiled_layer_leaves_its_mixer_out_and_is_not_traced_again_for_other_lengths() -> (
    None
):
    torch._dynamo.reset()
    (layer, *_) = (
        AutoModelForCausalLM.from_config(tiny.tiny_config("qwen3_5"))
        .eval()
        .base_model.layers
    )
    split_by_segment([layer])
    counter = CompileCounterWithBackend("eager")
    layer.forward = torch.compile(layer.forward, dynamic=True, backend=counter)
    frames = []
    for lengths in ((5, 9, 3), (7, 2), (30, 4, 1, 1)):
        hidden = torch.randn(1, sum(lengths), 32, requires_grad=True)
        row = RowAttention(torch.zeros_like, StateRow(lengths, hidden.device))
        layer(hidden, position_embeddings=None, packed_attention=row).sum().backward()
        frames.append(counter.frame_count)
    assert frames == [2, 2, 2]  # before the mixer and after it


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_has_more_tokens_than_padding_and_all_batches_few_steps(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [int(2 ** draw.uniform(0, 14)) for _ in range(draw.randint(1, 80))]
    batches = like_segments(lengths, range(len(lengths)))
    assert sorted(index for batch in batches for index in batch) == list(
        range(len(lengths))
    )
    chunks = [[-(-lengths[index] // CHUNK) for index in batch] for batch in batches]
    assert all(2 * min(batch) > max(batch) for batch in chunks)
    assert sum(max(batch) for batch in chunks) < 2 * max(map(max, chunks))
