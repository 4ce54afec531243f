"""Where experts lie that ranks share, and which models are refused. What they learn: `test_exactness.py`."""

from dataclasses import dataclass

import pytest
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from tests.workers.model.cases import Case
from tests.workers.model.exact import build_engine
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import save_tiny_model
from workers.config import ParallelConfig
from workers.errors import UnsupportedModelError


@dataclass(frozen=True)
class Share:
    """What a rank holds. experts: of the first layer, by name: global shape, local shape, the mesh's dimensions."""

    experts: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]]
    others: set[tuple[str, ...]]


def shapes(path: str, parallel: ParallelConfig) -> Share:
    engine = build_engine(Case("qwen3_moe", tied=False), path, parallel)
    experts, others = {}, set()
    for name, weight in engine.module.model.state_dict().items():
        if ".experts." not in name:
            others.add(weight.device_mesh.mesh_dim_names)
        elif ".layers.0." in name:
            local = tuple(weight.to_local().shape)
            experts[name.rpartition(".")[2]] = (tuple(weight.shape), local, weight.device_mesh.mesh_dim_names)
    return Share(experts, others)


def test_experts_are_cut_by_number_first_and_all_else_over_all_ranks(ranks: RankPool, tmp_path):
    """Four experts of two on a rank; two ranks that hold the same cut them again."""
    four, six = (
        save_tiny_model(tmp_path / str(count), "qwen3_moe", tie_word_embeddings=False, num_experts=count)
        for count in (4, 6)
    )
    for share in ranks.run(shapes, 4, four, ParallelConfig(expert_parallel=2)):
        meshes = ("expert_shard", "ep")
        assert share.experts == {
            "gate_up_proj": ((4, 32, 32), (1, 32, 32), meshes),
            "down_proj": ((4, 32, 16), (1, 32, 16), meshes),
        }
        assert share.others == {("dp_shard",)}
    for share in ranks.run(shapes, 4, six, ParallelConfig(expert_parallel=2)):
        assert share.experts["gate_up_proj"][:2] == ((6, 32, 32), (3, 16, 32))


def refusal(path: str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        build_engine(Case("qwen3_moe", tied=False), path, ParallelConfig(expert_parallel=2))
    return str(caught.value)


def test_dense_models_and_families_without_dispatch_are_refused_by_every_rank(ranks: RankPool, tmp_path):
    dense, masked = save_tiny_model(tmp_path / "dense"), save_tiny_model(tmp_path / "masked", "mixtral")
    granite = GraniteMoeConfig(vocab_size=37, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(granite).save_pretrained(masked)
    for text in ranks.run(refusal, 2, dense):
        assert "(qwen2) has no experts, which policy.parallel.expert_parallel=2 would share; set it to 1." in text
    for text in ranks.run(refusal, 2, masked):
        assert "(granitemoe) is not shared by policy.parallel.expert_parallel: transformers has no all-to-all" in text
