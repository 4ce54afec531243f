"""Where experts lie that ranks share, and which models are refused. What they learn: `test_exactness.py`."""

import pytest

from tests.workers.model.cases import Case
from tests.workers.model.exact import build_engine
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import save_tiny_model
from workers.config.roles import ParallelConfig


def shapes(
    path: str, parallel: ParallelConfig
) -> tuple[dict[str, tuple[tuple[int, ...], ...]], set[tuple[str, ...]]]:
    """(global shape, local shape and mesh of the first layer's experts by name; meshes of all else)."""
    engine = build_engine(Case("qwen3_moe", tied=False), path, parallel)
    experts, others = {}, set()
    for name, weight in engine.module.model.state_dict().items():
        if ".experts." not in name:
            others.add(weight.device_mesh.mesh_dim_names)
        elif ".layers.0." in name:
            local = tuple(weight.to_local().shape)
            experts[name.rpartition(".")[2]] = (
                tuple(weight.shape),
                local,
                weight.device_mesh.mesh_dim_names,
            )
    return experts, others


@pytest.mark.parametrize(
    ("count", "gate_up", "down"),
    [
        (4, ((4, 32, 32), (1, 32, 32)), ((4, 32, 16), (1, 32, 16))),
        (6, ((6, 32, 32), (3, 16, 32)), ((6, 32, 16), (3, 16, 16))),
    ],
)
def test_experts_are_cut_by_number_first_and_all_else_over_all_ranks(
    ranks: RankPool, tmp_path, count, gate_up, down
):
    """Two ranks that hold the same experts cut them again, by number if that divides."""
    path = save_tiny_model(
        tmp_path, "qwen3_moe", tie_word_embeddings=False, num_experts=count
    )
    mesh = ("expert_shard", "ep")
    for experts, others in ranks.run(shapes, 4, path, ParallelConfig(expert_parallel=2)):
        assert experts == {"gate_up_proj": (*gate_up, mesh), "down_proj": (*down, mesh)}
        assert others == {("dp_shard",)}
