"""Planner: decide which sequences share an optimiser step, and which rank computes each sequence when.

    number of sequences, seed --draw_mini_batches--> mini-batches
    mini-batches --Planner.plan--> Plan of every rank's micro-batches

    prompt_hash, prompt_tokens --> plan_batch(prefix_groups, prefix_lengths): groups with a prefix
    prefix_hashes --> plan_batch(tree_order, tree_depths): order of each group's tree, depth of neighbours

Balancing never changes mini-batches, which are drawn at random before. A plan deducts at most
the prefix tokens that a row shares (workers/model/rows/prefix_rows.py), so no row exceeds the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from balancing import ContextDegrees, CostModel, Plan, plan_batch
from balancing.basics.alignment import group_cap
from balancing.cost_model import TRAINING_FACTOR, exchange_share
from balancing.errors import CostModelError, CountError
from balancing.pipelines.pipeline import Pipeline
from controller.config import TrainingConfig
from controller.config.counted_layers import complete_description
from workers.errors import ConfigError

if TYPE_CHECKING:
    from workers.batch.remote_batch import RemoteBatch
from balancing.prefixes.groups import fewest_worth_sharing
from workers.config.model import RECOMPUTED
from workers.engine.prefix_hashes import hashed_places

Integers = np.ndarray


def prefix_columns(
    prompts: Integers,
    prompt_tokens: Integers,
    lengths: Integers,
    hashes: np.ndarray,
    minimum: int,
) -> dict[str, Integers]:
    """Return the arguments of `plan_batch` for shared prefixes of B samples, int64 [B] each.

    prompts: int64 [B], equal for equal prompts. prompt_tokens, lengths: int64 [B], of prompt and whole
    sample. hashes: objects [B], bytes from `workers.engine.prefix_hashes`. minimum:
    `model.min_shared_tokens`.
    """
    response_tokens = lengths - prompt_tokens
    fewest = np.maximum(fewest_worth_sharing(response_tokens), minimum)
    groups = np.unique(prompts, return_inverse=True)[1]
    prefixes = np.where(prompt_tokens < fewest, 0, prompt_tokens)
    table = _table(hashes)
    rows = np.lexsort((*table.T[::-1], groups, prefixes == 0))
    order = np.empty(len(rows), np.int64)
    order[rows] = np.arange(len(rows))
    return {
        "prefix_groups": groups,
        "prefix_lengths": prefixes,
        "tree_order": order,
        "tree_depths": _depths(table, rows, groups, prompt_tokens, response_tokens, fewest),
    }


def _table(hashes: np.ndarray) -> Integers:
    """Hashes of each sample, int64 [B, places]. Missing ones are unique negative numbers."""
    rows = [np.frombuffer(sample_hashes, "<u4") for sample_hashes in hashes]
    table = np.repeat(-1 - np.arange(len(rows))[:, None], max(map(len, rows)), axis=1)
    for row, row_hashes in enumerate(rows):
        table[row, : len(row_hashes)] = row_hashes
    return table


def _depths(
    table: Integers,
    rows: Integers,
    groups: Integers,
    prompt_tokens: Integers,
    response_tokens: Integers,
    fewest: Integers,
) -> Integers:
    alike = np.zeros(len(rows), np.int64)
    if table.shape[1]:
        equal = np.minimum.accumulate(table[rows[1:]] == table[rows[:-1]], axis=1)
        alike[rows[1:]] = equal.sum(axis=1)
    places = np.append(0, hashed_places(int(response_tokens.max())))
    largest = np.zeros(groups.max() + 1, np.int64)
    # Depths of any two samples of a group are minima of several.
    np.maximum.at(largest, groups, fewest)
    depths: Integers = prompt_tokens + np.maximum(0, places[alike] - largest[groups] + 1)
    return depths


MINI_BATCHES = 1  # separates this random stream from the data order's


@dataclass(frozen=True)
class StageTimes:
    """overhead: seconds of a micro-step beyond its workload, over all stages. shares: of each stage in the
    total time, rounded to two digits to keep plans stable.
    """

    overhead: float = 0.0
    shares: tuple[float, ...] | None = None


NOT_MEASURED = StageTimes()


def draw_mini_batches(
    sequences: int,
    mini_batches: int,
    seed: int,
    step: int,
    epoch: int = 0,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Randomly split row numbers into mini-batches whose sizes differ by at most one, or fewer if rows are
    few.

    Deterministic in the run's `seed`, `step` and `epoch` (pass over the step's samples, from 0). groups:
    int64 [sequences], whose groups stay whole, with counts that differ by at most one. Returns ascending
    int64 arrays.
    """
    rng = np.random.default_rng((seed, MINI_BATCHES, step, epoch))
    names = np.arange(sequences) if groups is None else np.unique(groups)
    parts = np.array_split(rng.permutation(len(names)), min(mini_batches, len(names)))
    return [
        np.sort(part) if groups is None else np.flatnonzero(np.isin(groups, names[part]))
        for part in parts
    ]


