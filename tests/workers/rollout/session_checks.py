"""What the rows of sessions must be: the engine's answers, each once, behind the ids that the engine read."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tests.workers.rollout import tiny
from tests.workers.rollout.recorded_actor import Sampled
from workers.engine.requests import LENGTH, STOP

Row = dict[str, np.ndarray]
# Prompt, answer, log-probs.
Turn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


@dataclass
class Counts:
    """Of sessions. changed: turns that encoding changes. encoded_again: prompts with a turn's text, not its
    ids.
    """

    sessions: int = 0
    turns: int = 0
    continued: int = 0
    roots: int = 0
    joined: int = 0
    dropped: int = 0
    changed: int = 0
    encoded_again: int = 0
    orphans: int = 0
    doubles: int = 0
    difference: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        both = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
        }
        return Counts(**(both | {"difference": max(self.difference, other.difference)}))


def paths(rows: list[Any]) -> list[Any]:
    """The rows to train on."""
    return rows if len(rows) == 1 else rows[1:]


def turns_of(rows: list[Row]) -> Iterator[Turn]:
    """The turns that the rows train, which no two have in one piece: new text comes between."""
    for row in paths(rows):
        mask, ids = row["loss_mask"], row["input_ids"].tolist()
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield (
                tuple(ids[:begin]),
                tuple(ids[begin:end]),
                tuple(row["rollout_log_probs"][begin:end].tolist()),
            )


def of_engine(sampled: Iterable[Sampled]) -> Counter[Turn]:
    """The answers that an engine finished, without those that it was told to stop."""
    finished = (each for each in sampled if each.finished in (STOP, LENGTH))
    return Counter(
        (each.prompt, tuple(each.ids), tuple(np.float32(each.log_probs).tolist()))
        for each in finished
    )


def counts(
    rows: list[Row], told: list[dict[str, Any]], tokenizer: Any, model: Any
) -> Counts:
    """Of one session. Orphans and doubles need the engine's records: see `against`."""
    turns = list(turns_of(rows))
    encoded = [
        tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
        for _, ids, _ in turns
    ]
    nodes = [node for node in told if node["kept"]]
    return Counts(
        sessions=1,
        turns=len(nodes),
        continued=sum(node["parent"] is not None for node in nodes),
        roots=sum(node["parent"] is None for node in nodes),
        joined=sum(node["joined"] for node in nodes),
        dropped=len(told) - len(nodes),
        changed=sum(
            tuple(found) != ids for found, (_, ids, _) in zip(encoded, turns, strict=True)
        ),
        encoded_again=encoded_again(turns, tokenizer),
        difference=max(
            (tiny.largest_difference(row, model) for row in paths(rows)), default=0.0
        ),
    )


def encoded_again(turns: list[Turn], tokenizer: Any) -> int:
    """Prompts that begin with the text of an earlier turn and its prompt, but with other ids."""
    texts = [
        (tokenizer.decode([*prompt, *ids]), [*prompt, *ids]) for prompt, ids, _ in turns
    ]
    found = 0
    for prompt, _, _ in turns:
        text = tokenizer.decode(prompt)
        extended = [
            ids for begun, ids in texts if len(begun) < len(text) and text.startswith(begun)
        ]
        found += bool(extended) and not any(
            list(prompt[: len(ids)]) == ids for ids in extended
        )
    return found


def against(
    engine: Counter[Turn], rows_of_sessions: list[list[Row]], dropped: int
) -> tuple[int, int]:
    """Orphans and doubles: answers of the engine that no session has, and turns that no answer of the engine
    is.
    """
    trained = Counter(turn for rows in rows_of_sessions for turn in turns_of(rows))
    return (engine - trained).total() - dropped, (trained - engine).total()


def table(named: dict[str, Counts]) -> str:
    columns = [each.name for each in fields(Counts)]
    lines = ["client " + " ".join(columns)]
    for name, found in {**named, "all": sum(named.values(), Counts())}.items():
        lines.append(
            f"{name} " + " ".join(f"{getattr(found, column):.3g}" for column in columns)
        )
    return "\n".join(lines)
