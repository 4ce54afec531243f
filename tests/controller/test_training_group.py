"""Workers that share sequences, driven as a run drives them, answer as one worker does."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from balancing import plan_batch
from controller.actors.layout import Pool
from controller.actors.resources import reserve
from controller.actors.worker_group import Share, WorkerGroup
from tests.workers.model.cases import Case
from tests.workers.model.tiny import save_tiny_model
from workers.config import LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from workers.dataproto import DataProto
from workers.metrics import results
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss
from workers.remote_batch import RemoteBatch
from workers.roles.policy import PolicyWorker

RING = ParallelConfig(context_parallel=2, context_parallel_method="ring")
OPTIMIZER = OptimizerConfig(learning_rate=1e-2)


def batch_of(sequences: DataProto) -> RemoteBatch:
    """The ids, masks, experts and advantages of `sequences`, in one block of the object store."""
    names, lengths = ("input_ids", "loss_mask", "routed_experts"), sequences.lengths.tolist()
    parts = [sequences.tokens[name].split(lengths) for name in names]
    rows = [dict(zip(names, (part.numpy() for part in row), strict=True)) for row in zip(*parts, strict=True)]
    columns = {"length": np.array(lengths), "advantages": sequences.columns["advantages"].float().numpy()}
    return RemoteBatch.of_block(ray.put(DataProto.from_rows(rows)), columns, names)


@pytest.mark.usefixtures("ray_session")
def test_workers_that_share_sequences_answer_as_one(tmp_path: Path) -> None:
    sequences = Case(router_replay="replay").sequences
    path = save_tiny_model(tmp_path / "model", "qwen3_moe")
    model = ModelConfig(path=path, dtype="float32", router_replay="replay")
    alone = TrainingEngine(model, optimizer=OPTIMIZER, total_steps=1, device="cpu")
    expected_log_probs, _ = alone.log_probs(sequences, [(0, 11)])
    only = DataProto(
        sequences.lengths,
        {name: sequences.tokens[name] for name in ("input_ids", "loss_mask", "routed_experts")},
        {"advantages": sequences.columns["advantages"].float()},
    )
    expected = alone.forward_backward(only, [(0, 11)], make_policy_loss(LossConfig()), Denominators.of(only))
    expected |= alone.optimizer_step()

    bundles = reserve(Pool("shared", ({"CPU": 0.5},) * 2), 30)
    arguments = {"model": model, "device": "cpu", "temperature": 1.0, "threads": 1, "parallel": RING}
    arguments |= {"optimizer": OPTIMIZER, "total_steps": 1}
    group = WorkerGroup("policy", PolicyWorker, bundles, Share(0.5), dp=1, cp=2, arguments=arguments, timeout_s=120)
    try:
        assert group.names == ["policy dp=0 cp=0", "policy dp=0 cp=1"]
        assert group.build() == [alone.num_parameters] * 2
        batch = batch_of(sequences)
        owner = torch.repeat_interleave(torch.arange(11), sequences.lengths)
        loss_tokens = torch.bincount(owner, sequences.tokens["loss_mask"].double(), minlength=11).long().numpy()
        plan = plan_batch(
            batch["length"],
            ranks=1,
            mini_batches=[np.arange(11)],
            max_tokens=48,
            loss_tokens=loss_tokens,
            length_multiple=4,
        )
        passed = batch.with_tokens(log_probs=group.log_probs(batch, plan).tokens["log_probs"]).gather()
        log_probs = passed.tokens["log_probs"]
        torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-4, atol=1e-5)
        updated = results(group.update(batch, plan, LossConfig()))
        assert updated["router_mismatch"] > 0.1
        assert updated == pytest.approx(results(expected), rel=1e-4, abs=1e-6)
        measured = group.take_micro_step_times()
        steps = plan.mini_batches[0].steps
        assert [[found.name for found in rank] for rank in measured] == [["log_probs"] * steps + ["update"] * steps] * 2
        assert [sum(found.tokens for found in rank) for rank in measured] == [2 * sequences.num_tokens] * 2
    finally:
        group.stop()
        bundles.release()
