"""Users' orders of the prompts, in processes of their own, so that they cannot block or end the driver.

records, epoch --data.curriculum--> record numbers of the epoch
records, count, state, results --data.sampler--> record numbers of the next prompts, state
        rewards since the last call --^            checkpoints keep the state <--'
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from controller.data.prompts import Prompt, PromptDataset
from controller.data.records import Record
from workers.errors import DataError, quoted
from workers.user_code.functions import IsolatedFunction, UserFunction

SAMPLER_TAKES = ("records", "count", "state", "results", "rng")
SAMPLER = 1  # separates this random stream from others with the same seed
Results = list[tuple[int, list[float]]]
"""Record number and the rewards of its samples, in the order of the prompts."""


def isolated_order(found: UserFunction, timeout_s: float, records: list[Record], epoch: int) -> np.ndarray:
    """Return record numbers by data.curriculum: int64 [prompts of the epoch].

    Raises ConfigError if it fails, DataError for other values.
    """
    with closing(IsolatedFunction(f"data.curriculum for epoch {epoch}", found, timeout_s)) as order:
        return checked_numbers(order(records, epoch), len(records), f"data.curriculum for epoch {epoch}")


def checked_numbers(order: Any, records: int, key: str) -> np.ndarray:
    """Return `order` as int64 [prompts]. Raises DataError if it is empty or has numbers outside `records`."""
    numbers = np.asarray(order) if isinstance(order, (list, tuple, range, np.ndarray)) else np.empty(0)
    if numbers.ndim != 1 or len(numbers) == 0 or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError(f"{key}: it returned {quoted(order)}. It must return record numbers.")
    outside = numbers[(numbers < 0) | (numbers >= records)]
    if len(outside):
        raise DataError(f"{key}: it returned record {outside[0]} of {records} records. Return numbers below that.")
    return numbers.astype(np.int64)


class SampledPrompts:
    """Prompts that data.sampler chooses when they are needed. Places of the stream are numbered as in `Prompts`."""

    def __init__(self, dataset: PromptDataset, sampler: IsolatedFunction, seed: int) -> None:
        """sampler: with `records` bound."""
        self._dataset, self._sampler, self._seed = dataset, sampler, seed
        self.load(None, 0)

    def load(self, state: Mapping[str, Any] | None, position: int) -> None:
        """Continue from `state()`, or begin at a place of the stream. Raises DataError for records that are gone."""
        saved = state or {"first": position, "chosen": [], "state": {}, "results": []}
        self._first, self._chosen = saved["first"], list(saved["chosen"])
        self._state: Any = saved["state"]
        self._results: Results = [(number, list(rewards)) for number, rewards in saved["results"]]
        if self._chosen:
            checked_numbers(self._chosen, len(self._dataset), "data.sampler: the checkpoint's prompts")

    def state(self) -> dict[str, Any]:
        """Return what the next call depends on, and the prompts chosen so far, from place `first` on."""
        kept = {"first": self._first, "chosen": list(self._chosen)}
        return kept | {"state": self._state, "results": [list(each) for each in self._results]}  # JSON has no tuples

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return prompts from place `start` on. Chooses those beyond the last place, all in one call.

        Places from before data.sampler was set are those of the data set. Raises as `sampled`.
        """
        if (missing := start + count - self._first - len(self._chosen)) > 0:
            place, records = self._first + len(self._chosen), len(self._dataset)
            now = self._state, self._results, self._seed
            numbers, self._state = sampled(self._sampler, missing, *now, place, records)
            self._chosen, self._results = self._chosen + numbers, []
        return [self._at(place) for place in range(start, start + count)]

    def _at(self, place: int) -> Prompt:
        if place < self._first:
            return self._dataset.at(place)
        return self._dataset.prompt(f"{place}", self._chosen[place - self._first])

    def scored(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Keep groups' rewards, by uid, for the next call."""
        for uid in sorted(rewards, key=int):
            self._results.append((self._chosen[int(uid) - self._first], list(rewards[uid])))


def sampled(
    sampler: IsolatedFunction, count: int, state: Any, results: Results, seed: int, place: int, records: int
) -> tuple[list[int], Any]:
    """Return `count` record numbers for the stream from `place` on, and the new state.

    Raises ConfigError if the sampler fails, DataError for another value.
    """
    rng = np.random.default_rng((seed, SAMPLER, place))
    value = sampler(count=count, state=state, results=results, rng=rng)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], list) or len(value[0]) != count:
        raise DataError(f"{sampler.key}: it returned {quoted(value)}. Return {count} record numbers, and a state.")
    return checked_numbers(value[0], records, sampler.key).tolist(), value[1]
