"""The critic's advantages, against its model run on single sequences and the paper's sum, on any ranks and
plan.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from balancing import ContextDegrees, RankPlan, plan_batch
from tests.workers.model.losses.test_returns import gae_by_paper
from tests.workers.model.tiny import (
    random_sequences,
    reward_model,
    save_tiny_model,
    unpacked_values,
)
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.batch.dispatch import RankCoordinates
from workers.batch.metrics import Metrics, merge, results
from workers.config.roles import (
    GaeConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ValueLossConfig,
)
from workers.model.losses import explained_variance
from workers.model.losses.returns import KlPenalty
from workers.roles.critic import CriticWorker
from workers.roles.model_worker import TrainedWorker

TrainedWorkerClass = TypeVar("TrainedWorkerClass", bound=TrainedWorker)
GAE = GaeConfig(gamma=0.9, lam=0.8)
PENALTY = KlPenalty(0.1, "k3")
Columns = dict[str, dict[int, torch.Tensor]]  # name -> row of the global batch -> [L]


def scored_sequences() -> DataProto:
    sequences = random_sequences()
    return DataProto(
        sequences.lengths,
        {
            name: sequences.tokens[name]
            for name in ("input_ids", "loss_mask", "old_log_probs", "reference_log_probs")
        },
        {"reward": torch.linspace(-1, 2, len(sequences), dtype=torch.float64)},
    )


def worker_on_this_rank(
    worker_class: type[TrainedWorkerClass],
    path: str,
    context_parallel: int,
    optimizer: OptimizerConfig,
    degree: str = "fixed",
) -> TrainedWorkerClass:
    """A worker of this rank of the process group, built in float64."""
    rank = dist.get_rank()
    worker = worker_class(
        "learner",
        RankCoordinates(
            index=rank, dp=rank // context_parallel, cp=rank % context_parallel
        ),
        dist.get_world_size(),
        model=ModelConfig(path=path, dtype="float64"),
        device="cpu",
        temperature=1.0,
        threads=1,
        parallel=ParallelConfig(
            context_parallel=context_parallel, context_parallel_degree=degree
        ),
        optimizer=optimizer,
        total_steps=1,
    )
    worker.build()
    return worker


def share_of_this_rank(
    sequences: DataProto, cap: int, context_parallel: int, degree: str = "fixed"
) -> tuple[DataProto, RankPlan]:
    """This rank's rows and its part of a plan of one mini-batch."""
    together = context_parallel if degree == "fixed" else 1
    plan = plan_batch(
        sequences.lengths.numpy(),
        ranks=dist.get_world_size() // together,
        mini_batches=[np.arange(len(sequences))],
        max_tokens=cap,
        loss_tokens=sequences.loss_token_counts.numpy(),
        length_multiple=2 * context_parallel if context_parallel > 1 else 1,
        context_degrees=None
        if degree == "fixed"
        else ContextDegrees(context_parallel, 0.1),
    )
    share = plan.for_rank(dist.get_rank() // together)
    mine = sequences.select_idxs(share.rows.tolist())
    if degree == "fixed":
        return mine, share
    assert (
        len(
            {each for part in plan.mini_batches for each in part.degree_of_steps().tolist()}
        )
        > 1
    )
    degrees = torch.from_numpy(share.degree_of_rows())
    return replace(mine, columns=mine.columns | {CONTEXT_DEGREE: degrees}), share


def on_a_rank(
    path: str, order: list[int], cap: int, context_parallel: int, degree: str
) -> tuple[Columns, Metrics, Metrics]:
    """This rank's columns by row of the global batch, the statistics of its values, and the metrics of an
    update.
    """
    worker = worker_on_this_rank(
        CriticWorker, path, context_parallel, OptimizerConfig(learning_rate=1e-2), degree
    )
    mine, plan = share_of_this_rank(
        scored_sequences().select_idxs(order), cap, context_parallel, degree
    )
    block, statistics = worker.advantages(mine, plan, GAE, PENALTY)
    lengths, rows = mine.lengths.tolist(), [order[row] for row in plan.rows]
    columns = {name: torch.from_numpy(column) for name, column in block.tokens.items()}
    mine = DataProto(mine.lengths, mine.tokens | columns, mine.columns)
    updated = (
        worker.forward_backward(mine, plan, ValueLossConfig(clip=0.2))
        | worker.optimizer_step()
    )
    by_row = {
        name: dict(zip(rows, column.split(lengths), strict=True))
        for name, column in columns.items()
    }
    return by_row, statistics, updated


def rewards_of(sequences: DataProto, penalties: torch.Tensor) -> list[list[float]]:
    """Of each sequence's predicted tokens: less the penalties [T], and the sequence's reward at the last."""
    rewards = []
    for row, penalty in enumerate(penalties.split(sequences.lengths.tolist())):
        part = sequences.slice(row, row + 1)
        tokens = (-penalty[part.tokens["loss_mask"]]).tolist()
        if tokens:
            tokens[-1] += float(part.columns["reward"])
        rewards.append(tokens)
    return rewards


def whitened(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std(correction=0)


def at_tokens(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float64 [T], 0 where nothing is predicted."""
    return torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, values)


def expected_columns(path: str) -> dict[str, torch.Tensor]:
    """From single sequences and the sum of eq. 16."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    sequences = scored_sequences()
    mask = sequences.tokens["loss_mask"]
    log_ratio = sequences.tokens["reference_log_probs"] - sequences.tokens["old_log_probs"]
    penalties = PENALTY.coefficient * (log_ratio.exp() - 1 - log_ratio)
    with torch.no_grad():
        alone = unpacked_values(model, sequences)
    masks = mask.split(sequences.lengths.tolist())
    values, advantages = [], []
    for value, part, rewards in zip(
        alone, masks, rewards_of(sequences, penalties), strict=True
    ):
        before = value[:-1][part[1:]].tolist()
        values += before
        advantages += gae_by_paper(rewards, before, GAE.gamma, GAE.lam)
    raw = torch.tensor(advantages, dtype=torch.float64)
    old = torch.tensor(values, dtype=torch.float64)
    columns = {"old_values": old, "returns": raw + old, "advantages": whitened(raw)}
    return {name: at_tokens(mask, column) for name, column in columns.items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("count", "context_parallel", "backwards", "cap", "degree"),
    [
        (1, 1, False, 64, "fixed"),
        (2, 1, True, 40, "fixed"),
        (2, 2, False, 48, "fixed"),
        (4, 4, False, 16, "auto"),
    ],
)
def test_advantages_are_the_papers_whatever_the_plan(
    count, context_parallel, backwards, cap, degree, tmp_path, ranks
) -> None:
    path = save_tiny_model(tmp_path)  # for its tokenizer
    reward_model().save_pretrained(path)
    order = list(range(11))[:: -1 if backwards else 1]
    parts = ranks.run(on_a_rank, count, path, order, cap, context_parallel, degree)
    expected, lengths = expected_columns(path), scored_sequences().lengths.tolist()
    seen = set()
    for by_row, _, _ in parts:
        for name, rows in by_row.items():
            wanted = expected[name].split(lengths)
            for row, column in rows.items():
                torch.testing.assert_close(
                    column.double(), wanted[row], rtol=1e-5, atol=1e-5
                )
        seen |= set(by_row["returns"])
    assert seen == set(range(11))
    leaders = parts[:: context_parallel if degree == "fixed" else 1]
    mask = scored_sequences().tokens["loss_mask"]
    returns, errors = (
        expected["returns"][mask],
        (expected["returns"] - expected["old_values"])[mask],
    )
    explained = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert explained_variance(
        merge(statistics for _, statistics, _ in leaders)
    ) == pytest.approx(float(explained))
    # The first update starts from the old values: nothing is clipped, and the loss is half the mean squared
    # error.
    updated = results(merge(metrics for _, _, metrics in leaders))
    assert updated["loss"] == pytest.approx(float(0.5 * errors.square().mean()), rel=1e-4)
    assert updated["value_clip_fraction"] == 0.0
    assert updated["grad_norm"] > 0
