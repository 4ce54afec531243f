"""Tiny models of families that ask for more than plain attention, by the measurement that writes
docs/models.md.

Each is loaded as a run loads it, and compared with transformers' own forward pass of one sequence at a time.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.families.measuring import RUNS, Outcome, build, compare
from tests.benchmarks.families.published import published, tiny_description
from tests.benchmarks.families.published_page import replace_section
from tests.benchmarks.families.whole import build_published, first_line, train_published
from tests.workers.model.ranks import RankPool
from workers.config.roles import ModelConfig
from workers.model.attention.mixers import find_mixers
from workers.model.model import load_model


def measured(
    model_type: str, folder: Path, *names: str, **changes: Any
) -> dict[str, Outcome]:
    assert build(model_type, folder, **changes) == ""
    return {name: compare(folder, RUNS[name]) for name in names}


@pytest.mark.parametrize(
    "model_type",
    [
        "falcon_h1",  # a state space and attention in one layer, and a factor on the logits
        "granite",  # a divisor of the logits
        "minicpm3",  # latent attention, and a divisor that is a property
        "hy_v4",  # selected tokens and sinks
        "jetmoe",  # takes a view of the attention's output
    ],
)
def test_rows_of_either_layout_are_computed_as_sequences_alone(tmp_path, model_type):
    found = measured(model_type, tmp_path, "packed", "padded")
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        "packed": "exact",
        "padded": "exact",
    }, found


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mamba", {}, r"\(mamba\) takes no position_ids, .*\. Set model\.layout=padded"),
        ("bart", {}, r"\(bart\) takes no position_ids, .*\. Set model\.layout=padded"),
        (
            "llama4_text",
            {},
            r"with chunked_attention, attn_temperature_tuning, which model\.layout=packed does",
        ),
        (
            "llama4_text",
            {
                "layer_types": ["full_attention"] * 2,
                "no_rope_layers": [1, 0],
                "floor_scale": 8192,
            },
            r"with attn_temperature_tuning, which model\.layout=packed does not compute\. Set model\.layout=padded",
        ),
        ("doge", {"keep_window_size": 128}, r"DogeAttention uses attention_mask"),
    ],
)
def test_what_cannot_be_packed_says_so_and_is_computed_padded(
    tmp_path, model_type, changes, reason
):
    found = measured(model_type, tmp_path, "packed", "padded", **changes)
    assert found["packed"].verdict == "refused"
    assert re.search(reason, found["packed"].reason)
    assert found["padded"].verdict == "exact", found


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        (
            "doge",
            {"keep_window_size": 8},
            r"with keep_window_size, which model\.layout=padded does not",
        ),
        (
            "deepseek_v4",
            {},
            r"with compress_rates, compressed_sparse_attention, heavily_compressed_attention, which",
        ),
        (
            "zamba2",
            {},
            r"has layers that share parameters, so it cannot be sharded by layer",
        ),
    ],
)
def test_what_no_layout_computes_is_refused(tmp_path, model_type, changes, reason):
    found = measured(model_type, tmp_path, "padded", **changes)["padded"]
    assert found.verdict == "refused"
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(
    ("model_type", "verdict"),
    [("deepseek_v3", "exact"), ("falcon_h1", "exact"), ("jamba", "refused")],
    ids=["values smaller than keys", "a state by heads", "another state"],
)
@pytest.mark.parametrize("name", ["Ulysses", "ring"])
def test_latent_attention_and_states_by_heads_are_shared_between_ranks(
    ranks: RankPool, tmp_path, name, model_type, verdict
):
    assert build(model_type, tmp_path) == ""
    assert [found.verdict for found in ranks.run(compare, 2, tmp_path, RUNS[name])] == [
        verdict,
        verdict,
    ]


def test_a_state_starts_anew_where_activations_are_computed_again(tmp_path):
    """Gradient checkpointing calls the layers once more, long after the forward pass."""
    assert build("qwen3_next", tmp_path) == ""
    again = compare(tmp_path, RUNS["packed"], gradient_checkpointing="full")
    assert again.verdict == "exact", again


def test_a_row_that_is_not_packed_goes_through_mixers_whole(tmp_path):
    assert build("qwen3_next", tmp_path) == ""
    module = load_model(ModelConfig(path=str(tmp_path), dtype="float32"), torch.float32)
    assert any(find_mixers(layer) for layer in module.layers)
    module.model.set_attn_implementation("eager")
    ids = torch.randint(4, 100, (1, 12))
    together, alone = (
        module.model(ids, use_cache=False).logits,
        module.model(ids[:, 5:], use_cache=False).logits,
    )
    assert not torch.allclose(together[:, 5:], alone, atol=1e-3), (
        "the comparison cannot tell a state that is lost"
    )


HYBRIDS = [
    "Falcon-H1",
    "Granite 4",
    "Jamba 1.5",
    "Kimi Linear",
    "LFM2.5",
    "LFM2 MoE",
    "Nemotron 3 Nano",
]
HYBRIDS += ["Nemotron-H", "OLMo hybrid", "Qwen3-Next", "Qwen3.5"]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_in_the_form_of_its_checkpoint_trains_saves_resumes_and_takes_adapters(
    tmp_path, name
):
    assert build_published(published()[name], tmp_path) == ""
    outcomes = {
        stage: train_published(tmp_path, stage)
        for stage in ("trains", "saves", "resumes", "LoRA")
    }
    assert {outcome.verdict for outcome in outcomes.values()} == {"exact"}, outcomes


@pytest.mark.parametrize("family", published().values(), ids=published())
def test_a_published_model_keeps_its_fields_when_it_is_shrunk(family):
    description = tiny_description(family)
    assert description.keys() >= family.description.keys()
    switches = {
        name: value
        for name, value in family.description.items()
        if isinstance(value, bool | str)
    }
    changed = [name for name, value in switches.items() if description[name] != value]
    assert changed in ([], ["hybrid_override_pattern"])


def test_the_reason_of_an_error_is_its_library_s_own_words():
    error = ValueError(
        "1 validation error for SchedulerConfig\n  Value error, chunked prefill must be on\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
    )
    assert first_line(error) == "ValueError: Value error, chunked prefill must be on"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("head\n\n## B\n\nb\n", "head\n\n## A\n\nnew\n\n## B\n\nb\n"),
        ("head\n\n## A\n\nold\n\n## B\n\nb\n", "head\n\n## A\n\nnew\n\n## B\n\nb\n"),
        ("head\n\n## B\n\nb\n\n## A\n\nold\n", "head\n\n## B\n\nb\n\n## A\n\nnew\n"),
    ],
)
def test_a_section_of_the_page_is_replaced_and_the_others_stay(page, expected):
    assert replace_section(page, "## A", "## A\n\nnew", before="## B") == expected
