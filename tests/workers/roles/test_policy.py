"""The policy's mean over groups, and REINFORCE++ token by token: what the definitions give, on any ranks and
plan.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from balancing import CostModel, Plan
from controller.algorithm.advantages import estimate
from controller.config import Config
from controller.planning.planner import Planner, draw_mini_batches, with_loss_counts
from tests.controller.stand_ins.gpus import StandInEngine
from tests.controller.stand_ins.run import StandIns, write_stand_in_workspace
from tests.workers.model.losses.test_returns import gae_by_paper
from tests.workers.model.reference import reference_loss
from tests.workers.model.tiny import random_sequences, save_tiny_model, unpacked_log_probs
from tests.workers.roles.test_critic import (
    at_tokens,
    rewards_of,
    scored_sequences,
    share_of_this_rank,
    whitened,
    worker_on_this_rank,
)
from tests.workers.roles.updates import update
from workers.batch.dataproto import DataProto
from workers.batch.metrics import Metrics, merge, results
from workers.batch.remote_batch import RemoteBatch
from workers.config.roles import LossConfig, OptimizerConfig
from workers.model.losses.returns import KlPenalty, discounted_returns
from workers.roles.policy import PolicyWorker

UIDS = np.array(["b", "a", "c", "b", "a", "d", "b", "c", "a", "d", "b"])  # of unequal sizes
GROUPS = np.unique(UIDS, return_inverse=True)[1]
MINI_BATCHES = draw_mini_batches(len(UIDS), 2, seed=3, step=1)
LOSS = LossConfig(aggregation="group_mean_token_mean", clip_high=0.3)
PLANS = [(1, 40, "none"), (2, 34, "load_balance")]  # (ranks, cap, algorithm)
# So small that both mini-batches are computed with the weights of the file, and nothing is clipped.
OPTIMIZER = OptimizerConfig(learning_rate=1e-30, max_grad_norm=1e9)


def sequences() -> DataProto:
    """With what the loss reads."""
    found = random_sequences(len(UIDS))
    return DataProto(
        found.lengths,
        {name: found.tokens[name] for name in ("input_ids", "loss_mask", "old_log_probs")},
        found.columns,
    )


def planned(ranks: int, cap: int, algorithm: str) -> tuple[RemoteBatch, Plan]:
    """The driver's light columns, and its plan."""
    config = Config()
    config.policy.data_parallel, config.balance.algorithm = ranks, algorithm
    config.policy.max_tokens_per_micro_batch = cap
    columns = {
        "group_number": GROUPS,
        "length": sequences().lengths.numpy(),
    }
    columns["response_tokens"] = sequences().loss_token_counts.numpy()
    batch = with_loss_counts(RemoteBatch(columns, {}), MINI_BATCHES)
    return batch, Planner(config, CostModel.tokens()).plan(
        batch, MINI_BATCHES, "policy.update"
    )


def update_on_a_rank(path: str, cap: int, algorithm: str) -> Metrics:
    """This rank's part of one update of two mini-batches."""
    worker = worker_on_this_rank(PolicyWorker, path, 1, OPTIMIZER)
    batch, plan = planned(dist.get_world_size(), cap, algorithm)
    whole = sequences()
    columns = whole.columns | {"group_tokens": torch.from_numpy(batch["group_tokens"])}
    return update(
        worker, DataProto(whole.lengths, whole.tokens, columns), plan, dist.get_rank(), LOSS
    )


@cache
def expected(path: str, aggregation: str) -> tuple[float, float]:
    """(loss, gradient norm), means over mini-batches, in float64 from single unpadded sequences."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    config = replace(LOSS, aggregation=aggregation)
    groups = torch.from_numpy(GROUPS)
    losses, norms = [], []
    for rows in MINI_BATCHES:
        part = random_sequences(len(UIDS)).select_idxs(rows.tolist())
        outputs = unpacked_log_probs(model, part)
        loss, _ = reference_loss(outputs, part, config, groups[rows])
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
    return float(np.mean(losses)), float(np.mean(norms))


@pytest.mark.parametrize(("count", "cap", "algorithm"), PLANS)
def test_the_mean_over_groups_is_its_definition_whatever_the_plan(
    count, cap, algorithm, tmp_path, ranks
) -> None:
    path = save_tiny_model(tmp_path)
    updated = results(merge(ranks.run(update_on_a_rank, count, path, cap, algorithm)))
    loss, norm = expected(path, "group_mean_token_mean")
    assert updated["loss"] == pytest.approx(loss, rel=1e-9)
    assert updated["grad_norm"] == pytest.approx(norm, rel=1e-9)
    # The reference tells them apart.
    assert loss != pytest.approx(expected(path, "token_mean")[0], rel=1e-2)


def test_both_plans_cut_the_mini_batches_and_count_the_same_groups() -> None:
    for ranks, cap, algorithm in PLANS:
        _, plan = planned(ranks, cap, algorithm)
        for part, rows in zip(plan.mini_batches, MINI_BATCHES, strict=True):
            learned = [row for row in rows if sequences().loss_token_counts[row]]
            assert part.groups == len(set(UIDS[learned]))
        assert max(part.steps for part in plan.mini_batches) > 1


PENALTY = KlPenalty(0.1, "k1")


def advantages_on_a_rank(
    path: str,
    cap: int,
    context_parallel: int,
    gamma: float,
    penalty: KlPenalty | None,
    degree: str,
) -> dict[int, Any]:
    """This rank's advantages by row of the global batch."""
    worker = worker_on_this_rank(
        PolicyWorker, path, context_parallel, OptimizerConfig(), degree
    )
    mine, plan = share_of_this_rank(scored_sequences(), cap, context_parallel, degree)
    block, _ = worker.token_advantages(mine, plan, gamma, penalty)
    columns = torch.from_numpy(block.tokens["advantages"]).split(mine.lengths.tolist())
    return dict(zip(plan.rows.tolist(), columns, strict=True))


