"""Write what a proof gave: one JSON, and a section of a page between two marks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.prove.outcome import Outcome

BEGIN = "<!-- tests.gpu.prove: begin -->"
END = "<!-- tests.gpu.prove: end -->"
RUN_COLUMNS = (
    "run",
    "mismatch by step",
    "reward, first and last",
    "start, s",
    "card idle, s",
    "step 1, s",
    "a warm step, s",
    "GiB",
)
PHASE_NAMES = {
    "rollout": ("prefill", "decode"),
    "log_probs": ("log_probs",),
    "update": ("update", "optimizer", "collectives"),
    "weights": ("transfer", "sleep_wake"),
    "step": ("step",),
}
"""Predicted phases that a measured one consists of."""


def save_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    path.write_text(
        json.dumps({"parts": [asdict(outcome) for outcome in outcomes]}, indent=2) + "\n"
    )


def earlier_outcomes(path: Path, names: Sequence[str]) -> list[Outcome]:
    """Return outcomes that an earlier proof saved, except those of parts with these names."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else []
    return [Outcome(**part) for part in parts if part["part"] not in names]


def write_section(path: Path, section: str) -> None:
    """Replace the section of a page, or add it at the end. The page keeps everything else."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    block = f"{BEGIN}\n{section.rstrip()}\n{END}"
    parts = [part.strip("\n") for part in (before, block, after)]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def section_of(outcomes: Sequence[Outcome]) -> str:
    lines = ["## Proof of a card", "", *_versions(outcomes), "", *_verdicts(outcomes)]
    lines += [*_runs(outcomes), *_predictions(outcomes), *_benchmark(outcomes)]
    return "\n".join(lines)


def _versions(outcomes: Sequence[Outcome]) -> Iterator[str]:
    facts = next((outcome.facts for outcome in outcomes if outcome.part == "versions"), {})
    packages = ", ".join(
        f"{name} {number}" for name, number in facts.get("packages", {}).items()
    )
    cards = "; ".join(facts.get("cards", [])) or "no card"
    commit = facts.get("commit") or "no commit known"
    yield f"By `python -m tests.gpu.prove`, at {commit}: {cards}. Python {facts.get('python', '?')}, {packages}."


def _verdicts(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| part | | verdict | s | why, or what passed |"
    yield "| --- | --- | --- | --- | --- |"
    for outcome in outcomes:
        words = outcome.reason or _tests_in_words(outcome.facts)
        cells = [
            outcome.part,
            outcome.title,
            outcome.verdict,
            f"{outcome.seconds:.0f}",
            _cell(words),
        ]
        yield f"| {' | '.join(cells)} |"


def _tests_in_words(facts: dict[str, Any]) -> str:
    counts = facts.get("tests", {})
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _runs(outcomes: Sequence[Outcome]) -> Iterator[str]:
    runs = [outcome for outcome in outcomes if outcome.facts.get("mismatch")]
    if not runs:
        return
    yield ""
    yield "Mismatch is the mean difference of log-probs between engine and trainer, in nats, after each update."
    yield ""
    yield f"| {' | '.join(RUN_COLUMNS)} |"
    yield "| --- " * len(RUN_COLUMNS) + "|"
    for outcome in runs:
        facts = outcome.facts
        rewards = facts["rewards"]
        cells = [
            outcome.part,
            ", ".join(f"{value:.2g}" for value in facts["mismatch"]),
            f"{rewards[0]:.3g}, {rewards[-1]:.3g}",
            f"{facts['start_s']:.0f}",
            f"{facts['card_idle_s']:.0f}" if facts["card_idle_s"] else "",
            f"{facts['first_step_s']:.1f}",
            f"{facts['phases'].get('step', 0):.2f}",
            f"{facts['peak_gib']:.1f}" if facts["peak_gib"] else "",
        ]
        yield f"| {' | '.join(cells)} |"


def _predictions(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        predicted = outcome.facts.get("predicted")
        if not predicted:
            continue
        yield ""
        yield f"`{outcome.part}`: seconds of a step, measured and as the dry run predicts them."
        yield ""
        yield "| phase | measured | predicted |"
        yield "| --- | --- | --- |"
        for name, seconds in outcome.facts["phases"].items():
            if name in PHASE_NAMES:
                expected = sum(predicted.get(phase, 0.0) for phase in PHASE_NAMES[name])
                yield f"| {name} | {seconds:.2f} | {expected:.2f} |"
        rate = outcome.facts.get("update_tokens_per_s", 0)
        share = outcome.facts.get("update_mfu", 0.0)
        yield ""
        yield f"Its fastest update takes {rate:,} tokens/s, {share:.1%} of the peak."
        yield from (f"    {line}" for line in outcome.facts.get("predicted_memory", []))


def _benchmark(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if text := outcome.facts.get("text"):
            yield ""
            yield from (line for line in text.splitlines() if line.startswith("|"))