def with_loss_counts(
    batch: "RemoteBatch", mini_batches: Sequence[np.ndarray]
) -> "RemoteBatch":
    """Add the column `group_tokens`: loss tokens of each sequence's group within its mini-batch, int64 [B].

    If samples have several rows, also `sample_tokens`, those of its sample, and `mini_batch_samples`, the
    samples with a loss token.
    """
    tokens = batch["response_tokens"]
    groups = batch["group_number"]
    samples = batch.columns.get("sample_number", np.arange(len(batch)))
    columns = {
        name: np.zeros_like(tokens)
        for name in ("group_tokens", "sample_tokens", "mini_batch_samples")
    }
    for rows in mini_batches:
        columns["group_tokens"][rows] = np.bincount(groups[rows], tokens[rows])[
            groups[rows]
        ]
        columns["sample_tokens"][rows] = np.bincount(samples[rows], tokens[rows])[
            samples[rows]
        ]
        columns["mini_batch_samples"][rows] = len(
            np.unique(samples[rows][tokens[rows] > 0])
        )
    several = len(np.unique(samples)) < len(batch)
    return batch.with_columns(
        **columns if several else {"group_tokens": columns["group_tokens"]}
    )


def counted_costs(config: TrainingConfig) -> CostModel:
    """Count the FLOPs of the model's config.json. Raises ConfigError if it is missing or lacks a size."""
    try:
        description = complete_description(config.model_description())
        return CostModel.from_model_config(
            description, train_vision=config.model.train_vision
        )
    except CostModelError as error:
        raise ConfigError(
            f"model.path={config.model.path}: {error} Plans weigh sequences by the sizes in its "
            "config.json. Add the field there: transformers and vLLM pass over a name that they do not "
            "know."
        ) from None


def images_of(batch: "RemoteBatch") -> list[list[tuple[int, int]]] | None:
    """Return the argument `images` of `plan_batch`."""
    column = batch.columns.get("images")
    if column is None:
        return None
    images = []
    for placed in column:
        images.append([(int(image.first), image.tokens) for image in placed])
    return images


def plan_arguments(
    config: TrainingConfig,
    pass_name: str,
    prefixes: Mapping[str, Any] | None = None,
    stages: StageTimes = NOT_MEASURED,
) -> dict[str, Any]:
    """Return the arguments of `balancing.plan_batch` besides the batch.

    pass_name: a pass in `config.limits`. prefixes: from `prefix_columns`.
    """
    limits = config.limits[pass_name]
    policy = config.policy
    balance = config.balance
    degrees = context_degrees(config)
    arguments: dict[str, Any] = {
        "ranks": config.planned_ranks,
        "max_tokens": group_cap(
            limits.max_tokens, 1 if degrees else policy.parallel.context_parallel
        ),
        "context_degrees": degrees,
        "max_sequences": limits.max_sequences or None,
        "max_patches": limits.max_patches or None,
        "min_count": limits.min_micro_batches,
        "multiple_of": balance.count_multiple,
        "algorithm": balance.algorithm,
        "order": None if balance.order == "auto" else balance.order,
        "pipeline": pipeline_of(
            config, trains=pass_name.endswith(".update"), measured=stages
        ),
        "layout": limits.layout,
        "length_multiple": limits.length_multiple,
    }
    return arguments | dict(prefixes or {})


def context_degrees(config: TrainingConfig) -> ContextDegrees | None:
    """Return the degrees of micro-steps, or None if all ranks of a context-parallel group share every
    sequence.
    """
    parallel = config.policy.parallel
    if parallel.context_parallel_degree == "fixed":
        return None
    ring = parallel.context_parallel_method == "ring"
    share = exchange_share(complete_description(config.model_description()), ring=ring)
    return ContextDegrees(parallel.context_parallel, share, ring)


