"""Inputs of a run's plans, step by step: written beside its lengths, and read back by `python -m balancing runs/NAME`.

plan of a step --plan_record--> lengths.jsonl --read_run--> RunPlan: the arguments of `plan_batch`
an older run, without these: config.yaml -----------------> the same, as far as the file tells; mini-batches unknown
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing.alignment import group_cap, length_multiple
from balancing.analysis.lengths_file import read_json, run_step
from balancing.errors import LengthFileError
from balancing.pipeline import Pipeline
from balancing.plan import Plan, Settings
from balancing.validation import whole_numbers
from balancing.workload import CostModel

Integers = NDArray[np.int64]

PREFIXES = ("prefix_groups", "prefix_lengths", "tree_order", "tree_depths")
"""Arguments of `plan_batch` about what sequences begin with alike, and their names in lengths.jsonl."""


@dataclass(frozen=True, eq=False)
class RunPlan:
    """The plan of one step of a run.

    arguments: those of `plan_batch` that `Settings` has. mini_batches: index arrays; None if they were not recorded,
    and then `mini_batch_count` of them are drawn, of whole groups with `by_group`. groups: int64 [n], the group of each
    sequence. prefixes: those of `PREFIXES` that the run recorded. source: in words, for people.
    """

    source: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    mini_batches: tuple[Integers, ...] | None = None
    mini_batch_count: int | None = None
    by_group: bool = False
    groups: Integers | None = None
    prefixes: Mapping[str, Integers] = field(default_factory=dict)


def plan_record(plan: Plan) -> dict[str, Any]:
    """The part of a plan that `read_run` needs, as JSON: `mini_batch`, the number of each sequence's, and `plan`."""
    numbers = np.zeros(len(plan.lengths), np.int64)
    for number, mini_batch in enumerate(plan.mini_batches):
        numbers[mini_batch.rows] = number
    return {"mini_batch": numbers.tolist(), "plan": asdict(plan.settings)}


def read_run(folder: Path, step: int | None = None) -> RunPlan:
    """The plan of one step of a run (None is the last); raises as `read_lengths` does, and for a broken config.yaml."""
    record = run_step(folder, step)
    groups = whole_numbers(record["groups"], "groups", minimum=0) if "groups" in record else None
    prefixes = {name: whole_numbers(record[name], name, minimum=0) for name in PREFIXES if name in record}
    if "plan" not in record:
        return _of_config(folder, groups, prefixes)
    try:
        numbers, arguments = whole_numbers(record["mini_batch"], "mini_batch", minimum=0), _arguments(record["plan"])
    except (LookupError, TypeError, ValueError, AttributeError):
        raise LengthFileError(
            f"{folder}: the plan that step {record['step']} recorded is damaged; give another --step"
        ) from None
    return RunPlan(
        source=f"step {record['step']} of {folder}, as the run planned it",
        arguments=arguments,
        mini_batches=tuple(np.flatnonzero(numbers == number) for number in range(int(numbers.max()) + 1)),
        groups=groups,
        prefixes=prefixes,
    )


def _arguments(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded arguments as `plan_batch` takes them; names that it does not know, of a later version, are left out."""
    arguments = {each.name: recorded[each.name] for each in fields(Settings) if each.name in recorded}
    arguments["cost_model"] = CostModel(**recorded["cost_model"])
    if pipeline := recorded.get("pipeline"):
        shares = pipeline["stage_shares"]
        arguments["pipeline"] = Pipeline(**pipeline | {"stage_shares": shares and tuple(shares)})
    return arguments


def _of_config(folder: Path, groups: Integers | None, prefixes: Mapping[str, Integers]) -> RunPlan:
    """The plan of a run that recorded lengths alone."""
    file = folder / "config.yaml"
    if not file.is_file():
        return RunPlan(
            f"{folder} holds neither a plan nor config.yaml; what follows is assumed", groups=groups, prefixes=prefixes
        )
    settings = _Settings(file)
    count = settings.get("batch.mini_batches", 1)
    redrawn = ", its mini-batches drawn again" if count > 1 else ""
    return RunPlan(
        source=f"{folder} recorded lengths without a plan; this is one by its config.yaml{redrawn}",
        arguments=_configured(settings),
        mini_batch_count=count,
        by_group=settings.get("batch.mini_batches_by", "sequence") == "group",
        groups=groups,
        prefixes=prefixes,
    )


class _Settings:
    """The settings of a config.yaml, by their dotted names."""

    def __init__(self, file: Path) -> None:
        """Raises LengthFileError for a file that holds no settings."""
        import yaml  # only old runs need it

        try:
            self.values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            self.values = None
        if not isinstance(self.values, Mapping):
            raise LengthFileError(f"{file} holds no settings, and the run recorded no plan; give its file of lengths")

    def get(self, name: str, default: Any) -> Any:
        """The setting; `default` if the file does not have it."""
        found: Any = self.values
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found


def _configured(settings: _Settings) -> dict[str, Any]:
    """The arguments that follow from settings, by the rules of `controller.planner.plan_arguments`."""
    names = ("context_parallel", "tensor_parallel", "pipeline_parallel", "virtual_stages")
    context, tensor, stages, virtual = (settings.get(f"policy.parallel.{name}", 1) for name in names)
    order = settings.get("balance.order", "auto")
    found = {
        "ranks": settings.get("policy.ranks", 1),
        "max_sequences": settings.get("policy.max_sequences", 0) or None,
        "min_count": settings.get("policy.min_micro_batches", 1),
        "multiple_of": settings.get("balance.count_multiple", 1),
        "algorithm": settings.get("balance.algorithm", "karmarkar_karp"),
        "order": None if order == "auto" else order,
        "layout": settings.get("model.layout", "packed"),
        "length_multiple": math.lcm(settings.get("model.length_multiple", 1), length_multiple(context, tensor)),
        "pipeline": Pipeline(stages, virtual) if stages > 1 else None,
    }
    if cap := settings.get("policy.max_tokens", 0):
        found["max_tokens"] = group_cap(cap, context)
    model = Path(str(settings.get("model.path", ""))) / "config.json"
    if model.is_file():
        found["cost_model"] = CostModel.from_model_config(read_json(model))
    return found
