"""RewardWorker: decodes and scores finished samples while others are generated.

    block of tokens (object store) --decode--> response text --RewardProcess--> Score

In an episode the functions score the policy's last turn. Everything after the prompt is recorded.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workers.dataproto import DataProto
from workers.score import Score
from workers.user_code.rewards import RAW, Call, RewardFunction, RewardProcess


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score: a row of a block, and the record's columns that reward functions take."""

    row: int
    prompt_tokens: int
    columns: dict[str, Any]


class RewardWorker:
    def __init__(
        self, functions: Sequence[RewardFunction], tokenizer_path: str, *, timeout_s: float, concurrency: int
    ) -> None:
        from transformers import AutoTokenizer

        self._process = RewardProcess(functions, timeout_s=timeout_s, concurrency=concurrency)
        self._takes_raw = any(RAW in function.columns for function in functions)
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)

    def __repr__(self) -> str:
        return "reward"

    def ready(self) -> bool:
        return True

    def score(self, block: DataProto, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one Score per request, in order. `failure` says why scoring failed."""
        rows = [block.row(request.row) for request in requests]
        last = [row["input_ids"][last_turn(row["loss_mask"])] for row in rows]
        calls = [
            Call(i, self._text(ids), request.columns | self._raw(ids))
            for i, (ids, request) in enumerate(zip(last, requests, strict=True))
        ]
        scores = self._process.run(calls)
        return [
            replace(
                scores[i],
                response=self._text(row["input_ids"][request.prompt_tokens :]),
                turns=self._turns(row["input_ids"][request.prompt_tokens :], row["loss_mask"][request.prompt_tokens :]),
            )
            for i, (row, request) in enumerate(zip(rows, requests, strict=True))
        ]

    def _turns(self, ids: np.ndarray, loss_mask: np.ndarray) -> tuple[dict[str, str], ...]:
        return tuple({who: self._text(ids[part])} for who, part in turns(loss_mask))

    def _raw(self, ids: np.ndarray) -> dict[str, str]:
        return {RAW: str(self._tokenizer.decode(ids.tolist()))} if self._takes_raw else {}

    def _text(self, ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def turns(loss_mask: np.ndarray) -> list[tuple[str, slice]]:
    """(`policy` or `environment`, bounds) of each run of a bool `loss_mask`, in order, empty for one turn."""
    if loss_mask.all():
        return []
    bounds = [0, *(np.flatnonzero(loss_mask[1:] != loss_mask[:-1]) + 1).tolist(), len(loss_mask)]
    who = {True: "policy", False: "environment"}
    return [(who[bool(loss_mask[start])], slice(start, stop)) for start, stop in itertools.pairwise(bounds)]


def last_turn(loss_mask: np.ndarray) -> slice:
    """Return the bounds of the policy's last turn: the last run of True in `loss_mask`."""
    marked = np.flatnonzero(loss_mask)
    breaks = np.flatnonzero(np.diff(marked) > 1)
    first = marked[breaks[-1] + 1] if len(breaks) else marked[0]
    return slice(int(first), int(marked[-1]) + 1)
