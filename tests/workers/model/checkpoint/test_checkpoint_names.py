"""Weights leave the engine by the names and in the shapes of the model's files, whatever transformers made of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tests.workers.model.engines import assert_same, build_engine, weights
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import FAMILIES, save_tiny_model, tiny_config
from workers.config import LoraConfig
from workers.model.checkpoint.checkpoint_weights import CheckpointWeights, loading_rules


@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_one_by_one_are_those_of_save_pretrained(family):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    state = model.state_dict()
    weights = CheckpointWeights(model, loading_rules(model), state, dict, torch.device("cpu"), None)
    converted = {}
    for conversion in weights.plan.values():
        converted |= revert_weight_conversion(model, {name: state[name] for name in conversion})
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


def leave(path: str, keepers: list[int | None], parallel: dict[str, int]) -> list[dict]:
    """For each keeper, what this rank was given in bfloat16."""
    engine = build_engine(path, **parallel)
    outcomes = []
    for keeper in keepers:
        sent = {name: weight.clone() for name, weight in engine.named_weights(torch.bfloat16, keeper)}
        foretold = engine.weights_metadata(torch.bfloat16)
        assert not sent or [(name, weight.shape, weight.dtype) for name, weight in sent.items()] == [
            (name, weight.shape, weight.dtype) for name, weight in foretold.items()
        ]
        outcomes.append(sent)
    return outcomes


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
def test_ranks_that_share_a_model_give_out_what_is_in_its_files(tmp_path, ranks: RankPool, family, count, parallel):
    path = Path(save_tiny_model(tmp_path / "model", family))
    expected = {name: weight.bfloat16() for name, weight in load_file(path / "model.safetensors").items()}
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]  # tied
    keepers = [None, 0, count - 1]
    for rank, outcomes in enumerate(ranks.run(leave, count, str(path), keepers, parallel)):
        for keeper, sent in zip(keepers, outcomes, strict=True):
            if keeper not in (None, rank):
                assert sent == {}, "a rank that keeps nothing was given whole tensors"
                continue
            assert_same(sent, expected)


def leave_merged(path: str, keepers: list[int | None]) -> list[dict]:
    engine = build_engine(path, lora=LoraConfig(rank=3, alpha=6.0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in engine.module.model.state_dict().items():
            if ".lora_B." in name:  # starts at 0
                whole = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                placed = torch.distributed.tensor.distribute_tensor(whole, weight.device_mesh, weight.placements)
                weight.copy_(placed)
    return [{name: weight.clone() for name, weight in engine.named_weights(None, keeper)} for keeper in keepers]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_adapters_are_merged_on_every_ranks_own_rows(tmp_path, ranks: RankPool, family):
    path = save_tiny_model(tmp_path / "model", family)
    ((expected,),) = ranks.run(leave_merged, 1, path, [None])
    files = load_file(Path(path) / "model.safetensors")
    assert expected.keys() == files.keys() | {"lm_head.weight"}
    changed = [name for name in files if not torch.equal(expected[name], files[name])]
    assert changed
    assert all("proj" in name and "expert" not in name for name in changed)
    everywhere, to_one = zip(*ranks.run(leave_merged, 3, path, [None, 1]), strict=True)
    assert to_one[0] == to_one[2] == {}
    for sent in (*everywhere, to_one[1]):
        assert_same(sent, expected, 1e-13)
