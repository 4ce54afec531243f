"""What a run's configuration makes of a batch, without Ray and vLLM: the plan, and one step on real training
ranks.

    overrides --load, check--> Config --Planner--> Plan --for_rank--> PolicyWorker (gloo, FSDP2) --> Result

Ranks compute in float64, which no setting offers, so that differences between two ways to compute are
rounding alone.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from balancing import CostModel, Plan
from controller.actors.launch import worker_arguments
from controller.config import Config, load
from controller.planning.planner import Planner, draw_mini_batches, with_loss_counts
from controller.preflight.checks import check
from tests.benchmarks.families.measuring import build
from tests.controller.config_workspace import write_workspace
from tests.workers.model.exact import CountedCalls
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, save_tiny_model
from tests.workers.roles.updates import update
from workers.batch.dataproto import DataProto
from workers.batch.dispatch import RankCoordinates
from workers.batch.metrics import Metrics, merge, results
from workers.batch.remote_batch import RemoteBatch
from workers.model.sharding.parallel import full_tensor
from workers.roles.policy import PolicyWorker


def up_to(longest: int) -> tuple[str, str]:
    """Overrides after which no sequence is longer."""
    return "data.max_prompt_tokens=2", f"rollout.sampling.max_new_tokens={longest - 2}"


SMALL = up_to(40)  # tokens of the longest of `random_sequences()`, and a few


def write_designs_workspace(folder: Path) -> str:
    """Everything that a configuration names, with a real tiny model; returns the path of its config.yaml."""
    file = write_workspace(folder)
    (folder / "designs_losses.py").write_text(LOSSES)
    save_tiny_model(folder / "windowed", "mistral windowed", head_dim=32)
    build("minicpm3", folder / "latent")
    for name, layers in (("deep", 4), ("eight", 8)):
        save_tiny_model(
            folder / name,
            head_dim=32,
            num_hidden_layers=layers,
            max_position_embeddings=4096,
        )
    for left in (folder / "model").iterdir():
        left.unlink()
    save_tiny_model(folder / "model", head_dim=32, max_position_embeddings=4096)
    return str(file)


def configuration(file: str, *overrides: str) -> Config:
    """As a run reads and checks it."""
    config = load(file, overrides)
    check(config)
    return config


def light_batch(lengths: Sequence[int]) -> RemoteBatch:
    """The driver's columns of a batch; every token but the first of a sequence is of its response."""
    counts = np.asarray(lengths, dtype=np.int64)
    return RemoteBatch(
        {
            "group_number": np.arange(len(counts)),
            "length": counts,
            "response_tokens": np.maximum(counts - 1, 0),
        },
        {},
    )


def plan_of(
    config: Config, lengths: Sequence[int], step: int = 1, of: str = "policy.update"
) -> Plan:
    """The plan of an update or another pass, balanced by tokens, so that worked examples can be followed by
    hand.
    """
    batch = light_batch(lengths)
    drawn = draw_mini_batches(len(batch), config.batch.mini_batches, config.run.seed, step)
    return Planner(config, CostModel.tokens()).plan(batch, drawn, of)


def micro_batches(plan: Plan) -> list[list[list[int]]]:
    """Row numbers by micro-step, then rank, mini-batch after mini-batch."""
    return [
        [rows.tolist() for rows in step.ranks]
        for part in plan.mini_batches
        for step in part.micro_steps
    ]


LOSSES = """\
from workers.model.losses import per_sequence_loss, policy_loss


@policy_loss("whole_row", aggregation="token_mean")
def whole_row(predictions, config):
    return -predictions["advantages"] * predictions.log_probs, {}


@policy_loss("by_sequence", aggregation="token_mean")
@per_sequence_loss
def by_sequence(sequence, config):
    return -sequence["advantages"] * sequence.log_probs, {}


@policy_loss("mean_of_means", aggregation="sequence_mean_token_mean")
def mean_of_means(predictions, config):
    return -predictions["advantages"] * predictions.log_probs, {}
"""


