"""Compute cases on training ranks, and compare them with the reference.

Case + Way --engine, a random plan--> Outcome of each rank --join_ranks--> Outcome == reference_outcome(Case)
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from controller.config.offline import RewardLossConfig
from controller.offline.preference_losses import bradley_terry
from tests.workers.model import cpu_engine
from tests.workers.model.cases import (
    CENTRED,
    GROUPS,
    OPTIMIZER,
    Case,
    Outcome,
    RankShare,
    Way,
    random_plan,
    random_plan_by_step,
    seed_with_gaps,
    way,
)
from tests.workers.model.cpu_engine import weights
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.reference import LOAD, keep_float64, reference_outcome
from tests.workers.model.tiny import VOCABULARY, relative_error, teacher_of
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.batch.metrics import Metrics, merge, results
from workers.config.roles import ParallelConfig, ValueLossConfig
from workers.model import compiled_layers as compiling
from workers.model.attention.shared_attention import SharedAttention
from workers.model.engine import TrainingEngine
from workers.model.losses import (
    Denominators,
    make_policy_loss,
    make_score_loss,
    make_value_loss,
    weighted_values,
)
from workers.model.losses.distillation import TopTokens, hidden_states, log_probs
from workers.model.sharding.parallel import full_tensor

SAME_SETTINGS = (
    "dtype",
    "gradient_checkpointing",
    "recompute_num_layers",
    "activation_offload",
    "layout",
    "forward_layout",
    "length_multiple",
    "share_prefixes",
    "router_replay",
    "base_dtype",
    "reshard_after_forward",
    "temperature",
    "head",
)
"""Of a case and of an engine."""


def build_engine(case: Case, path: str, parallel: ParallelConfig) -> TrainingEngine:
    engine = cpu_engine.build_engine(
        path,
        **{name: getattr(case, name) for name in SAME_SETTINGS},
        min_shared_tokens=1,
        router_aux_loss_coefficient=case.router_losses[0],
        router_z_loss_coefficient=case.router_losses[1],
        lora=case.adapters,
        compile="always" if case.compiled else "never",
        optimizer=OPTIMIZER,
        offload=case.optimizer_offload,
        parallel=parallel,
    )
    keep_float64(case, engine.module.model)
    return engine


def engine_outcomes(
    cases: list[Case], paths: list[str], way: Way, seeds: list[int]
) -> list[dict[str, Any]]:
    found = []
    for case, path, seed in zip(cases, paths, seeds, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedAttention, "_way", lambda *_, case=case: case.shared_by)
            patch.setattr(compiling, "BACKEND", "aot_eager")
            torch._dynamo.reset()
            found.append(step_outcome(case, path, way, seed))
    return found


def step_outcome(case: Case, path: str, way: Way, seed: int) -> dict[str, Any]:
    engine = build_engine(case, path, way.parallel)
    share, mine = own_share(engine, case, way, seed)
    if case.distillation[0]:
        mine = taught(engine, case, path, way, mine, share.micro_batches)
    if case.head == "lm":
        columns = list(engine.log_probs_and_entropies(mine, share.micro_batches)[:2])
    else:
        scores = engine.scores(mine, share.micro_batches)
        columns = [
            engine.values(mine, share.micro_batches)[0],
            torch.repeat_interleave(scores.float(), mine.lengths),
        ]
    metrics = learn(engine, case, way, seed, mine)
    gradients = whole_gradients(engine)
    metrics |= engine.optimizer_step()
    outputs = torch.stack(columns, -1).split(mine.lengths.tolist())
    return {
        "leads": leads(engine),
        "outputs": dict(zip(share.rows, outputs, strict=True)),
        "metrics": metrics,
        "gradients": gradients,
        "weights": weights(engine),
    }


def own_share(
    engine: TrainingEngine, case: Case, way: Way, seed: int
) -> tuple[RankShare, DataProto]:
    """What a plan gives this rank, and its sequences."""
    parallel = engine.parallel
    if not parallel.shares_by_step:
        share = random_plan(way.dp, seed)[dp_rank(parallel)]
        return share, case.sequences.select_idxs(share.rows)
    context = parallel.context
    plan = random_plan_by_step(way.dp * context.size(), way.parallel.context_degrees, seed)
    share = plan[dp_rank(parallel) * context.size() + context.get_local_rank()]
    mine = case.sequences.select_idxs(share.rows)
    return share, replace(
        mine,
        columns=mine.columns
        | {CONTEXT_DEGREE: torch.tensor(share.degrees, dtype=torch.int64)},
    )


def leads(engine: TrainingEngine) -> bool:
    """Whether a caller takes this rank's results."""
    parallel = engine.parallel
    return (
        parallel.tensor.get_local_rank() == 0
        if parallel.shares_by_step
        else parallel.leads_dp_group
    )


def taught(
    engine: TrainingEngine,
    case: Case,
    path: str,
    way: Way,
    mine: DataProto,
    micro_batches: list[tuple[int, int]],
) -> DataProto:
    """Add the columns that another engine, the teacher's, gives these ranks."""
    teacher = cpu_engine.build_engine(
        teacher_of(path),
        dtype=case.dtype,
        share_prefixes=case.share_prefixes,
        optimizer=None,
        temperature=case.temperature,
        parallel=way.parallel,
    )
    keep_float64(case, teacher.module.model)
    over = case.distillation[0]
    if over == "token":
        (column,) = teacher.read_outputs(mine, micro_batches, log_probs)
        found = {"teacher_log_probs": torch.from_numpy(column)}
    elif over == "top_k":
        columns = teacher.read_outputs(
            mine, micro_batches, TopTokens(case.taught.top_k, VOCABULARY)
        )
        found = dict(
            zip(
                ("teacher_top_ids", "teacher_top_log_probs"),
                map(torch.from_numpy, columns),
                strict=True,
            )
        )
    else:
        (column,) = teacher.read_outputs(mine, micro_batches, hidden_states)
        engine.teacher_layer, found = (
            teacher.output_layer(),
            {"teacher_hidden": torch.from_numpy(column)},
        )
    return replace(mine, tokens=mine.tokens | found)


