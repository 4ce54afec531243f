"""Weights leave the engine by the names and in the shapes of the model's files, whatever transformers made of
them.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tests.workers.model.cpu_engine import assert_same, build_engine, weights
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import FAMILIES, save_tiny_model, tiny_config
from workers.model.checkpoint.checkpoint_weights import CheckpointWeights, loading_rules


@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_one_by_one_are_those_of_save_pretrained(family):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    state = model.state_dict()
    weights = CheckpointWeights(
        model, loading_rules(model), state, dict, torch.device("cpu"), None
    )
    converted = {}
    for conversion in weights.plan.values():
        converted |= revert_weight_conversion(
            model, {name: state[name] for name in conversion}
        )
    expected = revert_weight_conversion(model, dict(state))
    assert_same(converted, expected)
    foretold = weights.metadata(weights.plan.values())
    assert [(name, weight.shape, weight.dtype) for name, weight in foretold.items()] == [
        (name, weight.shape, weight.dtype) for name, weight in converted.items()
    ]


def test_mixtral_leaves_under_the_names_that_its_files_have(tmp_path):
    path = Path(save_tiny_model(tmp_path / "model", "mixtral", tie_word_embeddings=False))
    files = load_file(path / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in files
    assert_same(weights(build_engine(str(path))), files)


def test_a_model_without_files_leaves_by_the_rules_of_its_family(tmp_path):
    path = save_tiny_model(tmp_path / "model", "mixtral")
    loaded, described = (
        [
            (type(rule), rule.source_patterns, rule.target_patterns)
            for rule in loading_rules(model)
        ]
        for model in (
            AutoModelForCausalLM.from_pretrained(path),
            AutoModelForCausalLM.from_config(tiny_config("mixtral")),
        )
    )
    assert loaded and described == loaded


def leave(path: str, keepers: list[int | None], parallel: dict[str, int]) -> list[dict]:
    """For each keeper, what this rank was given in bfloat16."""
    engine = build_engine(path, **parallel)
    outcomes = []
    for keeper in keepers:
        sent = {
            name: weight.clone()
            for name, weight in engine.named_weights(torch.bfloat16, keeper)
        }
        foretold = engine.weights_metadata(torch.bfloat16)
        assert not sent or [
            (name, weight.shape, weight.dtype) for name, weight in sent.items()
        ] == [(name, weight.shape, weight.dtype) for name, weight in foretold.items()]
        outcomes.append(sent)
    return outcomes


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("family", "count", "parallel"),
    [
        ("mixtral", 2, {}),
        ("gpt_oss", 3, {}),  # shards of unequal size
        ("qwen3", 4, {"tensor_parallel": 2}),
        ("qwen3_moe", 4, {"context_parallel": 2, "replicate": 2}),
        ("qwen3_moe", 4, {"expert_parallel": 2}),
        ("mixtral", 4, {"expert_parallel": 2, "replicate": 2}),
        ("gpt_oss", 2, {"expert_parallel": 2}),
    ],
)
def test_ranks_that_share_a_model_give_out_what_is_in_its_files(
    tmp_path, ranks: RankPool, family, count, parallel
):
    path = Path(save_tiny_model(tmp_path / "model", family))
    expected = {
        name: weight.bfloat16()
        for name, weight in load_file(path / "model.safetensors").items()
    }
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]  # tied
    keepers = [None, 0, count - 1]
    for rank, outcomes in enumerate(ranks.run(leave, count, str(path), keepers, parallel)):
        for keeper, sent in zip(keepers, outcomes, strict=True):
            if keeper not in (None, rank):
                assert sent == {}, "a rank that keeps nothing was given whole tensors"
                continue
            assert_same(sent, expected)