def pipeline_of(
    config: TrainingConfig, *, trains: bool, measured: StageTimes = NOT_MEASURED
) -> Pipeline | None:
    """Return the stages of the training roles' models, or None without a pipeline.

    trains: whether backward passes follow, which cost two forward passes (and what checkpointing repeats).
    measured: of updates. It assumes that all parts of a stage cost the same.
    """
    parallel = config.policy.parallel
    if parallel.pipeline_parallel == 1:
        return None
    backward = 2.0 + RECOMPUTED[config.model.gradient_checkpointing]
    overhead = measured.overhead if trains else measured.overhead / (1.0 + backward)
    shares = None if measured.shares is None else measured.shares * parallel.virtual_stages
    return Pipeline(
        parallel.pipeline_parallel,
        parallel.virtual_stages,
        backward * trains,
        stage_shares=shares,
        overhead=overhead,
    )


class Planner:
    """Plans for the data-parallel ranks, which all training roles share."""

    def __init__(
        self,
        config: TrainingConfig,
        cost_model: CostModel,
        stages: StageTimes = NOT_MEASURED,
    ) -> None:
        """stages: measured times, which need a `cost_model` in seconds."""
        self.config = config
        self.cost_model = cost_model
        self.stages = stages
        self._sharing: dict[str, bool] = {}

    def forward_plan(self, batch: "RemoteBatch", pass_name: str) -> Plan:
        return self.plan(batch, [np.arange(len(batch))], pass_name)

    def plan(
        self, batch: "RemoteBatch", mini_batches: list[np.ndarray], pass_name: str
    ) -> Plan:
        """Assign every sequence to a rank and a micro-step. Mini-batches stay as drawn.

        batch: light columns `length`, `response_tokens` and, for losses that divide by groups,
        `group_number`. pass_name: a pass in `config.limits`, such as `policy.update`. If sequences are too
        few for the configured micro-batch counts, the smallest mini-batch limits them. Pipeline stages add
        empty ones.
        """
        plan = partial(
            plan_batch,
            batch["length"],
            mini_batches=mini_batches,
            loss_tokens=batch["response_tokens"],
            groups=batch.columns.get("group_number"),
            cost_model=self._costs(pass_name),
            images=images_of(batch),
        )
        arguments = plan_arguments(
            self.config, pass_name, self.prefixes(batch, pass_name), self.stages
        )
        try:
            return plan(**arguments)
        except CountError:
            pipeline = arguments["pipeline"] and replace(
                arguments["pipeline"], virtual_stages=1, stage_shares=None
            )
            fewest = min(arguments["min_count"], *map(len, mini_batches))
            return plan(
                **arguments | {"min_count": fewest, "multiple_of": 1, "pipeline": pipeline}
            )

    def _costs(self, pass_name: str) -> CostModel:
        """A frozen tower has no backward pass, so images weigh more in forward passes."""
        forward = not pass_name.endswith(".update") and not self.config.model.train_vision
        return self.cost_model.with_images(TRAINING_FACTOR) if forward else self.cost_model

    def prefixes(self, batch: "RemoteBatch", pass_name: str) -> dict[str, np.ndarray]:
        """Return the arguments of `plan_batch` for shared prefixes, or empty if the pass shares nothing."""
        if "prompt_hash" not in batch.columns or not self._shares(
            pass_name.partition(".")[0]
        ):
            return {}
        return prefix_columns(
            batch["prompt_hash"],
            batch["prompt_tokens"],
            batch["length"],
            batch["prefix_hashes"],
            minimum=self.config.model.min_shared_tokens,
        )

    def _shares(self, role: str) -> bool:
        if role not in self._sharing:
            models = map(self.config.decide_prefixes, self.config.models_of(role).values())
            self._sharing[role] = all(model.share_prefixes == "always" for model in models)
        return self._sharing[role]

    def draw(self, batch: "RemoteBatch", step: int, epoch: int = 0) -> list[np.ndarray]:
        """Draw the mini-batches of a pass over a step's samples (see `draw_mini_batches`)."""
        config = self.config
        groups = (
            batch["group_number"]
            if config.split_by == "group"
            else batch.columns.get("sample_number")
        )
        return draw_mini_batches(
            len(batch), config.mini_batches, config.run.seed, step, epoch, groups
        )
