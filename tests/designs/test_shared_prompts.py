"""Shared prompts, from a configuration: the plan, the rows that ranks compute, and what comes out."""

import numpy as np
import pytest
import torch

from balancing import CostModel, Plan
from controller.config import Config
from controller.planning.planner import Planner
from tests.controller.config_workspace import refusal
from tests.designs.configured import SMALL, compute, configuration, light_batch, up_to
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import RemoteBatch
from workers.engine.prefix_hashes import prefix_hashes
from workers.model.rows.packing import pack
from workers.model.rows.prefix_rows import pack_shared

ULYSSES, TENSOR = (
    ("policy.parallel.context_parallel=2",),
    ("policy.parallel.tensor_parallel=2",),
)
RING = (*ULYSSES, "policy.parallel.context_parallel_method=ring")
# Three prompts with eight responses each.
PROMPTS, RESPONSES = (np.array([100, 30, 2]), np.arange(1, 25))


def batch_of_groups() -> RemoteBatch:
    prompts = np.repeat(PROMPTS, 8)
    batch = light_batch((prompts + RESPONSES).tolist())
    return batch.with_columns(
        group_number=np.repeat(np.arange(3), 8),
        prompt_tokens=prompts,
        prompt_hash=np.repeat([7, -3, 12], 8),
        prefix_hashes=np.array([b""] * len(prompts), dtype=object),
        response_tokens=RESPONSES.copy(),
    )


def planned(config: Config, of: str = "policy.update") -> Plan:
    planner = Planner(config, CostModel.tokens())
    return planner.plan(batch_of_groups(), planner.draw(batch_of_groups(), step=1), of)


@pytest.mark.parametrize("of", ["policy.update", "policy.log_probs"])
def test_a_run_plans_a_prompt_once_in_a_micro_batch(file: str, of: str) -> None:
    """In one micro-batch: 7 times 100 and 30 tokens less; a prompt of 2 tokens is too short."""
    config = configuration(
        file,
        *up_to(130),
        "policy.data_parallel=1",
        "policy.max_tokens_per_micro_batch=700",
        "batch.mini_batches=1",
    )
    plan = planned(config, of)
    assert plan.mini_batches[0].steps == 1
    assert plan.shared is not None
    assert plan.shared.sum() == 7 * (100 + 30)


@pytest.mark.parametrize("of", ["policy.update", "policy.log_probs"])
def test_a_run_plans_once_what_responses_begin_with_alike(file: str, of: str) -> None:
    """Three prompts of 30 tokens with eight responses: 20 tokens of all, 20 more of every second one, a last
    one.
    """
    config = configuration(
        file,
        *up_to(130),
        "policy.data_parallel=1",
        "policy.max_tokens_per_micro_batch=500",
        "batch.mini_batches=1",
    )
    ids = [
        np.array(
            [group] * 30 + [7] * 20 + [8] * 20 * (sample % 2) + [100 + sample], np.int32
        )
        for group in range(3)
        for sample in range(8)
    ]
    batch = light_batch([len(each) for each in ids]).with_columns(
        prompt_tokens=np.full(24, 30),
        prompt_hash=np.repeat([7, -3, 12], 8),
        prefix_hashes=np.array([prefix_hashes(each, 30) for each in ids], dtype=object),
    )
    plan = Planner(config, CostModel.tokens()).forward_plan(batch, of)
    # A row may share as many fewer of what follows a prompt.
    less = config.model.min_shared_tokens - 1
    assert plan.mini_batches[0].steps == 1
    assert plan.shared is not None
    assert plan.shared.sum() == 3 * (3 * (70 - less) + 4 * (50 - less))


@pytest.mark.parametrize(
    "overrides", [("model.share_prefixes=never",), ("model.layout=padded",)]
)
def test_a_run_that_cannot_share_plans_every_prompt(
    file: str, overrides: tuple[str, ...]
) -> None:
    config = configuration(
        file, *up_to(130), "policy.max_tokens_per_micro_batch=700", *overrides
    )
    assert planned(config).shared is None


