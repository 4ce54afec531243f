"""Where experts lie that ranks share, and which models are refused. What they learn: `test_exactness.py`."""

from dataclasses import dataclass

from tests.workers.model.cases import Case
from tests.workers.model.exact import build_engine
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import save_tiny_model
from workers.config import ParallelConfig


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
