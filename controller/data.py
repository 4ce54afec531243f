"""Prompts: JSONL records, tokenized once, dealt to steps by a seeded shuffle.

record --chat template or tokenizer--> Prompt       batch(step) is a pure function of (seed, step)
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workers.errors import DataError

DATA_ORDER = 0  # sets this random stream apart from others of the same seed


@dataclass(frozen=True)
class Prompt:
    """One record: its place in the stream (`uid`), its tokens (int32 [P]), and its columns for the reward function."""

    uid: str
    ids: np.ndarray
    columns: dict[str, Any]


def read_records(path: str, prompt_key: str) -> list[dict[str, Any]]:
    """The records of a JSONL file. Raises DataError naming the file and line of what is not a record with a prompt."""
    records = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # also of bytes that are not UTF-8
                raise DataError(f"{path}:{number} is not JSON: {error}.") from None
            if not isinstance(record, dict) or prompt_key not in record:
                raise DataError(f"{path}:{number} has no {prompt_key!r}; set data.prompt_key to the prompt's column.")
            records.append(record)
    if not records:
        raise DataError(f"{path} has no records.")
    return records


class PromptDataset:
    """Prompts of one file, in a fixed or freshly shuffled order every epoch."""

    def __init__(
        self,
        records: list[dict[str, Any]],
        tokenizer: Any,
        *,
        prompt_key: str,
        max_prompt_tokens: int,
        over_long: str = "drop",
        shuffle: bool = True,
        seed: int = 0,
        name: str = "data",
    ) -> None:
        """Tokenize `records`. Prompts above `max_prompt_tokens` are dropped and counted, or refused.

        Raises DataError on a prompt that is too long with over_long="error", empty, or of the wrong type, and when
        nothing is left.
        """
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, np.ndarray] = {}
        self._rows: list[tuple[np.ndarray, dict[str, Any]]] = []
        self.dropped = 0
        for index, record in enumerate(records):
            ids = tokenize(tokenizer, record[prompt_key], where=f"{name} record {index}")
            if len(ids) > max_prompt_tokens:
                if over_long == "error":
                    raise DataError(
                        f"{name} record {index} has {len(ids)} prompt tokens; raise data.max_prompt_tokens "
                        f"({max_prompt_tokens}) or set data.over_long=drop."
                    )
                self.dropped += 1
                continue
            self._rows.append((ids, record))
        if not self._rows:
            raise DataError(f"{name}: all {len(records)} prompts are longer than data.max_prompt_tokens.")

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The `size` prompts of step `step` (from 0); a new epoch begins wherever the last one ends."""
        return [self._at(position) for position in range(step * size, (step + 1) * size)]

    def __iter__(self) -> Iterator[Prompt]:
        """Every prompt once, in file order."""
        for index, (ids, record) in enumerate(self._rows):
            yield Prompt(f"{index}", ids, record)

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._rows))
        ids, record = self._rows[self._order(epoch)[index]]
        return Prompt(f"{position}", ids, record)

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._rows))
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng((self._seed, DATA_ORDER, epoch)).permutation(len(self._rows))}
        return self._orders[epoch]


def tokenize(tokenizer: Any, prompt: Any, *, where: str) -> np.ndarray:
    """Token ids int32 [P] of a string, or of chat messages through the tokenizer's chat template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{where} is a list of chat messages, but the tokenizer of model.path has no chat template."
            )
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    else:
        raise DataError(f"{where} has a prompt of type {type(prompt).__name__}; a string or chat messages are needed.")
    if len(ids) == 0:
        raise DataError(f"{where} has an empty prompt.")
    return np.asarray(ids, dtype=np.int32)
