"""RewardWorker: decodes and scores finished samples while others are generated.

    block of tokens (object store) --decode--> response text --RewardProcess--> Score

In an episode the functions score the policy's last turn. Everything after the prompt is recorded.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import PlacedImage
from workers.batch.remote_batch import fetch_images
from workers.batch.score import LONGEST_SENT, RAW, Score
from workers.engine.requests import INSERTED, NOT_SAMPLED
from workers.roles.text_decoder import load_decoder
from workers.user_code.pictures import Pictures
from workers.user_code.rewards import Call, RewardFunction, RewardProcess


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score: a row of a block, and the record's columns that reward functions take.

    images: of the record, which become its column `image_key`. texts: whether a response above LONGEST_SENT
    tokens is sent back as text, too.
    """

    row: int
    prompt_tokens: int
    columns: dict[str, Any]
    images: tuple[PlacedImage, ...] = ()
    image_key: str = ""
    texts: bool = True


class RewardWorker:
    def __init__(
        self,
        functions: Sequence[RewardFunction],
        tokenizer_path: str,
        *,
        timeout_s: float,
        concurrency: int,
        backend: str = "",
    ) -> None:
        """backend: of the tokenizer at `tokenizer_path`, see `text_decoder.serialize`."""
        self._process = RewardProcess(
            functions, timeout_s=timeout_s, concurrency=concurrency
        )
        self._takes_raw = any(RAW in function.columns for function in functions)
        self._tokenizer = load_decoder(tokenizer_path, backend)

    def __repr__(self) -> str:
        return "reward"

    def ready(self) -> bool:
        return True

    def score(self, block: DataProto, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one Score per request, in order. `failure` says why scoring failed."""
        rows = [block.row(request.row) for request in requests]
        last = [row["input_ids"][last_turn(row["weight_versions"])] for row in rows]
        images = fetch_images(object_column([request.images for request in requests]))
        calls = [
            Call(
                i,
                _text(self._tokenizer, ids),
                request.columns | _pictures(request, row_images) | self._raw(ids),
            )
            for i, (ids, request, row_images) in enumerate(
                zip(last, requests, images, strict=True)
            )
        ]
        scores = self._process.run(calls)
        scored = time.time()
        return [
            replace(scores[i], scored=scored, **self._read_texts(row, request))
            for i, (row, request) in enumerate(zip(rows, requests, strict=True))
        ]

    def _read_texts(
        self, row: Mapping[str, np.ndarray], request: ScoreRequest
    ) -> dict[str, Any]:
        if request.texts or len(row["input_ids"]) - request.prompt_tokens <= LONGEST_SENT:
            return texts_of(self._tokenizer, row, request.prompt_tokens)
        return {"response": ""}

    def _raw(self, ids: np.ndarray) -> dict[str, str]:
        return {RAW: str(self._tokenizer.decode(ids.tolist()))} if self._takes_raw else {}


def _pictures(request: ScoreRequest, images: Sequence[PlacedImage]) -> dict[str, Any]:
    return (
        {request.image_key: Pictures([placed_image.image.data for placed_image in images])}
        if images
        else {}
    )


def texts_of(
    tokenizer: Any, row: Mapping[str, np.ndarray], prompt_tokens: int
) -> dict[str, Any]:
    """Return `response` and `turns` of a sample's Score. row: of its block."""
    ids = row["input_ids"][prompt_tokens:]
    versions = row["weight_versions"][prompt_tokens:]
    turn_texts = tuple({who: _text(tokenizer, ids[part])} for who, part in turns(versions))
    return {"response": _text(tokenizer, ids), "turns": turn_texts}


def _text(tokenizer: Any, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def turns(versions: np.ndarray) -> list[tuple[str, slice]]:
    """(`policy`, `environment` or `inserted`, bounds) of each part of a response, in order, empty for a
    single one.
    """
    whose = np.minimum(versions, 0)
    bounds = [0, *(np.flatnonzero(whose[1:] != whose[:-1]) + 1).tolist(), len(versions)]
    who = {0: "policy", NOT_SAMPLED: "environment", INSERTED: "inserted"}
    parts = [
        (who[int(whose[start])], slice(start, stop))
        for start, stop in itertools.pairwise(bounds)
    ]
    return parts if len(parts) > 1 else []


def last_turn(versions: np.ndarray) -> slice:
    """Return the bounds of the policy's last turn, inserted tokens included."""
    marked = np.flatnonzero(versions != NOT_SAMPLED)
    breaks = np.flatnonzero(np.diff(marked) > 1)
    first = marked[breaks[-1] + 1] if len(breaks) else marked[0]
    return slice(int(first), int(marked[-1]) + 1)
