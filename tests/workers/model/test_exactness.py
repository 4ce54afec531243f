"""The promise of the engine: how a mini-batch is cut, laid out and spread over ranks changes nothing beyond
rounding.

Only here do all kinds of meshes meet. Every case learns what transformers' own forward pass does, one unpadded
sequence at a time, in float64: under plans in shuffled order with empty micro-batches, on every kind of mesh.
Cases of one mesh share a group of ranks.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from controller.actors.launch import worker_arguments
from controller.config import load
from tests.controller.config_workspace import write_workspace
from tests.workers.model import cpu_engine, tiny
from tests.workers.model.cases import Case, Way, random_plan, way
from tests.workers.model.cpu_engine import backward, weights
from tests.workers.model.exact import (
    CountedCalls,
    assert_gradients,
    build_engine,
    check,
    learn,
    whole_gradients,
)
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.reference import reference_outcome
from tests.workers.model.tiny import (
    TEACHERS_VOCABULARY,
    random_sequences,
    relative_error,
    reward_model,
    save_tiny_model,
    teacher_of,
)
from workers.batch.metrics import Metrics, merge, results
from workers.config.roles import LossConfig, ParallelConfig
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss


def qwen3(**settings: Any) -> Case:
    """Untied, with norms of queries and keys, at a temperature."""
    settings = {
        "tied": False,
        "temperature": 0.7,
        "aggregation": "sequence_mean_token_mean",
    } | settings
    return Case("qwen3", **settings)


def moe(family: str = "qwen3_moe", **settings: Any) -> Case:
    return Case(family, **{"tied": False} | settings)


def selecting(family: str, **settings: Any) -> Case:
    """Attention to selected tokens, in dense layers."""
    return Case(family, tied=False, sizes=(("first_k_dense_replace", 2),), **settings)


def with_states(family: str, **settings: Any) -> Case:
    return Case(family, tied=False, **settings)


def adapted(**settings: Any) -> Case:
    """Rank 3 over 2 and 4 ranks: shards of unequal size, and on the last of 4 none."""
    return Case(lora=(("rank", 3), ("alpha", 6.0)), **settings)


def critic(**settings: Any) -> Case:
    return Case(head="value", tied=False, **settings)


def scored(loss: str, **settings: Any) -> Case:
    return critic(scored=loss, **settings)


PLAIN = Case()
PADDED = Case(layout="padded", length_multiple=8, aggregation="sequence_mean_token_sum")
FLOAT32 = Case(dtype="float32", reshard_after_forward=False)
GATHERED = Case(reshard_after_forward=False, aggregation="sequence_mean_token_mean")
CHECKPOINTED = Case(
    "llama", aggregation="sequence_mean_token_sum", gradient_checkpointing="full"
)
# The others are selective.
MIXED: dict[str, Any] = {"gradient_checkpointing": "full", "recompute_num_layers": 1}
OFFLOADED = Case(
    "mistral", tied=False, activation_offload=True, optimizer_offload=True, **MIXED
)
SHARED = Case(share_prefixes="always", shared_by="level")
SHARED_IN_CALLS = replace(SHARED, calls=3)
BY_PATH = Case(
    share_prefixes="always", shared_by="path", aggregation="sequence_mean_token_sum_norm"
)
BY_GROUP = Case(share_prefixes="always", aggregation="group_mean_token_mean")
SHARED_CHECKPOINTED = Case(
    "llama", gradient_checkpointing="selective", share_prefixes="always", shared_by="level"
)
WITH_STATES = [with_states(family) for family in tiny.WITH_STATES]
STATES_SHARED = [
    with_states(family, share_prefixes="always") for family in tiny.WITH_STATES
]
DEEP = Case(layers=5)
BOTH = (0.5, 0.1)  # losses of routers
REPLAYED_CHECKPOINTED = moe(
    tied=True, router_replay="replay", layers=4, router_losses=BOTH, **MIXED
)
REPLAYED_SHARED = moe(share_prefixes="always", router_replay="replay")
BALANCED_SHARED = moe(share_prefixes="always", layers=4, router_losses=BOTH)

TWO_BLOCKS = (("hidden_size", 128), ("intermediate_size", 128), ("head_dim", 32))
"""Of rows that are two blocks of `model.base_dtype` or more, one for each of two ranks."""

# Each pair of a mesh's dimension and a setting of the model that could meet in the code meets in one case.
CASES: dict[str, list[Case]] = {
    "dp 1": [
        Case(),
        PADDED,
        Case(forward_layout="padded"),
        SHARED_IN_CALLS,
        critic(share_prefixes="always"),
        critic(layout="padded"),
        REPLAYED_CHECKPOINTED,
        moe(layout="padded", router_losses=(0.5, 0.0)),
        REPLAYED_SHARED,
        BALANCED_SHARED,
        Case(distillation=("token", "reverse_kl"), hidden_states=True),
        qwen3(share_prefixes="always", distillation=("vocabulary", "forward_kl")),
        scored("pairs", share_prefixes="always"),
        scored("process", share_prefixes="always"),
        scored("regression", layout="padded"),
        *WITH_STATES,
        *STATES_SHARED,
        with_states("kimi_linear", gradient_checkpointing="full"),
    ],
    "dp 2": [
        Case(distillation=("top_k", "jsd")),
        FLOAT32,
        qwen3(),
        BY_PATH,
        BY_GROUP,
        moe(share_prefixes="always"),
        critic(),
        adapted(),
        scored("process"),
        selecting("glm_moe_dsa", gradient_checkpointing="selective"),
        selecting("deepseek_v32", lora=(("rank", 2), ("target_modules", "q_b_proj"))),
    ],
    "dp 4": [
        PADDED,
        SHARED_IN_CALLS,
        adapted(base_dtype="nf4", reshard_after_forward=False),
    ],
    "dp 4, copies 2": [GATHERED, SHARED],
    "dp 4, copies 2, deferred": [replace(GATHERED, calls=2)],
    "dp 2, deferred": [Case()],
    "ulysses 2": [
        PADDED,
        Case("mistral windowed"),
        moe("gpt_oss"),
        BY_GROUP,
        critic(),
        scored("process"),
    ],
    "ulysses 2, states": [
        *WITH_STATES,
        *STATES_SHARED,
        with_states("qwen3_5", layout="padded"),
    ],
    # More than key-value heads.
    "ulysses 4": [with_states("nemotron_h"), Case(calls=2), qwen3(share_prefixes="always")],
    "ring 2": [
        Case(
            distillation=("vocabulary", "reverse_kl"),
            share_prefixes="always",
            hidden_states=True,
        ),
        PADDED,
        GATHERED,
        SHARED,
        moe(router_replay="replay"),
        critic(),
        adapted(base_dtype="int8", gradient_checkpointing="full"),
        scored("pairs", share_prefixes="always"),
    ],
    "ring 2, states": [*WITH_STATES, *STATES_SHARED],
    "ring 4": [qwen3(calls=2), BY_PATH],
    "ulysses 4, by step, states": [
        with_states("qwen3_5", share_prefixes="always", gradient_checkpointing="full"),
        with_states("nemotron_h", share_prefixes="always"),
        with_states("lfm2"),
    ],
    "ulysses 4, by step": [
        Case(distillation=("top_k", "jsd")),
        SHARED,
        critic(share_prefixes="always"),
        scored("process"),
        Case("mistral windowed"),
        moe(router_replay="replay"),
    ],
    "ring 4, by step": [qwen3(), BY_PATH, critic(), CHECKPOINTED],
    "dp 2, ulysses 2, by step": [SHARED_CHECKPOINTED, GATHERED],
    "copies 2, ring 2, by step": [CHECKPOINTED, SHARED],
    "ulysses 2, tp 2, by step": [qwen3(share_prefixes="always")],
    "ring 2, tp 2, by step": [qwen3(share_prefixes="always")],
    "dp 2, ring 2, ep 4, by step": [moe(share_prefixes="always")],
    "dp 2, ulysses 4, by step": [SHARED, adapted()],
    "dp 2, ulysses 2": [GATHERED, SHARED_CHECKPOINTED],
    "copies 2, ring 2": [CHECKPOINTED, SHARED_CHECKPOINTED],
    "copies 2, ring 2, deferred": [CHECKPOINTED],
    "tp 2": [
        adapted(),
        adapted(base_dtype="int8", sizes=TWO_BLOCKS),
        Case(distillation=("vocabulary", "jsd"), hidden_states=True),
        Case(distillation=("top_k", "forward_kl")),
        PADDED,
        SHARED_IN_CALLS,
        moe(tied=True, **MIXED),
    ],
    "tp 2, states": [
        *[
            with_states(family)
            for family in ("qwen3_5", "qwen3_next", "nemotron_h", "lfm2")
        ],
        with_states("qwen3_5", share_prefixes="always"),
        with_states("nemotron_h", share_prefixes="always"),
    ],
    "ulysses 2, tp 2, states": [with_states("qwen3_5", gradient_checkpointing="full")],
    "ring 2, tp 2, by step, states": [
        with_states("nemotron_h", share_prefixes="always"),
        with_states("lfm2"),
    ],
    "pp 2, dp 2, tp 2, states": [with_states("qwen3_next")],
    "dp 2, tp 2": [
        CHECKPOINTED,
        SHARED_CHECKPOINTED,
        adapted(family="qwen3", layout="padded", base_dtype="nf4", sizes=TWO_BLOCKS),
    ],
    "copies 2, tp 2, deferred": [Case()],
    "ulysses 2, tp 2": [qwen3(share_prefixes="always"), OFFLOADED],
    "ring 2, tp 2": [
        FLOAT32,
        Case(layout="padded", forward_layout="packed"),
        qwen3(share_prefixes="always"),
    ],
    "pp 2": [
        Case(distillation=("vocabulary", "forward_kl")),
        Case(distillation=("top_k", "reverse_kl")),
        Case(hidden_states=True, layers=3),
        PADDED,
        OFFLOADED,
        critic(layers=3),
        adapted(layers=3, gradient_checkpointing="selective", base_dtype="nf4"),
        scored("regression", layers=3),
        selecting("deepseek_v32"),
    ],
    "pp 2, states": [*WITH_STATES, with_states("qwen3_5", gradient_checkpointing="full")],
    "pp 4": [replace(DEEP, calls=2), qwen3(layers=8)],
    "pp 2, dp 2": [moe(reshard_after_forward=False, share_prefixes="always", layers=3)],
    "pp 2, copies 2": [PADDED, CHECKPOINTED],
    "pp 2, copies 2, deferred": [DEEP],
    "pp 2, ulysses 2": [SHARED, DEEP],
    "pp 2, ring 2": [qwen3(layers=8)],
    "pp 2, tp 2": [DEEP, qwen3(layers=8)],
    "pp 2, virtual 2, deferred": [DEEP],
    "pp 4, virtual 2": [qwen3(layers=8)],
    "pp 2, virtual 2, copies 2": [DEEP],
    "pp 2, virtual 2, ring 2": [DEEP],
    "dp 2, ep 2": [
        moe("mixtral"),
        moe(share_prefixes="always"),
        moe(router_losses=(0.0, 0.1)),
        moe("gpt_oss", router_losses=BOTH, gradient_checkpointing="selective"),
        moe(lora=(("rank", 2), ("target_modules", "q_proj,v_proj")), base_dtype="int8"),
    ],
    "dp 2, ep 2, deferred": [moe()],
    "dp 4, ep 4": [moe("qwen2_moe")],
    "dp 4, ep 2": [
        moe(router_replay="compare", router_losses=BOTH),
        moe(sizes=(("num_experts", 6),)),  # three experts of a rank do not divide over two
        moe(tied=True, dtype="float32", aggregation="sequence_mean_token_mean"),
        moe(tied=True, activation_offload=True, optimizer_offload=True, **MIXED),
        moe(tied=True, reshard_after_forward=False, layout="padded"),
    ],
    "dp 4, copies 2, ep 2": [moe("gpt_oss"), moe(router_losses=BOTH)],
    "ulysses 2, ep 2": [moe("olmoe"), moe(router_losses=BOTH)],
    "dp 2, ring 2, ep 4": [REPLAYED_SHARED, BALANCED_SHARED],
    "dp 2, ring 2, ep 2": [moe(router_replay="replay", router_losses=BOTH)],
    "tp 2, ep 2": [
        moe(sizes=(("mlp_only_layers", (0,)),)),
        moe(lora=(("rank", 2), ("target_modules", "q_proj,o_proj"))),
    ],
    "dp 2, tp 2, ep 4": [moe()],
    "dp 2, tp 2, ep 2": [moe(router_replay="replay", router_losses=BOTH)],
    "copies 2, tp 2, ep 2": [moe()],
    "ulysses 2, tp 2, ep 4": [moe()],
    "ring 2, tp 2, ep 2": [moe(router_losses=BOTH)],
    "pp 2, dp 2, ep 2": [moe(layers=4)],
    "pp 2, virtual 2, dp 2, ep 2": [REPLAYED_CHECKPOINTED],
    "pp 2, tp 2, ep 2": [BALANCED_SHARED],
    "pp 2, ulysses 2, ep 2": [BALANCED_SHARED],
    "pp 2, dp 4, ep 4": [moe(layers=4)],
    "pp 4, dp 2, ep 2": [moe(layers=4)],
    "pp 2, dp 2, tp 2, ep 4": [moe(layers=4)],
}


def compiled(case: Case = PLAIN, **settings: Any) -> Case:
    return replace(case, compiled=True, **settings)


ALWAYS = (
    "dp 1",
    "ulysses 4",
    "copies 2, ring 2, deferred",
    "pp 2, virtual 2, ring 2",
    "dp 2, tp 2, ep 2",
)
"""Ways that are tried in every run of the tests: each dimension of a mesh in its cheapest case. Others are
drawn.
"""
COMPILED: dict[str, list[Case]] = {
    "dp 1": [compiled(REPLAYED_CHECKPOINTED)],
    "pp 2, virtual 2, dp 2, ep 2": [compiled(REPLAYED_CHECKPOINTED)],
    "dp 2, ep 2": [
        compiled(moe("gpt_oss", router_losses=BOTH)),
        compiled(moe("qwen2_moe")),
    ],
    "ulysses 2": [compiled(PADDED), compiled(Case("mistral windowed"))],
    "ring 2": [compiled(GATHERED), compiled(SHARED)],
    "pp 2": [
        compiled(OFFLOADED),
        compiled(adapted(layers=3, base_dtype="nf4")),
        compiled(critic(layers=3)),
    ],
}


def changed_settings(text: str) -> set[str]:
    parallel = vars(way(text).parallel)
    return {
        name for name, value in parallel.items() if value != getattr(ParallelConfig(), name)
    }


def test_every_run_tries_each_dimension_of_a_mesh() -> None:
    """Degrees by micro-step alone are drawn: their ways are those of fixed degrees otherwise."""
    tried = set().union(*map(changed_settings, ALWAYS))
    assert set().union(*map(changed_settings, CASES)) - tried == {"context_parallel_degree"}
    meshes = [way(text).parallel for text in ALWAYS]
    methods = {mesh.context_parallel_method for mesh in meshes if mesh.context_parallel > 1}
    assert methods == {"ulysses", "ring"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(folder: Path, case: Case = PLAIN) -> str:
    path = folder / str(abs(hash(case.model)))
    if not path.exists():
        settings: dict[str, Any] = {
            "tie_word_embeddings": case.tied,
            "num_hidden_layers": case.layers,
        }
        settings |= {
            name: list(size) if isinstance(size, tuple) else size
            for name, size in case.sizes
        }
        save_tiny_model(path, case.family, **settings)
        if case.head == "value":
            reward_model(num_hidden_layers=case.layers).save_pretrained(path)
    if case.distillation[0] and not Path(teacher_of(str(path))).exists():
        sizes = {
            "hidden_size": 24,
            "vocab_size": TEACHERS_VOCABULARY,
            "num_hidden_layers": case.layers,
        }
        save_tiny_model(Path(teacher_of(str(path))), case.family, **sizes)
    return str(path)


@pytest.mark.drawn(2, always=ALWAYS)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=pytest.mark.slow if way(text).ranks > 4 else ())
        for text in CASES
    ],
)
def test_p7_c1_ranks_learn_what_one_unpadded_sequence_at_a_time_does(
    ranks: RankPool, folder, text
):
    check(ranks, text, CASES[text], [model(folder, case) for case in CASES[text]])


@pytest.mark.slow
@pytest.mark.parametrize("text", COMPILED)
def test_compiled_layers_change_nothing(ranks: RankPool, folder, text):
    check(ranks, text, COMPILED[text], [model(folder, case) for case in COMPILED[text]])


def gradients_of_plans(
    case: Case, path: str, way: Way, seeds: range
) -> list[dict[str, Tensor]]:
    engine, found = build_engine(case, path, way.parallel), []
    for seed in seeds:
        learn(engine, case, way, seed)
        found.append(whole_gradients(engine))
        engine.module.zero_grad()
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", [PLAIN, SHARED], ids=["plain", "shared"])
@pytest.mark.parametrize(
    "text",
    ["dp 1", "dp 4", "dp 2, ulysses 2", "ring 2", "ulysses 4, by step", "ring 4, by step"],
)
def test_p7_random_plans_change_nothing(ranks: RankPool, folder, text, case):
    path, on_ranks = model(folder, case), way(text)
    for gradients in ranks.run(
        gradients_of_plans, on_ranks.ranks, case, path, on_ranks, range(6)
    )[0]:
        assert_gradients(gradients, reference_outcome(case, path), case.tolerance)


def collectives(path: str, parallel: ParallelConfig) -> dict[str, int]:
    engine = cpu_engine.build_engine(path, dtype="float32", parallel=parallel)
    sequences = random_sequences(dtype=torch.float32)
    steps = [(0, 5), (5, 5), (5, 8), (8, 11)]
    with CountedCalls() as calls:
        backward(engine, sequences, steps)
    return dict(calls.counts)


@pytest.mark.parametrize(
    ("overrides", "scatters", "sums"),
    [
        ((), 4, 0),
        (("policy.parallel.replicate=2",), 4, 1),
        (("policy.parallel.defer_gradient_reduction=true",), 1, 0),
        (
            (
                "policy.parallel.replicate=2",
                "policy.parallel.defer_gradient_reduction=true",
            ),
            1,
            1,
        ),
    ],
)
def test_a_configuration_says_when_gradients_are_reduced(
    ranks: RankPool, folder, tmp_path, overrides: tuple[str, ...], scatters: int, sums: int
):
    """By default in each of four micro-steps, and between copies of the model in the last."""
    config = load(
        write_workspace(tmp_path),
        ("policy.data_parallel=4", "model.share_prefixes=never", *overrides),
    )
    parallel = worker_arguments(config, "policy")["parallel"]
    units = 3  # two layers and the root
    for counts in ranks.run(collectives, 4, model(folder), parallel):
        assert counts["c10d._reduce_scatter_base_.default"] == scatters * units
        assert counts.get("c10d.allreduce_.default", 0) == sums * units


def step_with_nan(path: str, way: Way) -> tuple[Metrics, bool]:
    engine = build_engine(PLAIN, path, way.parallel)
    before = weights(engine)
    share = random_plan(way.dp, seed=0)[dp_rank(engine.parallel)]
    sequences = random_sequences().select_idxs(share.rows)
    if dp_rank(engine.parallel) == way.dp - 1:
        sequences.columns["advantages"].fill_(torch.nan)
    denominators = Denominators.of(random_sequences())
    engine.forward_backward(
        sequences, share.micro_batches, make_policy_loss(LossConfig()), denominators
    )
    metrics = engine.optimizer_step()
    if not engine.parallel.leads_dp_group:
        metrics = {}
    return metrics, all(
        torch.equal(weight, before[name]) for name, weight in engine.named_weights()
    )


@pytest.mark.parametrize("text", ["dp 2, ulysses 2", "pp 2, dp 2"])
def test_nan_on_one_rank_makes_all_skip_the_step_which_counts_once(
    ranks: RankPool, folder, text
):
    parts = ranks.run(step_with_nan, way(text).ranks, model(folder), way(text))
    assert all(unchanged for _, unchanged in parts)
    metrics = results(merge(metrics for metrics, _ in parts))
    assert metrics["skipped_steps"] == 1
    assert "grad_norm" not in metrics


def train_and_save(case: Case, path: str, way: Way, checkpoint: str) -> dict[str, Tensor]:
    engine = build_engine(case, path, way.parallel)
    learn(engine, case, way, seed=0)
    engine.optimizer_step()
    engine.save_checkpoint(checkpoint, step=1)
    engine.wait_for_checkpoint()
    return weights_after_a_step(engine, case, way)


def load_and_train(case: Case, path: str, way: Way, checkpoint: str) -> dict[str, Tensor]:
    engine = build_engine(case, path, way.parallel)
    engine.load_checkpoint(checkpoint)
    return weights_after_a_step(engine, case, way)


def weights_after_a_step(engine: TrainingEngine, case: Case, way: Way) -> dict[str, Tensor]:
    learn(engine, case, way, seed=2)
    engine.optimizer_step()
    return weights(engine)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        (PLAIN, "dp 2, tp 2", "ring 2"),
        (PLAIN, "copies 2, ring 2", "tp 2"),
        (PLAIN, "pp 2, tp 2", "pp 2, ulysses 2"),
        (PLAIN, "dp 2", "pp 2"),
        (PLAIN, "pp 2, dp 2", "dp 1"),
        (moe(), "dp 1", "dp 4, ep 2"),
        (moe(), "dp 2, tp 2, ep 2", "dp 1"),
        (adapted(), "dp 2, tp 2", "dp 1"),
    ],
)
def test_training_continues_from_a_checkpoint_under_another_sharding(
    ranks: RankPool, folder, tmp_path, case, before, after
):
    checkpoint, path = str(tmp_path / "checkpoint"), model(folder, case)
    expected = ranks.run(
        train_and_save, way(before).ranks, case, path, way(before), checkpoint
    )[0]
    for result in ranks.run(
        load_and_train, way(after).ranks, case, path, way(after), checkpoint
    ):
        for name, weight in expected.items():
            assert relative_error(result[name], weight) < 1e-6, name