def by_paper(
    sequences: DataProto, gamma: float, penalty: KlPenalty | None
) -> list[torch.Tensor]:
    """Sum over later tokens of gamma^(k - t) r_k (GAE of values of 0), and the mean and deviation of all of
    them; float64 [L] each.
    """
    differences = (
        sequences.tokens["old_log_probs"] - sequences.tokens["reference_log_probs"]
    )
    kl = differences * (penalty.coefficient if penalty else 0.0)
    returns = [
        gae_by_paper(rewards, [0.0] * len(rewards), gamma, 1.0)
        for rewards in rewards_of(sequences, kl)
    ]
    mask = sequences.tokens["loss_mask"]
    column = whitened(torch.tensor(list(chain(*returns)), dtype=torch.float64))
    return list(at_tokens(mask, column).split(sequences.lengths.tolist()))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("count", "context_parallel", "gamma", "penalty", "cap", "degree"),
    [
        (1, 1, 0.9, None, 48, "fixed"),
        (2, 1, 0.5, PENALTY, 48, "fixed"),
        (2, 2, 1.0, PENALTY, 48, "fixed"),
        (4, 4, 0.9, PENALTY, 16, "auto"),
    ],
)
def test_advantages_are_the_papers_whatever_the_plan(
    count, context_parallel, gamma, penalty, cap, degree, tmp_path, ranks
) -> None:
    path = save_tiny_model(tmp_path)
    parts = ranks.run(
        advantages_on_a_rank, count, path, cap, context_parallel, gamma, penalty, degree
    )
    expected = by_paper(scored_sequences(), gamma, penalty)
    for part in parts:
        for row, advantages in part.items():
            torch.testing.assert_close(
                advantages.double(), expected[row], rtol=1e-5, atol=1e-5
            )
    assert set().union(*parts) == set(range(11))


def test_without_discount_and_kl_they_are_those_of_the_driver() -> None:
    sequences = scored_sequences()
    counts = sequences.loss_token_counts.numpy()
    batch = {
        "reward": sequences.columns["reward"].numpy(),
        "group_number": np.arange(11),
        "tokens": counts,
    }
    expected = np.repeat(estimate("reinforce_plus_plus", batch), counts)
    mask = sequences.tokens["loss_mask"]
    np.testing.assert_allclose(
        torch.cat(by_paper(sequences, 1.0, None))[mask], expected, rtol=1e-4
    )


def test_returns_by_hand() -> None:
    rewards = np.array([0.0, 0.0, 4.0, 1.0, 3.0])
    assert discounted_returns(rewards, np.array([3, 0, 2]), 0.5).tolist() == [
        1.0,
        2.0,
        4.0,
        2.5,
        3.0,
    ]


@pytest.fixture
def learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., np.ndarray]:
    """Advantages [sequences, tokens] that the loss of a run's first step reads; its rewards are 0 and 1 in
    turn.
    """
    write_stand_in_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    read: list[DataProto] = []
    update = StandInEngine.forward_backward

    def watched(engine: StandInEngine, sequences: DataProto, *others: Any) -> Any:
        read.append(sequences)
        return update(engine, sequences, *others)

    monkeypatch.setattr(StandInEngine, "forward_backward", watched)

    def run(*overrides: str) -> np.ndarray:
        StandIns(monkeypatch).run(["policy.data_parallel=1", "run.steps=1", *overrides])
        mask = read[0].tokens["loss_mask"]
        return read[0].tokens["advantages"][mask].numpy().reshape(len(read[0]), -1)

    return run


@pytest.mark.parametrize("baseline", [False, True])
def test_gamma_of_the_settings_discounts_what_the_loss_reads(
    learned_from, baseline: bool
) -> None:
    estimator = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    found = learned_from(f"algorithm.advantage={estimator}", "algorithm.gamma=0.5")
    rewards = np.array([0.0, 1.0, 0.0, 1.0]) - 0.5 * baseline
    returns = rewards[:, None] * np.array([0.25, 0.5, 1.0])
    expected = (returns - returns.mean()) / returns.std()
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(expected, axis=0), rtol=1e-4)
