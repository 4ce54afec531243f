import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing import ContextDegrees, CostModel
from balancing.cost_model import exchange_share
from balancing.pipelines.pipeline import Pipeline
from controller.config import Config, load
from controller.planning.planner import (
    Planner,
    StageTimes,
    counted_costs,
    draw_mini_batches,
    plan_arguments,
    with_loss_counts,
)
from tests.controller.config_workspace import write_workspace
from workers.batch.dataproto import object_column
from workers.batch.placed_images import Image, PlacedImage
from workers.batch.remote_batch import RemoteBatch


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 5))
def test_mini_batches_hold_every_row_once_and_differ_by_at_most_one(
    rows: int, count: int, seed: int
) -> None:
    drawn = draw_mini_batches(rows, count, seed, step=1)
    assert sorted(np.concatenate(drawn).tolist()) == list(range(rows))
    assert len(drawn) == min(rows, count)
    assert np.ptp([len(part) for part in drawn]) <= 1


def test_p10_membership_is_random_and_differs_by_epoch_but_repeats_with_the_seed() -> None:
    first, again, other, epoch = (
        [part.tolist() for part in draw_mini_batches(64, 4, seed, 1, epoch)]
        for seed, epoch in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert first == again
    assert len({tuple(drawn[0]) for drawn in (first, other, epoch, [list(range(16))])}) == 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8))
def test_whole_groups_are_drawn_and_their_numbers_differ_by_at_most_one(
    groups: list[int], count: int
) -> None:
    drawn = draw_mini_batches(len(groups), count, seed=1, step=1, groups=np.array(groups))
    assert sorted(np.concatenate(drawn).tolist()) == list(range(len(groups)))
    members = [len(set(np.array(groups)[part].tolist())) for part in drawn]
    assert sum(members) == len(set(groups))
    assert max(members) - min(members) <= 1


def test_tokens_of_a_group_are_counted_in_each_mini_batch() -> None:
    columns = {
        "group_number": np.array([1, 0, 1, 0, 1]),
        "response_tokens": np.array([1, 2, 3, 4, 5]),
    }
    batch = with_loss_counts(
        RemoteBatch(columns, {}), [np.array([0, 1, 3]), np.array([2, 4])]
    )
    assert batch["group_tokens"].tolist() == [1, 6, 8, 6, 8]


def test_a_plan_knows_the_stages_that_its_micro_batches_pass() -> None:
    """With stages the micro-steps are those of the least makespan; backward takes 3 forward passes with
    checkpoints.
    """
    config = Config()
    assert plan_arguments(config, "policy.update")["pipeline"] is None
    config.policy.parallel.pipeline_parallel, config.policy.parallel.virtual_stages = 4, 2
    config.model.gradient_checkpointing = "full"
    config.policy.max_tokens_per_micro_batch = 64
    batch = RemoteBatch(
        {
            "length": np.arange(20, 52),
            "response_tokens": np.full(32, 5),
        },
        {},
    )
    for of, backward in (("policy.update", 3.0), ("policy.log_probs", 0.0)):
        plan = Planner(config, CostModel.tokens()).forward_plan(batch, of)
        assert plan.settings.pipeline == Pipeline(4, 2, backward)
        measured = StageTimes(overhead=8.0, shares=(0.1, 0.2, 0.3, 0.4))
        plan = Planner(config, CostModel.tokens(), measured).forward_plan(batch, of)
        pipeline = plan.settings.pipeline
        assert pipeline is not None
        assert pipeline.overhead == (8.0 if backward else 2.0)
        assert pipeline.shares == pytest.approx([0.05, 0.1, 0.15, 0.2] * 2)
        assert plan.settings.order == "makespan"
        assert {len(plan.for_rank(0).mini_batches[0].micro_batches) % 4} == {0}


