"""Experts shared between ranks: the same loss, gradients and weights as one process that holds them all.

The reference is that of `test_plan_invariance`: transformers' own forward pass, one unpadded sequence at a time.
"""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.test_plan_invariance import Case, Way, build_engine, check, has_empty, random_plan
from tests.workers.model.tiny import compute_in_float64, random_sequences, relative_error, save_tiny_model
from workers.config import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from workers.errors import UnsupportedModelError
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft

CASES = {
    "qwen3_moe": Case("qwen3_moe", tied=False),
    "qwen3_moe float32": Case("qwen3_moe", dtype="float32", aggregation="sequence_mean_token_mean"),
    "qwen3_moe checkpointed": Case("qwen3_moe", gradient_checkpointing=True, activation_offload=True),
    "qwen3_moe gathered": Case("qwen3_moe", reshard_after_forward=False, layout="padded"),
    "qwen3_moe shared": Case("qwen3_moe", tied=False, share_prefixes="always"),
    "qwen3_moe of six": Case("qwen3_moe", tied=False),
    "qwen3_moe replayed": Case("qwen3_moe", tied=False, router_replay="replay"),
    "qwen3_moe compared": Case("qwen3_moe", tied=False, router_replay="compare"),
    "qwen3_moe replayed, checkpointed": Case(
        "qwen3_moe", gradient_checkpointing=True, router_replay="replay", layers=4
    ),
    "qwen3_moe replayed, shared": Case("qwen3_moe", tied=False, share_prefixes="always", router_replay="replay"),
    "qwen3_moe with router losses": Case("qwen3_moe", tied=False, router_losses=(0.5, 0.1)),
    "qwen3_moe with router losses, replayed, checkpointed": Case(
        "qwen3_moe", gradient_checkpointing=True, router_replay="replay", layers=4, router_losses=(0.5, 0.1)
    ),
    "qwen3_moe with router losses, shared": Case(
        "qwen3_moe", tied=False, share_prefixes="always", layers=4, router_losses=(0.5, 0.1)
    ),
    "qwen3_moe with router losses, padded": Case("qwen3_moe", layout="padded", router_losses=(0.5, 0.0)),
    "qwen3_moe with z-loss": Case("qwen3_moe", tied=False, router_losses=(0.0, 0.1)),
    "gpt_oss with router losses": Case("gpt_oss", tied=False, router_losses=(0.5, 0.1)),
    "qwen3_moe of 4 layers": Case("qwen3_moe", tied=False, layers=4),
    "qwen3_moe, one layer dense": Case("qwen3_moe", tied=False),
    "mixtral": Case("mixtral", tied=False),
    "olmoe": Case("olmoe", tied=False),
    "gpt_oss": Case("gpt_oss", tied=False),
    "qwen2_moe": Case("qwen2_moe", tied=False),
}


def shared(ranks: int, ep: int, **parallel) -> Way:
    return Way(ranks, ParallelConfig(expert_parallel=ep, **parallel))


WAYS = {
    "ep 2": shared(2, 2),
    "ep 4": shared(4, 4),
    "dp 4, ep 2": shared(4, 2),
    "2 copies, ep 2": shared(4, 2, replicate=2),
    "ulysses 2, ep 2": shared(2, 2, context_parallel=2),
    "ring 2, ep 4": shared(4, 4, context_parallel=2, context_parallel_method="ring"),
    "dp 2, ring 2, ep 2": shared(4, 2, context_parallel=2, context_parallel_method="ring"),
    "ep 2, reduced at last": shared(2, 2, defer_gradient_reduction=True),
    "one rank": shared(1, 1),
    "ring 2": shared(2, 1, context_parallel=2, context_parallel_method="ring"),
    "pp 2, ep 2": shared(4, 2, pipeline_parallel=2),
    "pp 2 x 2, ep 2": shared(4, 2, pipeline_parallel=2, virtual_stages=2),
    "pp 2, ep 4": shared(8, 4, pipeline_parallel=2),
    "pp 4, ep 2": shared(8, 2, pipeline_parallel=4),
    "tp 2": Way(2, ParallelConfig(tensor_parallel=2)),
    "tp 2, ep 2": shared(2, 2, tensor_parallel=2),
    "dp 2, tp 2, ep 4": shared(4, 4, tensor_parallel=2),
    "dp 2, tp 2, ep 2": shared(4, 2, tensor_parallel=2),
    "2 copies, tp 2, ep 2": shared(4, 2, tensor_parallel=2, replicate=2),
    "ulysses 2, tp 2, ep 4": shared(4, 4, tensor_parallel=2, context_parallel=2),
    "ring 2, tp 2, ep 2": shared(4, 2, tensor_parallel=2, context_parallel=2, context_parallel_method="ring"),
    "pp 2, tp 2, ep 2": shared(4, 2, tensor_parallel=2, pipeline_parallel=2),
    "pp 2, tp 2, ep 4": shared(8, 4, tensor_parallel=2, pipeline_parallel=2),
    "pp 2, ulysses 2, ep 2": shared(4, 2, pipeline_parallel=2, context_parallel=2),
}
REPLAYED, IN_STAGES = "qwen3_moe replayed", "qwen3_moe of 4 layers"


