"""V: token balancing, and M: remove padding, dynamic batch size and data-parallel balance; from a
configuration.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from balancing import Plan, plan_statistics
from balancing.errors import OverCapError
from controller.algorithm.advantages import sequence_advantages
from controller.fit import main
from tests.controller.stand_ins.run import StandInRun
from tests.designs.configured import (
    SMALL,
    compute,
    configuration,
    light_batch,
    micro_batches,
    plan_of,
    up_to,
)
from tests.json_lines import read_lines
from tests.workers.model.ranks import RankPool
from workers.errors import ConfigError

Run = Callable[..., StandInRun]
Calls = list[tuple[str, Plan | None]]
LENGTHS = [100, 900, 50, 950, 400, 600]
ONE_STEP = ("batch.mini_batches=1",)
ONE_RANK = (*SMALL, "policy.data_parallel=1", *ONE_STEP)


def long_tailed(count: int, longest: int = 40) -> list[int]:
    """Lengths of which most are short."""
    draws = np.random.default_rng(0).random(count)
    return (2 + (longest - 2) * draws**3).astype(int).tolist()


def test_v2_m6_every_index_is_computed_once_and_indices_ascend(file: str) -> None:
    config = configuration(
        file, *SMALL, "policy.data_parallel=3", "policy.max_tokens_per_micro_batch=64"
    )
    plan = plan_of(config, long_tailed(50))
    groups = [rows for step in micro_batches(plan) for rows in step]
    assert sorted(row for rows in groups for row in rows) == list(range(50))
    assert all(rows == sorted(rows) for rows in groups)
    counts = {
        tuple(len(part.micro_batches) for part in plan.for_rank(rank).mini_batches)
        for rank in range(3)
    }
    assert len(counts) == 1  # the ranks agree on the split


def test_v5_the_cap_counts_for_a_context_parallel_group(file: str) -> None:
    overrides = (
        *SMALL,
        "policy.data_parallel=1",
        "policy.max_tokens_per_micro_batch=40",
        *ONE_STEP,
    )
    assert len(micro_batches(plan_of(configuration(file, *overrides), [38, 38]))) == 2
    shared = configuration(file, *overrides, "policy.parallel.context_parallel=2")
    assert len(micro_batches(plan_of(shared, [38, 38]))) == 1


def test_v6_the_count_is_the_smallest_that_fits_and_equal_over_ranks(
    ranks: RankPool, file: str
) -> None:
    for cap, steps in ((2000, 2), (1000, 3), (3000, 1)):
        config = configuration(
            file,
            *up_to(max(LENGTHS)),
            "policy.data_parallel=1",
            f"policy.max_tokens_per_micro_batch={cap}",
            *ONE_STEP,
        )
        assert len(micro_batches(plan_of(config, LENGTHS))) == steps
    counts = ("policy.min_micro_batches=3", "balance.count_multiple=4", *ONE_STEP)
    plan = plan_of(
        configuration(file, *SMALL, "policy.data_parallel=2", *counts), long_tailed(24)
    )
    assert [
        len(plan.for_rank(rank).mini_batches[0].micro_batches) for rank in range(2)
    ] == [4, 4]
    # Two stages of two parts each: the first reads every token once, in rows of different lengths.
    how = (
        *ONE_RANK,
        "policy.max_tokens_per_micro_batch=40",
        "model.path=deep",
        "model.share_prefixes=never",
    )
    alone = compute(ranks, file, *how)
    cut = (
        "policy.parallel.pipeline_parallel=2",
        "policy.parallel.virtual_stages=2",
        "balance.order=makespan",
    )
    staged = compute(ranks, file, *how, *cut)
    widths = [len(cells) for cells in staged.cells[0]]
    assert len(widths) % 2 == 0 and len(set(widths)) > 1
    assert sum(widths) == sum(map(len, alone.cells[0]))
    assert staged.cells[1] == []
    for name in ("loss", "grad_norm", "entropy"):
        assert staged.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-9)
    for row, log_probs in alone.log_probs.items():
        np.testing.assert_allclose(staged.log_probs[row], log_probs, atol=1e-6)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(staged.weights[name], weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_v8_heavier_micro_batches_come_first_by_default(file: str, layout: str) -> None:
    lengths, small_ends = [36, 30, 35, 40, 38], "balance.order=small_ends"
    how = (*ONE_RANK, "policy.max_tokens_per_micro_batch=40", f"model.layout={layout}")
    ordered, both_ends = (
        [
            lengths[row]
            for step in micro_batches(plan_of(configuration(file, *how, *order), lengths))
            for row in step[0]
        ]
        for order in ((), (small_ends,))
    )
    assert ordered == [40, 38, 36, 35, 30]
    peak = both_ends.index(40)
    assert 0 < peak < 4 and both_ends[: peak + 1] == sorted(both_ends[: peak + 1])
    assert both_ends[peak:] == sorted(both_ends[peak:], reverse=True)


@pytest.mark.parametrize(
    ("lengths", "cap"),
    [(LENGTHS, 2000), ([512, 1024, 256, 2048, 128, 768, 1536, 384, 896, 640], 4096)],
)
def test_m5_the_worked_examples_end_in_two_equal_micro_batches(
    file: str, lengths: list[int], cap: int
) -> None:
    how = (*ONE_RANK, *up_to(max(lengths)), f"policy.max_tokens_per_micro_batch={cap}")
    config = configuration(file, *how)
    steps = micro_batches(plan_of(config, lengths))
    assert [sum(lengths[row] for row in step[0]) for step in steps] == [
        sum(lengths) // 2
    ] * 2


def test_v7_only_real_lengths_count(file: str) -> None:
    """Caps hold for lengths, whatever the longest possible response is."""
    narrow = configuration(
        file, *SMALL, "policy.data_parallel=2", "policy.max_tokens_per_micro_batch=128"
    )
    wide = configuration(
        file, *up_to(128), "policy.data_parallel=2", "policy.max_tokens_per_micro_batch=128"
    )
    lengths = long_tailed(30)
    assert micro_batches(plan_of(narrow, lengths)) == micro_batches(plan_of(wide, lengths))


def test_v10_micro_steps_are_balanced_over_all_ranks_at_once(file: str) -> None:
    ours, rank_by_rank = (
        plan_of(
            configuration(
                file,
                *SMALL,
                "policy.data_parallel=4",
                "policy.max_tokens_per_micro_batch=64",
                *how,
            ),
            long_tailed(200),
        )
        for how in ((), ("balance.algorithm=verl",))
    )
    assert (
        plan_statistics(ours)["imbalance/micro_steps"]
        < plan_statistics(rank_by_rank)["imbalance/micro_steps"] / 2
    )


def test_v9_m1_results_come_back_in_the_given_order(ranks: RankPool, file: str) -> None:
    """However the batch is cut: caps that give one micro-batch, and one for nearly every sequence."""
    whole = compute(ranks, file, *SMALL, "policy.data_parallel=1", *ONE_STEP)
    cut = compute(
        ranks,
        file,
        *SMALL,
        "policy.data_parallel=2",
        "policy.max_tokens_per_micro_batch=40",
        *ONE_STEP,
    )
    assert len(whole.cells[0]) == 1 < len(cut.cells[0])
    for row, log_probs in whole.log_probs.items():
        np.testing.assert_allclose(cut.log_probs[row], log_probs, atol=1e-6)


def test_m2_a_sample_longer_than_the_cap_is_refused_by_its_place_length_and_cap(
    file: str,
) -> None:
    config = configuration(file, *SMALL, "policy.max_tokens_per_micro_batch=40")
    with pytest.raises(OverCapError, match=r"lengths\[2\] is 41 tokens.*40"):
        plan_of(config, [7, 40, 41, 3])
    for cap in (
        "policy.max_tokens",
        "policy.forward_max_tokens",
        "reference.forward_max_tokens",
    ):
        name = f"{cap}_per_micro_batch"
        # Before the run, a cap that a sample could break.
        with pytest.raises(ConfigError, match=f"{name}=39"):
            configuration(file, *SMALL, "algorithm.loss.kl_coefficient=0.1", f"{name}=39")


def test_m3_caps_are_separate_for_update_log_probs_and_reference(
    run: Run, calls: Calls
) -> None:
    caps = (
        "policy.max_tokens_per_micro_batch=16",
        "policy.forward_max_tokens_per_micro_batch=32",
        "reference.forward_max_tokens_per_micro_batch=64",
    )
    run(*caps, "algorithm.loss.kl_coefficient=0.1", "batch.mini_batches=2", "run.steps=1")
    used = {method: plan.max_tokens for method, plan in calls if plan}
    assert used == {
        "policy.forward_backward": 16,
        "policy.log_probs": 32,
        "reference.log_probs": 64,
    }


def test_m7_the_cap_s_advice_stands_beside_the_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--settings"])
    _, _, text = capsys.readouterr().out.partition("\npolicy.max_tokens_per_micro_batch ")
    assert "twice the longest sequence" in " ".join(text.split()[:30]).lower()


def test_m10_a_step_of_ppo_is_in_order(run: Run, calls: Calls) -> None:
    run(
        "algorithm.advantage=gae",
        "algorithm.gae.whiten=false",
        "algorithm.kl_in_reward.coefficient=0.1",
        "run.steps=1",
    )
    wanted = (
        "policy.log_probs",
        "reference.log_probs",
        "critic.advantages",
        "critic.forward_backward",
    )
    wanted += ("policy.forward_backward",)
    assert [method for method, _ in calls if method in wanted] == list(wanted)


def test_v1_the_plan_is_made_on_the_driver_after_generation_and_before_log_probs(
    run: Run, calls: Calls
) -> None:
    run("batch.mini_batches=2", "run.steps=1")
    methods = [method for method, _ in calls]
    (passed,) = [plan for method, plan in calls if method == "policy.log_probs"]
    assert passed is not None and methods.index("policy.log_probs") < methods.index(
        "policy.forward_backward"
    )


def test_v3_spread_of_tokens_over_ranks_is_logged_before_and_after(
    run: Run, tmp_path: Path
) -> None:
    run("run.steps=1")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    for figure in ("min", "max", "mean", "difference"):
        for when in ("", "_before"):
            assert f"balance/tokens_per_rank{when}/{figure}" in lines[-1]


def test_v4_advantages_go_by_uid_whatever_the_order(file: str) -> None:
    algorithm = configuration(file, "algorithm.advantage=grpo").algorithm
    rewards = np.array([1.0, 0.0, 3.0, 0.0, 1.0, 1.0])
    batch = light_batch([5] * 6).with_columns(group_number=np.array([0, 1, 0, 2, 1, 1]))
    order = np.random.default_rng(0).permutation(6)
    shuffled = sequence_advantages(algorithm, batch.select(order), rewards[order])
    np.testing.assert_array_equal(
        shuffled, sequence_advantages(algorithm, batch, rewards)[order]
    )


def test_m8_mindspeed_s_deal_is_longest_first_into_the_lightest_rank(file: str) -> None:
    config = configuration(
        file, *SMALL, "policy.data_parallel=2", "balance.algorithm=mindspeed_rl", *ONE_STEP
    )
    assert micro_batches(plan_of(config, [10, 4, 3, 3])) == [[[0], [1, 2, 3]]]


def test_m4_caps_on_sequences_are_separate_for_every_pass(run: Run, calls: Calls) -> None:
    run(
        "algorithm.advantage=gae",
        "algorithm.loss.kl_coefficient=0.1",
        "batch.mini_batches=2",
        "run.steps=1",
        "reward.model.path=judge",
        "policy.max_sequences_per_micro_batch=2",
        "policy.forward_max_sequences_per_micro_batch=3",
        "reference.forward_max_sequences_per_micro_batch=4",
        "critic.max_sequences_per_micro_batch=5",
        "critic.forward_max_sequences_per_micro_batch=6",
        "reward.model.max_sequences_per_micro_batch=7",
    )
    used = {method: plan.settings.max_sequences for method, plan in calls if plan}
    assert used == {
        "policy.forward_backward": 2,
        "policy.log_probs": 3,
        "reference.log_probs": 4,
        "critic.forward_backward": 5,
        "critic.advantages": 6,
        "reward_model.score": 7,
    }