@pytest.mark.parametrize("max_tokens", [132, 150, 333])
@pytest.mark.parametrize("shared", [ULYSSES, RING, (*ULYSSES, *TENSOR), TENSOR])
def test_the_cap_of_ranks_that_share_a_row_holds_and_their_plan_counts_a_prompt_once(
    file: str, shared: tuple[str, ...], max_tokens: int
) -> None:
    """The cap is that of the row with its padding, whether its sequences share anything or are padded one by
    one.
    """
    common = (
        *up_to(130),
        "policy.data_parallel=1",
        "batch.mini_batches=1",
        f"policy.max_tokens_per_micro_batch={max_tokens}",
    )
    config = configuration(file, *common, *shared)
    plan = planned(config)
    assert plan.shared is not None
    assert plan.shared.sum() > 0
    fewest = config.model.min_shared_tokens
    for rows in (
        rows
        for part in plan.mini_batches
        for step in part.micro_steps
        for rows in step.ranks
    ):
        micro_batch = sequences_of_groups(rows)
        row = pack_shared(micro_batch, plan.length_multiple, fewest)
        row = row if row.shares else pack(micro_batch, plan.length_multiple)
        assert row.input_ids.shape[1] <= plan.max_tokens
        assert sum(row.lengths) <= plan.computed_lengths[rows].sum()


def sequences_of_groups(rows: np.ndarray) -> DataProto:
    """Of `batch_of_groups()`; prompts are distinct, and so are responses from their first token on."""
    lengths = (np.repeat(PROMPTS, 8) + RESPONSES)[rows]
    ids = [
        torch.full((length,), 1000 + int(row) // 8)
        for row, length in zip(rows, lengths, strict=True)
    ]
    for row, each in zip(rows, ids, strict=True):
        each[PROMPTS[row // 8] :] = int(row)
    return DataProto.from_list(
        [{"input_ids": each, "loss_mask": torch.arange(len(each)) > 0} for each in ids]
    )


def test_whole_groups_are_drawn_into_mini_batches(file: str) -> None:
    overrides = (
        *up_to(130),
        "policy.max_tokens_per_micro_batch=700",
        "batch.mini_batches=3",
    )
    by_group = planned(configuration(file, *overrides, "batch.split_by=group"))
    assert sorted(sorted(part.rows.tolist()) for part in by_group.mini_batches) == [
        list(range(start, start + 8)) for start in (0, 8, 16)
    ]
    by_sequence = planned(configuration(file, *overrides))
    assert any(len(set((part.rows // 8).tolist())) > 1 for part in by_sequence.mini_batches)


def test_sharing_changes_nothing_but_the_cells_that_are_computed(
    ranks: RankPool, file: str
) -> None:
    sequences = random_sequences(branching=True)
    common = (
        *SMALL,
        "policy.max_tokens_per_micro_batch=200",
        "batch.mini_batches=1",
        "policy.data_parallel=1",
        *RING,
    )
    alone = compute(ranks, file, *common, "model.share_prefixes=never", sequences=sequences)
    shared = compute(
        ranks,
        file,
        *common,
        "model.share_prefixes=always",
        "model.min_shared_tokens=1",
        sequences=sequences,
    )
    assert shared.metrics == pytest.approx(alone.metrics, rel=1e-6)
    assert shared.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-9)
    for row, log_probs in alone.log_probs.items():
        np.testing.assert_allclose(shared.log_probs[row], log_probs, rtol=0, atol=1e-6)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(shared.weights[name], weight, rtol=1e-4, atol=1e-6)
    assert sum(map(len, shared.cells[0])) < sum(map(len, alone.cells[0]))


def test_sharing_that_must_be_and_cannot_is_refused(file: str) -> None:
    assert "model.layout=packed" in refusal(
        "model.share_prefixes=always", "model.layout=padded"
    )


def test_settings_without_effect_are_refused(file: str) -> None:
    assert "model.min_shared_tokens" in refusal(
        "model.share_prefixes=never", "model.min_shared_tokens=8"
    )
    assert "batch.split_by" in refusal("batch.split_by=group", "batch.mini_batches=1")
