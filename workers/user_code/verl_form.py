"""verl's form of a reward function, `compute_score(data_source, solution_str, ground_truth, extra_info)`.

record: data_source, reward_model {ground_truth}, extra_info --arguments--> compute_score --as_score--> Score
"""

from collections.abc import Collection, Mapping
from typing import Any

SOLUTION = "solution_str"  # the response, by which the form is known
TRUTH = "reward_model.ground_truth"  # of verl's records


def is_verl_form(names: Collection[str]) -> bool:
    """Whether a function with these parameters takes verl's arguments, not ours."""
    return SOLUTION in names and not {"response", "responses"} & set(names)


def sources_of(names: Collection[str], record: Mapping[str, Any]) -> dict[str, str]:
    """Return the column of each argument that a function with the parameters `names` takes and the record
    has.
    """
    sources = {name: name for name in record if name in names}
    rule = record.get("reward_model")
    if "ground_truth" in names and isinstance(rule, Mapping) and "ground_truth" in rule:
        sources.setdefault("ground_truth", "reward_model")
    return sources


def verl_arguments(
    names: Collection[str], response: str, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name. extra_info: a copy, {} without the column, as functions may write into
    it.
    """
    sources = sources_of(names, columns)
    arguments = {name: columns[source] for name, source in sources.items()}
    if sources.get("ground_truth") == "reward_model":
        arguments["ground_truth"] = columns["reward_model"]["ground_truth"]
    arguments[SOLUTION] = response
    if "extra_info" in names:
        arguments["extra_info"] = dict(columns.get("extra_info") or {})
    return arguments
