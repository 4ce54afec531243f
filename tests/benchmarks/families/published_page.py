"""The section of docs/models.md on models in the form of their published checkpoints."""

import re
from collections import Counter

from tests.benchmarks.families.measuring import Outcome
from tests.benchmarks.families.page import CAUSES
from tests.benchmarks.families.published import Published, tiny_description

PUBLISHED = "## Models in the form of their checkpoints"
MODEL = re.compile(r"model\.path=\S+|\(\w+\)")
COLUMNS = ("trains", "saves", "resumes", "LoRA", "engine", "images", "cp", "tp", "pp", "ep")
VERDICTS = ("exact", "close", "refused", "crash", "wrong")
HEADER = (
    PUBLISHED
    + """

Written by `python -m tests.benchmarks.families --published`: {families} models with the architecture and all fields of
a published config.json, shrunk in size (`tests/benchmarks/families/published.json`, with the source of each).

{counts}

- trains: log-probs and gradients in the packed layout equal transformers' own pass. A number is the largest difference
  of a log-prob in nats.
- saves: fields of config.json, names and values of weights come back from `save_pretrained`, towers and ties too.
- resumes: an engine that loads a checkpoint goes on with the same weights.
- LoRA: `all-linear` adapters train, and merge into weights with the base model's names.
- engine: vLLM on a CPU loads changed, saved weights and takes an update. `close` is the mean difference of a log-prob
  where it is below what a run allows: in bfloat16 for gated delta nets, which it computes in no other type on CPUs.
- images: log-probs with images in the packed layout equal the family's own. Empty if it sees none.
- cp, tp, pp, ep: whether a run with context, tensor, pipeline or expert parallelism of 2 is allowed to start.

Reasons are the messages of Ballast, transformers or vLLM themselves.

"""
)


def published_section(
    families: dict[str, Published], found: dict[str, dict[str, Outcome]]
) -> str:
    """Write the section. found: outcomes by family and column; `all` if it could not be built."""
    built = {name: outcomes for name, outcomes in found.items() if "all" not in outcomes}
    counted = {
        column: Counter(
            outcomes[column].verdict for outcomes in built.values() if column in outcomes
        )
        for column in COLUMNS
    }
    counts = [
        [column, *(str(counted[column][verdict]) for verdict in VERDICTS)]
        for column in COLUMNS
    ]
    rows = []
    for name, outcomes in built.items():
        architecture = tiny_description(families[name])["architectures"][0]
        rows.append(
            [
                name,
                f"`{architecture}`",
                *(_cell(outcomes.get(column)) for column in COLUMNS),
            ]
        )
    text = HEADER.format(families=len(found), counts=_table(["", *VERDICTS], counts))
    text += _table(["model", "architecture", *COLUMNS], rows)
    reasons = _reasons(families, built)
    if reasons:
        text += "\n\nReasons:\n\n" + _table(["column", "reason", "models"], reasons)
    not_built = [
        f"- {name}: {_short(outcomes['all'].reason)}"
        for name, outcomes in found.items()
        if "all" in outcomes
    ]
    if not_built:
        text += "\n\nNot built:\n\n" + "\n".join(not_built)
    return text + "\n"


def replace_section(page: str, heading: str, section: str, *, before: str) -> str:
    """Return `page` with another section under `heading`, or a new one in front of the heading `before`."""
    start = page.find(heading)
    if start < 0:
        start = page.find(before)
        rest = page[start:]
    else:
        next_heading = page.find("\n## ", start)
        rest = page[next_heading + 1 :] if next_heading >= 0 else ""
    return (page[:start] + section.rstrip() + "\n\n" + rest).rstrip() + "\n"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None or outcome.verdict == "not there":
        return ""
    if outcome.verdict == "exact":
        return f"{outcome.difference:.0e}" if outcome.difference else "yes"
    return (
        f"{outcome.verdict} {outcome.difference:.2g}"
        if outcome.difference
        else outcome.verdict
    )


def _reasons(
    families: dict[str, Published], found: dict[str, dict[str, Outcome]]
) -> list[list[str]]:
    """Return a row a reason: its column, its text, and its models."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, outcomes in found.items():
        for column in COLUMNS:
            outcome = outcomes.get(column)
            if outcome is None or outcome.verdict in ("exact", "close", "not there"):
                continue
            cause = CAUSES.get(families[name].model_type) if column == "engine" else None
            reason = cause or _short(outcome.reason)
            # One that ends all columns.
            if column == "trains" or reason != _short(outcomes["trains"].reason):
                names.setdefault((column, reason), []).append(name)
    return [
        [column, reason, ", ".join(models)] for (column, reason), models in names.items()
    ]


def _short(reason: str) -> str:
    """Return a reason without the model's folder and type, and the first sentence alone."""
    words = [word for word in reason.split() if not MODEL.fullmatch(word)]
    sentence = " ".join(words).partition(". ")[0]
    return sentence.replace("|", "/").replace("<", "").replace(">", "").rstrip(".")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