def slow(name: str, way: str):
    return pytest.param(name, way, marks=pytest.mark.slow)


# Tested again further below, each with more options; without them they run in `make test-slow`.
WITH_MORE = ("2 copies, ep 2", "dp 2, ring 2, ep 2", "dp 2, tp 2, ep 2", "ring 2, tp 2, ep 2")
WITH_MORE += ("pp 2 x 2, ep 2", "pp 2, tp 2, ep 2", "pp 2, ulysses 2, ep 2")
PLAIN = [(IN_STAGES if "pp" in way else "qwen3_moe", way) for way in WAYS if "ep" in way]

COMBINATIONS = [
    *(slow(*one) if one[1] in WITH_MORE or WAYS[one[1]].ranks == 8 else one for one in PLAIN),
    *((REPLAYED, way) for way in ("one rank", "ring 2", "dp 2, ring 2, ep 2")),
    *((f"{REPLAYED}, checkpointed", way) for way in ("one rank", "pp 2 x 2, ep 2")),
    *((f"{REPLAYED}, shared", way) for way in ("one rank", "ring 2, ep 4")),
    ("qwen3_moe compared", "dp 4, ep 2"),
    *(
        ("qwen3_moe with router losses", way)
        for way in ("one rank", "dp 4, ep 2", "2 copies, ep 2", "ulysses 2, ep 2", "dp 2, ring 2, ep 2")
    ),
    *(("qwen3_moe with router losses", way) for way in ("dp 2, tp 2, ep 2", "ring 2, tp 2, ep 2")),
    *(("qwen3_moe with router losses, replayed, checkpointed", way) for way in ("one rank", "pp 2 x 2, ep 2")),
    *(("qwen3_moe with router losses, shared", way) for way in ("one rank", "ring 2, ep 4", "pp 2, ulysses 2, ep 2")),
    *(("qwen3_moe with router losses, shared", way) for way in ("pp 2, tp 2, ep 2",)),
    ("qwen3_moe with router losses, padded", "one rank"),
    ("qwen3_moe with z-loss", "ep 2"),
    ("gpt_oss with router losses", "ep 2"),
    ("qwen3_moe", "tp 2"),
    (REPLAYED, "dp 2, tp 2, ep 2"),
    ("qwen3_moe checkpointed", "tp 2"),
    slow("qwen3_moe checkpointed", "dp 2, tp 2, ep 2"),
    ("qwen3_moe, one layer dense", "tp 2, ep 2"),
    slow("qwen3_moe shared", "dp 2, tp 2, ep 2"),
    slow("mixtral", "dp 2, tp 2, ep 2"),
    ("qwen3_moe float32", "dp 4, ep 2"),
    ("qwen3_moe checkpointed", "dp 4, ep 2"),
    ("qwen3_moe gathered", "dp 4, ep 2"),
    *(("qwen3_moe shared", way) for way in ("ep 2", "ring 2, ep 4")),
    ("qwen3_moe of six", "dp 4, ep 2"),  # three experts of a rank do not divide over two
    *(("mixtral", way) for way in ("ep 2", "dp 4, ep 2")),
    ("olmoe", "ulysses 2, ep 2"),
    *(("gpt_oss", way) for way in ("ep 2", "2 copies, ep 2")),
    ("qwen2_moe", "ep 4"),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"qwen3_moe of six": {"num_experts": 6}, "qwen3_moe, one layer dense": {"mlp_only_layers": [0]}}
    return {
        name: save_tiny_model(
            folder / name.replace(" ", "-"),
            case.family,
            tie_word_embeddings=case.tied,
            num_hidden_layers=case.layers,
            **sizes.get(name, {}),
        )
        for name, case in CASES.items()
    }


