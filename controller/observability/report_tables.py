"""Tables of a run's report: samples by seconds, tokens and reward, the certificate, and trees of sessions."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.config import Config, TrainingConfig
from controller.config.training import count_noun
from controller.observability.certificates import read_certificate
from controller.observability.run_folder import Row, RunFolder
from controller.observability.session_tree import Entry, entries, headline, is_whole
from controller.observability.shown_text import redact, shorten

TEXT = 600  # characters of a prompt, or a response, in a table
SHOWN_SAMPLES = 12
IMAGE = re.compile(r"images/[0-9a-f]{16}\.png")
# Classes of the page's style sheet.
NUMBER = "n"
"""Right-aligned."""
CODE = "t"
"""In the letters of code."""
# Columns that hold the expected answer in common data sets, by preference.
EXPECTED = (
    "answer",
    "solution",
    "ground_truth",
    "label",
)
RESPONSE = {"prompt": CODE, "response": CODE}
SAMPLE = dict.fromkeys(("step", "sample", "tokens", "seconds", "reward"), NUMBER) | RESPONSE


@dataclass(frozen=True)
class Table:
    """columns: style-sheet class by name. rows: a text by column, and `images`, URLs that stand below the
    prompt.
    """

    title: str
    note: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]


def sample_tables(run: RunFolder) -> list[Table]:
    slowest = (
        "By the seconds from the engine's receipt of the request to its last token, among the recorded "
        "samples."
    )
    longest = "By tokens of the response."
    return [
        Table(
            "Slowest samples",
            slowest,
            SAMPLE,
            _rows(_most(run.samples, "seconds"), run.path),
        ),
        Table(
            "Longest samples",
            longest,
            SAMPLE,
            _rows(_most(run.samples, "response_tokens"), run.path),
        ),
        _by_reward(run),
    ]


def certificate_table(config: TrainingConfig) -> list[Table]:
    """Show what `ballast certify` said about the data and their reward."""
    certificate = (
        read_certificate(config.data.weights) if isinstance(config, Config) else None
    )
    if certificate is None:
        return []
    columns = dict.fromkeys(("level", "name", "problem", "place", "advice"), "")
    rows = [
        {name: redact(row.get(name, "")) for name in columns}
        for row in certificate.findings
    ]
    rows = rows or [dict.fromkeys(columns, "") | {"problem": "nothing found"}]
    return [Table("Certificate", redact(certificate.line), columns, rows)]


def _by_reward(run: RunFolder) -> Table:
    """Show the worst and best responses of the last validation, or without one of the last step's recorded
    samples.
    """
    step = max(run.validated_steps, default=0)
    responses = run.validation(step)
    title = "Held-out responses"
    origin = f"Validation at step {step}"
    if not responses:
        step = max((row["step"] for row in run.samples), default=0)
        responses = [row for row in run.samples if row["step"] == step and "reward" in row]
        title = "Samples by reward"
        origin = f"Recorded samples of step {step}"
    ordered = sorted(responses, key=_reward)
    half = SHOWN_SAMPLES // 2
    ends = ordered if len(ordered) <= SHOWN_SAMPLES else ordered[:half] + ordered[-half:]
    total = count_noun(len(responses), "response")
    note = f"{origin}: {len(ends)} of {total}, the lowest and the highest rewards."
    expected = {"expected": CODE} if any(map(expected_answer, ends)) else {}
    return Table(
        title, note, RESPONSE | expected | {"reward": NUMBER}, _rows(ends, run.path)
    )


def expected_answer(row: Row) -> str:
    """Return the expected answer among the recorded columns, lines of `name: value`, or an empty string."""
    columns = dict(
        line.partition(": ")[::2] for line in str(row.get("record") or "").splitlines()
    )
    return next((columns[name] for name in EXPECTED if columns.get(name)), "")


def session_trees(run: RunFolder) -> list[tuple[str, list[Entry]]]:
    """Return (summary, tree) of the last step's recorded samples of several turns, as `ballast.pages.show`
    draws them.
    """
    last = max((row["step"] for row in run.samples), default=0)
    rows = enumerate(
        (row for row in run.samples if row["step"] == last and is_whole(row)), start=1
    )
    return [
        (redact(f"step {last}, session {number}: {headline(row)}"), entries(row, TEXT))
        for number, row in rows
        if "session" in row or "turns" in row
    ]


def _most(samples: Iterable[Row], name: str) -> list[Row]:
    return sorted(samples, key=lambda row: -(row[name] or 0))[:SHOWN_SAMPLES]


def _rows(samples: Iterable[Row], folder: Path) -> list[dict[str, Any]]:
    return [_page_row(row, folder) for row in samples]


def _page_row(row: Row, folder: Path) -> dict[str, Any]:
    files = [folder / name for name in IMAGE.findall(str(row.get("images")))]
    page_row: dict[str, Any] = {
        "step": f"{row.get('step', 0):,}",
        "sample": f"{row.get('uid', '')}/{row.get('sample', '')}",
        "tokens": f"{row.get('response_tokens') or 0:,}",
        "seconds": f"{row.get('seconds') or 0:.2f}",
        "reward": f"{_reward(row):.3f}",
        "expected": redact(shorten(expected_answer(row), TEXT)),
        "images": [as_url(file) for file in files if file.is_file()],
    }
    for name in RESPONSE:
        page_row[name] = redact(shorten(str(row.get(name, "")), TEXT))
    return page_row


def as_url(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _reward(row: Row) -> float:
    return float("-inf") if row["reward"] is None else float(row["reward"])