def test_a_plan_may_give_each_micro_step_its_own_degree(tmp_path) -> None:
    """Ranks then count one by one, with the cap of one."""
    config = load(write_workspace(tmp_path), [f"model.path={tmp_path}/model"])
    parallel = config.policy.parallel
    (
        parallel.context_parallel,
        config.policy.data_parallel,
        config.policy.max_tokens_per_micro_batch,
    ) = (
        4,
        2,
        96,
    )
    fixed = plan_arguments(config, "policy.update")
    assert (fixed["ranks"], fixed["max_tokens"], fixed["context_degrees"]) == (
        2,
        4 * 96,
        None,
    )
    parallel.context_parallel_degree, parallel.context_parallel_method = "auto", "ring"
    batch = RemoteBatch(
        {"length": np.array([300, *[40] * 31]), "response_tokens": np.full(32, 5)}, {}
    )
    for of in ("policy.update", "policy.log_probs"):
        plan = Planner(config, counted_costs(config)).forward_plan(batch, of)
        share = exchange_share(config.model_description(), ring=True)
        assert plan.settings.context_degrees == ContextDegrees(4, share, ring=True)
        assert (plan.ranks, plan.max_tokens) == (8, 96)
        degrees = plan.for_rank(0).mini_batches[0].degrees
        assert max(degrees) == 4  # 300 tokens need four ranks
        assert min(degrees) == 1


def test_images_count_towards_work_and_cap_of_an_update_and_more_in_a_pass_without_backward() -> (
    None
):
    config = Config()
    config.policy.max_tokens_per_micro_batch, config.policy.max_patches_per_micro_batch = (
        64,
        80,
    )
    images = object_column(
        [(PlacedImage(Image(row, 20, 20, b""), 1, 10 + row),) for row in range(8)] + [()]
    )
    columns = {"length": np.full(9, 32), "response_tokens": np.full(9, 5), "images": images}
    planner, batch = (
        Planner(config, CostModel(1.0, 0.0, "FLOP", 2.0, 0.1, patches=4.0)),
        RemoteBatch(columns, {}),
    )
    update, forward = (
        planner.forward_plan(batch, of) for of in ("policy.update", "policy.log_probs")
    )
    assert update.workloads.tolist() == pytest.approx(
        [*(32 + 2 * n + 0.1 * n * n for n in range(10, 18)), 32]
    )
    assert forward.workloads.tolist() == pytest.approx(
        [*(32 + 6 * n + 0.3 * n * n for n in range(10, 18)), 32]
    )
    assert update.mini_batches[0].sums(update.computed_patches).max() <= 80
    assert (update.mini_batches[0].steps, forward.mini_batches[0].steps) == (8, 5)
    config.model.train_vision = True
    assert (
        planner.forward_plan(batch, "policy.log_probs").workloads.tolist()
        == update.workloads.tolist()
    )


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(["karmarkar_karp", "none", "verl", "roll", "mindspeed_rl"]),
    st.sampled_from([(1, 1), (3, 1), (3, 2)]),
    st.sampled_from(["policy.update", "policy.log_probs"]),
)
def test_what_is_left_of_a_step_is_planned_however_few_sequences_that_are(
    sequences: int,
    mini_batches: int,
    least: int,
    multiple: int,
    algorithm: str,
    stages: tuple[int, int],
    of: str,
) -> None:
    config = Config()
    (
        config.policy.data_parallel,
        config.policy.max_tokens_per_micro_batch,
        config.balance.algorithm,
    ) = (
        4,
        64,
        algorithm,
    )
    config.policy.min_micro_batches = config.policy.forward_min_micro_batches = least
    config.balance.count_multiple = multiple
    config.policy.parallel.pipeline_parallel, config.policy.parallel.virtual_stages = stages
    columns = {
        "length": np.arange(20, 20 + sequences),
        "response_tokens": np.full(sequences, 9),
    }
    batch = RemoteBatch(columns, {})
    drawn = draw_mini_batches(sequences, mini_batches, seed=1, step=1)
    plan = Planner(config, CostModel.tokens()).plan(batch, drawn, of)
    assert sorted(
        np.concatenate([part.rows for part in plan.mini_batches]).tolist()
    ) == list(range(sequences))
    fewest = min(map(len, drawn))
    assert all(part.steps >= min(least, fewest) for part in plan.mini_batches)