@pytest.mark.parametrize(("name", "way"), COMBINATIONS)
def test_shared_experts_equal_one_process_that_holds_them_all(ranks: RankPool, paths, name, way):
    """Under a plan in which some rank has no work in a micro-step."""
    seed = next(seed for seed in range(100) if has_empty(random_plan(WAYS[way].dp, seed)) or WAYS[way].dp == 1)
    check(ranks, CASES[name], paths[name], WAYS[way], seed)


@dataclass(frozen=True)
class Share:
    """What a rank holds. experts: of the first layer, by name: global shape, local shape, the mesh's dimensions."""

    experts: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]]
    others: set[tuple[str, ...]]


def shapes(path: str, parallel: ParallelConfig) -> Share:
    engine = build_engine(CASES["qwen3_moe"], path, parallel)
    experts, others = {}, set()
    for name, weight in engine.module.model.state_dict().items():
        if ".experts." not in name:
            others.add(weight.device_mesh.mesh_dim_names)
        elif ".layers.0." in name:
            local = tuple(weight.to_local().shape)
            experts[name.rpartition(".")[2]] = (tuple(weight.shape), local, weight.device_mesh.mesh_dim_names)
    return Share(experts, others)


def test_experts_are_cut_by_number_first_and_all_else_over_all_ranks(ranks: RankPool, paths):
    """Four experts of two on a rank; two ranks that hold the same cut them again."""
    for share in ranks.run(shapes, 4, paths["qwen3_moe"], ParallelConfig(expert_parallel=2)):
        meshes = ("expert_shard", "ep")
        assert share.experts == {
            "gate_up_proj": ((4, 32, 32), (1, 32, 32), meshes),
            "down_proj": ((4, 32, 16), (1, 32, 16), meshes),
        }
        assert share.others == {("dp_shard",)}
    for share in ranks.run(shapes, 4, paths["qwen3_moe of six"], ParallelConfig(expert_parallel=2)):
        assert share.experts["gate_up_proj"][:2] == ((6, 32, 32), (3, 16, 32))


def train_adapters(path: str, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """The weights that engines get after two optimiser steps of adapters on attention."""
    settings = ModelConfig(path=path, dtype="float64", lora=LoraConfig(rank=2, target_modules="q_proj,v_proj"))
    engine = TrainingEngine(
        settings, optimizer=OptimizerConfig(learning_rate=1e-2), total_steps=2, device="cpu", parallel=parallel
    )
    compute_in_float64(engine.module.model)
    whole, share = random_sequences(count=10), 10 // engine.parallel.dp
    mine = whole.slice(dp_rank(engine.parallel) * share, (dp_rank(engine.parallel) + 1) * share)
    for _ in range(2):
        engine.forward_backward(mine, [(0, share)], sft, Denominators.of(whole))
        engine.optimizer_step()
    return {name: weight.clone() for name, weight in engine.named_weights()}


def test_adapters_learn_beside_frozen_experts_that_are_shared(ranks: RankPool, paths):
    path = paths["qwen3_moe"]
    (expected,) = ranks.run(train_adapters, 1, path, ParallelConfig())
    for weights in ranks.run(train_adapters, 2, path, ParallelConfig(expert_parallel=2)):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert relative_error(weight, expected[name]) < 1e-6, name


def refusal(path: str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        build_engine(CASES["qwen3_moe"], path, ParallelConfig(expert_parallel=2))
    return str(caught.value)


def test_dense_models_and_families_without_dispatch_are_refused_by_every_rank(ranks: RankPool, tmp_path):
    dense, masked = save_tiny_model(tmp_path / "dense"), save_tiny_model(tmp_path / "masked", "mixtral")
    granite = GraniteMoeConfig(vocab_size=37, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(granite).save_pretrained(masked)
    for text in ranks.run(refusal, 2, dense):
        assert "(qwen2) has no experts, which policy.parallel.expert_parallel=2 would share; set it to 1." in text
    for text in ranks.run(refusal, 2, masked):
        assert "(granitemoe) is not shared by policy.parallel.expert_parallel: transformers has no all-to-all" in text
