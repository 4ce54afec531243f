"""The mean over groups, from the driver's counts to the update: what the definition gives, on any ranks and plan."""

from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from balancing import CostModel, Plan
from controller.config import Config
from controller.planning.planner import Planner, draw_mini_batches, with_group_tokens
from tests.workers.model.tiny import random_sequences, save_tiny_model, unpacked_log_probs
from tests.workers.roles.test_critic import worker_on_this_rank
from workers.config import LossConfig, OptimizerConfig
from workers.dataproto import DataProto
from workers.metrics import Metrics, merge, results
from workers.remote_batch import RemoteBatch
from workers.roles.policy import PolicyWorker

UIDS = np.array(["b", "a", "c", "b", "a", "d", "b", "c", "a", "d", "b"])  # of unequal sizes
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
    columns = {"group_number": np.unique(UIDS, return_inverse=True)[1], "length": sequences().lengths.numpy()}
    columns["response_tokens"] = sequences().loss_token_counts.numpy()
    batch = with_group_tokens(RemoteBatch(columns, {}), MINI_BATCHES)
    return batch, Planner(config, CostModel.tokens()).plan(batch, MINI_BATCHES, "policy.update")


def update_on_a_rank(path: str, cap: int, algorithm: str) -> Metrics:
    """This rank's part of one update of two mini-batches."""
    worker = worker_on_this_rank(PolicyWorker, path, 1, OPTIMIZER)
    batch, plan = planned(dist.get_world_size(), cap, algorithm)
    whole, share = sequences(), plan.for_rank(dist.get_rank())
    columns = whole.columns | {"group_tokens": torch.from_numpy(batch["group_tokens"])}
    mine = DataProto(whole.lengths, whole.tokens, columns).select_idxs(share.rows.tolist())
    return worker.update(mine, share, LOSS)


@cache
def expected(path: str, aggregation: str) -> tuple[float, float]:
    """(loss, gradient norm), means over mini-batches, in float64 from single unpadded sequences."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    losses, norms = [], []
    for rows in MINI_BATCHES:
        by_group = defaultdict(list)
        outputs = unpacked_log_probs(model, sequences())
        for row in rows:
            part = sequences().slice(row, row + 1)
            mask, advantage = part.tokens["loss_mask"], part.columns["advantages"]
            ratio = (outputs[row][0][mask] - part.tokens["old_log_probs"][mask]).exp()
            clipped = ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high)
            by_group[UIDS[row]].append(-torch.minimum(ratio * advantage, clipped * advantage))
        groups = [tokens for parts in by_group.values() if len(tokens := torch.cat(parts))]
        means = torch.stack([tokens.mean() for tokens in groups])
        loss = means.mean() if aggregation == "group_mean_token_mean" else torch.cat(groups).mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
    return float(np.mean(losses)), float(np.mean(norms))


@pytest.mark.parametrize(("count", "cap", "algorithm"), PLANS)
def test_the_mean_over_groups_is_its_definition_whatever_the_plan(count, cap, algorithm, tmp_path, ranks) -> None:
    path = save_tiny_model(tmp_path)
    updated = results(merge(ranks.run(update_on_a_rank, count, path, cap, algorithm)))
    loss, norm = expected(path, "group_mean_token_mean")
    assert updated["loss"] == pytest.approx(loss, rel=1e-9)
    assert updated["grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert loss != pytest.approx(expected(path, "token_mean")[0], rel=1e-2)  # the reference tells them apart


def test_both_plans_cut_the_mini_batches_and_count_the_same_groups() -> None:
    for ranks, cap, algorithm in PLANS:
        _, plan = planned(ranks, cap, algorithm)
        for part, rows in zip(plan.mini_batches, MINI_BATCHES, strict=True):
            learned = [row for row in rows if sequences().loss_token_counts[row]]
            assert part.groups == len(set(UIDS[learned]))
        assert max(part.steps for part in plan.mini_batches) > 1
