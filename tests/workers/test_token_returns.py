"""REINFORCE++ token by token: against plain sums, on any ranks, and from a run's settings to what the loss reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from controller.algorithm.advantages import estimate
from tests.controller.stand_ins.gpus import StandInEngine
from tests.controller.stand_ins.run import StandIns, write_stand_in_workspace
from tests.workers.model.tiny import save_tiny_model
from tests.workers.roles.test_critic import plan_of_this_rank, scored_sequences, worker_on_this_rank
from workers.config import OptimizerConfig
from workers.dataproto import DataProto
from workers.model.losses.returns import KlPenalty, discounted_returns
from workers.roles.policy import PolicyWorker

PENALTY = KlPenalty(0.1, "k1")


def on_a_rank(path: str, cap: int, context_parallel: int, gamma: float, penalty: KlPenalty | None) -> dict[int, Any]:
    """This rank's advantages by row of the global batch."""
    worker = worker_on_this_rank(PolicyWorker, path, context_parallel, OptimizerConfig())
    sequences = scored_sequences()
    plan = plan_of_this_rank(sequences, cap, context_parallel)
    mine = sequences.select_idxs(plan.rows.tolist())
    block, _ = worker.token_advantages(mine, plan, gamma, penalty)
    columns = torch.from_numpy(block.tokens["advantages"]).split(mine.lengths.tolist())
    return dict(zip(plan.rows.tolist(), columns, strict=True))


def by_paper(sequences: DataProto, gamma: float, penalty: KlPenalty | None) -> list[torch.Tensor]:
    """Sum over later tokens of gamma^(k - t) r_k, and the mean and deviation of all of them; float64 [L] each."""
    rows = []
    for index in range(len(sequences)):
        part = sequences.slice(index, index + 1)
        mask, difference = part.tokens["loss_mask"], part.tokens["old_log_probs"] - part.tokens["reference_log_probs"]
        rewards = [-penalty.coefficient * float(kl) if penalty else 0.0 for kl in difference[mask]]
        if rewards:
            rewards[-1] += float(part.columns["reward"])
        later = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
        rows.append(torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, torch.tensor(later).double()))
    mask = sequences.tokens["loss_mask"]
    returns = torch.cat(rows)[mask]
    whitened = (returns - returns.mean()) / returns.std(correction=0)
    return list(torch.zeros(len(mask)).double().masked_scatter(mask, whitened).split(sequences.lengths.tolist()))


@pytest.mark.parametrize(
    ("count", "context_parallel", "gamma", "penalty"), [(1, 1, 0.9, None), (2, 1, 0.5, PENALTY), (2, 2, 1.0, PENALTY)]
)
def test_advantages_are_the_papers_whatever_the_plan(count, context_parallel, gamma, penalty, tmp_path, ranks) -> None:
    path = save_tiny_model(tmp_path)
    parts = ranks.run(on_a_rank, count, path, 48, context_parallel, gamma, penalty)
    expected = by_paper(scored_sequences(), gamma, penalty)
    for part in parts:
        for row, advantages in part.items():
            torch.testing.assert_close(advantages.double(), expected[row], rtol=1e-5, atol=1e-5)
    assert set().union(*parts) == set(range(11))


def test_without_discount_and_kl_they_are_those_of_the_driver() -> None:
    sequences = scored_sequences()
    counts = sequences.loss_token_counts.numpy()
    batch = {"reward": sequences.columns["reward"].numpy(), "group_number": np.arange(11), "tokens": counts}
    expected = np.repeat(estimate("reinforce_plus_plus", batch), counts)
    mask = sequences.tokens["loss_mask"]
    np.testing.assert_allclose(torch.cat(by_paper(sequences, 1.0, None))[mask], expected, rtol=1e-4)


def test_returns_by_hand() -> None:
    rewards = np.array([0.0, 0.0, 4.0, 1.0, 3.0])
    assert discounted_returns(rewards, np.array([3, 0, 2]), 0.5).tolist() == [1.0, 2.0, 4.0, 2.5, 3.0]


@pytest.fixture
def learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., np.ndarray]:
    """Advantages [sequences, tokens] that the loss of a run's first step reads; its rewards are 0 and 1 in turn."""
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
def test_gamma_of_the_settings_discounts_what_the_loss_reads(learned_from, baseline: bool) -> None:
    estimator = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    found = learned_from(f"algorithm.advantage={estimator}", "algorithm.gamma=0.5")
    rewards = np.array([0.0, 1.0, 0.0, 1.0]) - 0.5 * baseline
    returns = rewards[:, None] * np.array([0.25, 0.5, 1.0])
    expected = (returns - returns.mean()) / returns.std()
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(expected, axis=0), rtol=1e-4)
