"""The mesh, what cannot be arranged on it, and gradients that lie on several."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    PreTrainedModel,
)

from tests.refusals import refused
from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.ranks import TIMEOUT_S, RankPool, dp_rank
from tests.workers.model.tiny import save_tiny_model, save_tokenizer
from workers.config.roles import ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.sharding.parallel import (
    clip_gradients,
    full_tensor,
    make_parallel,
    mesh_shape,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "config", "shape"),
    [
        (1, ParallelConfig(), (1, 1, 1, 1, 1)),
        (8, ParallelConfig(replicate=2), (1, 2, 4, 1, 1)),
        (16, ParallelConfig(context_parallel=2, tensor_parallel=4), (1, 1, 2, 2, 4)),
        (
            16,
            ParallelConfig(pipeline_parallel=2, context_parallel=2, replicate=2),
            (2, 2, 2, 2, 1),
        ),
    ],
)
def test_ranks_fill_the_mesh(ranks, config, shape):
    assert mesh_shape(ranks, config) == shape


@pytest.mark.parametrize(
    ("ranks", "config", "named"),
    [
        (
            6,
            ParallelConfig(context_parallel=2, tensor_parallel=2),
            "parallel.tensor_parallel = 4",
        ),
        (2, ParallelConfig(context_parallel=4), "parallel.context_parallel"),
        (8, ParallelConfig(expert_parallel=8, replicate=2), "parallel.expert_parallel=8"),
        (6, ParallelConfig(pipeline_parallel=4), "parallel.pipeline_parallel = 4"),
        (4, ParallelConfig(replicate=3), "parallel.replicate=3"),
    ],
)
def test_ranks_that_do_not_fill_it_are_refused(ranks, config, named):
    with refused(named):
        mesh_shape(ranks, config)


def place_on_mesh() -> tuple[int, bool, int, int, int]:
    parallel = make_parallel(CPU, ParallelConfig(context_parallel=2, replicate=2))
    context = parallel.context.get_local_rank()
    return (
        dp_rank(parallel),
        parallel.leads_dp_group,
        context,
        parallel.dp,
        parallel.sharding.size(),
    )


def test_ranks_of_a_context_parallel_group_are_neighbours(ranks: RankPool):
    places = ranks.run(place_on_mesh, 4)
    assert places == [
        (0, True, 0, 2, 4),
        (0, False, 1, 2, 4),
        (1, True, 0, 2, 4),
        (1, False, 1, 2, 4),
    ]


def clip_on_two_meshes(max_norm: float) -> tuple[float, list[torch.Tensor]]:
    mesh = make_parallel(CPU, ParallelConfig(tensor_parallel=2)).mesh
    both, shard = mesh["dp_shard", "tp"], mesh["dp_shard"]
    placements = [
        (both, [Shard(0), Shard(1)]),
        (both, [Shard(0), Replicate()]),
        (shard, [Shard(0)]),
    ]
    parameters = []
    for number, (submesh, placement) in enumerate(placements):
        values = torch.arange(8.0).view(4, 2) + number
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 2), submesh, placement))
        parameter.grad = distribute_tensor(values, submesh, placement)
        parameters.append(parameter)
    norm = clip_gradients(parameters, max_norm)
    return norm, [full_tensor(parameter.grad) for parameter in parameters]


def test_clipping_takes_the_norm_over_all_meshes(ranks: RankPool):
    values = torch.stack([torch.arange(8.0).view(4, 2) + number for number in range(3)])
    expected = float(values.norm())
    for norm, gradients in ranks.run(clip_on_two_meshes, 4, expected / 2):
        assert norm == pytest.approx(expected)
        torch.testing.assert_close(torch.stack(gradients), values / 2)


def save(path: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(path)
    save_tokenizer(path, 37)
    return str(path)


def gpt2(path: Path) -> str:
    return save(
        path,
        GPT2LMHeadModel(
            GPT2Config(vocab_size=37, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        ),
    )


def granite(path: Path) -> str:
    config = GraniteMoeConfig(
        vocab_size=37, hidden_size=32, intermediate_size=16, num_hidden_layers=1
    )
    return save(path, GraniteMoeForCausalLM(config))


ODD = partial(save_tiny_model, hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
WINDOWED = partial(save_tiny_model, family="mistral windowed")
RING = ParallelConfig(context_parallel=2, context_parallel_method="ring")
REFUSALS = [
    (ODD, 2, ParallelConfig(context_parallel=2), "3 attention heads"),
    (WINDOWED, 2, RING, "sliding_window"),
    (gpt2, 2, ParallelConfig(pipeline_parallel=2), "transformer.wpe.weight"),
    (
        save_tiny_model,
        4,
        ParallelConfig(pipeline_parallel=4),
        "policy.parallel.pipeline_parallel=4",
    ),
    (
        save_tiny_model,
        2,
        ParallelConfig(expert_parallel=2),
        "policy.parallel.expert_parallel=2",
    ),
    (granite, 2, ParallelConfig(expert_parallel=2), "(granitemoe)"),
]


def refusal(path: str, parallel: ParallelConfig) -> str:
    with pytest.raises((ConfigError, UnsupportedModelError)) as error:
        build_engine(path, optimizer=None, parallel=parallel)
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize(("save", "count", "parallel", "named"), REFUSALS)
def test_models_that_ranks_cannot_share_are_refused_by_every_rank(
    ranks: RankPool,
    tmp_path: Path,
    save: Callable[[Path], str],
    count: int,
    parallel: ParallelConfig,
    named: str,
):
    assert all(
        named in text for text in ranks.run(refusal, count, save(tmp_path), parallel)
    )


def waits(path: str, settings: dict[str, Any]) -> set[float]:
    """Timeouts of all groups of an engine, in seconds."""
    engine = build_engine(path, **settings)
    assert engine.checkpointer
    groups = [
        group
        for group in dist.distributed_c10d._world.pg_map
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    ]
    assert len(groups) > 1
    backends = [group._get_backend(CPU) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"context_parallel": 2},
        {"context_parallel": 4, "context_parallel_degree": "auto"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"replicate": 2},
    ],
    ids=str,
)
def test_every_group_has_the_timeout_of_the_whole_world(
    ranks: RankPool, model: str, settings: dict
) -> None:
    count = 4 if "context_parallel_degree" in settings else 2
    timeouts = ranks.run(waits, count, model, settings)
    assert timeouts == [{TIMEOUT_S}] * count