def learn(
    engine: TrainingEngine, case: Case, way: Way, seed: int, mine: DataProto | None = None
) -> Metrics:
    (share, own), whole = own_share(engine, case, way, seed), case.sequences
    loss = (
        make_policy_loss(case.loss)
        if case.head == "lm"
        else make_value_loss(ValueLossConfig(clip=0.0))
    )
    mine = own if mine is None else mine
    if case.scored:
        loss = weighted_values if case.scored == "pairs" else make_score_loss(case.scored)
        if case.scored == "pairs":
            mine = replace(
                mine,
                columns=mine.columns | {"coefficient": slopes(engine, whole, share, mine)},
            )
        return engine.forward_backward(
            mine, share.micro_batches, loss, Denominators.of(whole), "own"
        )
    return merge(
        engine.forward_backward(
            mine,
            share.micro_batches[call :: case.calls],
            loss,
            Denominators.of(whole, GROUPS),
        )
        for call in range(case.calls)
    )


def slopes(
    engine: TrainingEngine, whole: DataProto, share: RankShare, mine: DataProto
) -> Tensor:
    """dL/ds of this rank's rows, as the driver computes them from the scores of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (share.rows, engine.scores(mine, share.micro_batches)))
    scores = torch.zeros(len(whole), dtype=torch.float64)
    for rows, found in parts:
        scores[rows] = found
    settings, margins = (
        RewardLossConfig(center_rewards_coefficient=CENTRED),
        whole.columns["label"][0:10:2],
    )
    found = bradley_terry(settings, scores[:10].numpy(), margins.numpy())
    return torch.from_numpy(np.append(found.coefficients, 0.0))[share.rows]


def whole_gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    """Of the whole model by name, on every rank; a weight that two stages hold has the sum of its
    gradients.
    """
    stage, parameters = engine.stage, engine.module.model.named_parameters()
    mine = {
        name: full_tensor(each.grad).clone()
        for name, each in parameters
        if each.grad is not None
    }
    whole: dict[str, Tensor] = {}
    for part in stage.of_all(mine):
        for name, gradient in part.items():
            name = stage.tied[0] if stage.tied and name == stage.tied[1] else name
            whole[name] = whole[name] + gradient if name in whole else gradient
    return whole


def join_ranks(parts: list[dict[str, Any]]) -> Outcome:
    """What the driver makes of the ranks' results: those of one rank of each dp group."""
    leaders = [part for part in parts if part["leads"]]
    outputs = {row: values for part in leaders for row, values in part["outputs"].items()}
    for part in parts:
        for row, values in part["outputs"].items():
            # The same on every rank of a dp group.
            torch.testing.assert_close(values, outputs[row], rtol=0, atol=0)
    metrics = results(merge(part["metrics"] for part in leaders))
    return Outcome(outputs, metrics, parts[0]["gradients"], parts[0]["weights"])


def assert_same(case: Case, actual: Outcome, expected: Outcome) -> None:
    # A shared token counts once.
    left_out = {LOAD, "router_mismatch"} if case.share_prefixes == "always" else set()
    if case.scored:  # the update's own loss of pairs is the weighted sum of scores
        left_out |= {"absolute_error", "accuracy", *["loss"] * (case.scored == "pairs")}
    left_out |= {"values", "returns", "returns_square", "value_error", "value_error_square"}
    found, known = (
        {name: each for name, each in outcome.metrics.items() if name not in left_out}
        for outcome in (actual, expected)
    )
    assert found == pytest.approx(known, rel=case.tolerance)
    assert actual.outputs.keys() == expected.outputs.keys()
    for row, outputs in expected.outputs.items():
        torch.testing.assert_close(
            actual.outputs[row], outputs.float(), rtol=1e-5, atol=1e-6
        )
    assert_gradients(actual.gradients, expected, case.tolerance)
    assert actual.weights.keys() == expected.weights.keys()
    if case.dtype == "float64":
        for name, weight in expected.weights.items():
            # Looser than the gradients: a first step of AdamW divides each by its own size, however small.
            assert relative_error(actual.weights[name], weight) < 1e-6, name


def assert_gradients(
    actual: dict[str, Tensor], expected: Outcome, tolerance: float
) -> None:
    assert actual.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert relative_error(actual[name].double(), gradient) < tolerance, name


def check(ranks: RankPool, text: str, cases: list[Case], paths: list[str]) -> None:
    on_ranks = way(text)
    seeds = [seed_with_gaps(on_ranks.dp, index) for index in range(len(cases))]
    by_rank = ranks.run(engine_outcomes, on_ranks.ranks, cases, paths, on_ranks, seeds)
    for case, path, parts in zip(cases, paths, zip(*by_rank, strict=True), strict=True):
        try:
            assert_same(case, join_ranks(list(parts)), reference_outcome(case, path))
        except AssertionError as error:
            error.add_note(f"on {text}: {case}")
            raise


class CountedCalls(TorchDispatchMode):
    """Counts operators by name. (torch's CommDebugMode loses track of modules that are called in a backward
    pass.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))