@dataclass(frozen=True)
class Result:
    """log_probs: by row of the batch, float32 [L]. metrics: of the update. weights: whole, after the update,
    by name.
    cells: by rank and micro-batch, the ids that its embedding read in the forward pass before the update.
    collectives: of rank 0 in that pass, how often each operator of torch.distributed was called."""

    log_probs: dict[int, np.ndarray]
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    cells: list[list[list[int]]]
    collectives: dict[str, int]


def compute(
    ranks: RankPool, file: str, *overrides: str, sequences: DataProto | None = None
) -> Result:
    """A forward pass and an update of one batch, as the configuration asks for them."""
    config = configuration(file, *overrides)
    parallel = config.policy.parallel
    stage = (
        config.policy.data_parallel * parallel.context_parallel * parallel.tensor_parallel
    )
    parts = ranks.run(
        _on_a_rank, stage * parallel.pipeline_parallel, file, overrides, sequences
    )
    leaders = [part for part in parts if part["leads"]]
    metrics: Metrics = merge(part["metrics"] for part in leaders)
    log_probs = {
        row: values for part in leaders for row, values in part["log_probs"].items()
    }
    first, cells = parts[0], [part["cells"] for part in parts]
    return Result(
        log_probs, results(metrics), first["weights"], cells, first["collectives"]
    )


def _on_a_rank(
    file: str, overrides: tuple[str, ...], sequences: DataProto | None
) -> dict[str, Any]:
    folder = str(Path(file).parent)  # the pool's processes may have started elsewhere
    os.chdir(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` has the working directory
    config = configuration(file, *overrides)
    whole = sequences or random_sequences()
    worker = build_worker(config)
    batch = RemoteBatch(
        {
            "group_number": np.arange(len(whole)),
            "length": whole.lengths.numpy(),
            "response_tokens": whole.loss_token_counts.numpy(),
        },
        {},
    )
    planner = Planner(config, CostModel.tokens())
    drawn = draw_mini_batches(
        len(whole), config.batch.mini_batches, config.run.seed, step=1
    )
    batch = with_loss_counts(batch, drawn)
    whole = replace(
        whole,
        columns=whole.columns | {"group_tokens": torch.from_numpy(batch["group_tokens"])},
    )
    forward = planner.forward_plan(batch, "policy.log_probs").for_rank(
        worker.coordinates.dp
    )
    with recorded_cells(worker.engine.module) as cells, CountedCalls() as counted:
        block, _ = worker.log_probs(whole.select_idxs(forward.rows.tolist()), forward)
    plan = planner.plan(batch, drawn, "policy.update")
    metrics = update(worker, whole, plan, worker.coordinates.dp, config.algorithm.loss)
    return {
        "leads": worker.coordinates.leads_dp_group,
        "log_probs": {
            row: block.row(i)["log_probs"] for i, row in enumerate(forward.rows.tolist())
        },
        "metrics": metrics,
        "weights": {name: weight.clone() for name, weight in worker.engine.named_weights()},
        "cells": cells,
        "collectives": {
            name: count for name, count in counted.counts.items() if "c10d" in name
        },
    }


def build_worker(config: Config) -> PolicyWorker:
    """This rank's part of the policy, with the arguments that the driver gives it."""
    parallel, rank = config.policy.parallel, dist.get_rank()
    shape = (
        parallel.pipeline_parallel,
        config.policy.data_parallel,
        parallel.context_parallel,
        parallel.tensor_parallel,
    )
    pp, dp, cp, tp = list(itertools.product(*map(range, shape)))[rank]
    arguments = worker_arguments(config, "policy", config.total_optimizer_steps) | {
        "threads": 1
    }
    arguments["model"] = replace(arguments["model"], dtype="float64")
    worker = PolicyWorker(
        "policy", RankCoordinates(rank, dp, tp, cp, pp), dist.get_world_size(), **arguments
    )
    worker.build()
    return worker


@contextmanager
def recorded_cells(module: nn.Module) -> Iterator[list[list[int]]]:
    """Collects what the embedding reads, call by call."""
    cells: list[list[int]] = []
    embedding = module.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(
        lambda _, inputs: cells.append(full_tensor(inputs[0]).flatten().tolist())
    )
    try:
        yield cells
    finally:
        handle.remove()
