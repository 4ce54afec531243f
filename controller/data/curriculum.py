"""Users' orders of the prompts, in processes of their own, so that they cannot block or end the driver.

records, epoch --data.curriculum--> record numbers of the epoch
records, count, state, results --data.sampler--> record numbers of the next prompts, state
        rewards since the last call --^            checkpoints keep the state <--'
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from controller.data.prompts import Prompt, PromptDataset
from controller.data.records import Record
from workers.errors import DataError, quote
from workers.user_code.functions import IsolatedFunction, UserFunction

SAMPLER_TAKES = ("records", "count", "state", "results", "rng")
SAMPLER = 1  # separates this random stream from others with the same seed


def isolated_order(
    function: UserFunction, timeout_s: float, records: list[Record], epoch: int
) -> np.ndarray:
    """Return record numbers by data.curriculum: int64 [prompts of the epoch].

    Raises ConfigError if it fails, DataError for other values.
    """
    with closing(
        IsolatedFunction(f"data.curriculum for epoch {epoch}", function, timeout_s)
    ) as order:
        return check_numbers(
            order(records, epoch), len(records), f"data.curriculum for epoch {epoch}"
        )


def check_numbers(order: Any, records: int, key: str) -> np.ndarray:
    """Return `order` as int64 [prompts]. Raises DataError if it is empty or has numbers outside `records`."""
    numbers = (
        np.asarray(order)
        if isinstance(order, (list, tuple, range, np.ndarray))
        else np.empty(0)
    )
    if (
        numbers.ndim != 1
        or len(numbers) == 0
        or not np.issubdtype(numbers.dtype, np.integer)
    ):
        raise DataError(
            f"{key}: it returned {quote(order)}. It must return record numbers."
        )
    outside = numbers[(numbers < 0) | (numbers >= records)]
    if len(outside):
        raise DataError(
            f"{key}: it returned record {outside[0]} of {records} records. Return numbers below that."
        )
    return numbers.astype(np.int64)


class SampledPrompts:
    """Prompts that data.sampler chooses when they are needed. Places of the stream are numbered as in
    `Prompts`.

    kept: what the next call depends on, and the prompts chosen so far, from place `first` on. Never changed
    in place.
    """

    def __init__(
        self, dataset: PromptDataset, sampler: IsolatedFunction, seed: int
    ) -> None:
        """sampler: with `records` bound."""
        self._dataset = dataset
        self._sampler = sampler
        self._seed = seed
        self.kept = nothing_chosen(0)

    def load(self, state: dict[str, Any] | None, position: int) -> None:
        """Continue from `state`, or begin at a place of the stream. Raises DataError for records that are
        gone.
        """
        self.kept = state or nothing_chosen(position)
        if self.kept["chosen"]:
            check_numbers(
                self.kept["chosen"],
                len(self._dataset),
                "data.sampler: the checkpoint's prompts",
            )

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return prompts from place `start` on. Chooses those beyond the last place, all in one call.

        Places from before data.sampler was set are those of the data set. Raises as `choose`.
        """
        if (missing := start + count - self.kept["first"] - len(self.kept["chosen"])) > 0:
            self.kept = choose(
                self._sampler, self.kept, missing, self._seed, len(self._dataset)
            )
        return [
            self._at(place, place - self.kept["first"])
            for place in range(start, start + count)
        ]

    def _at(self, place: int, index: int) -> Prompt:
        dataset = self._dataset
        return (
            dataset.at(place)
            if index < 0
            else dataset.prompt(f"{place}", self.kept["chosen"][index])
        )

    def keep_rewards(self, rewards: Mapping[str, list[float]]) -> None:
        """Keep groups' rewards, by uid, for the next call."""
        first = self.kept["first"]
        chosen = self.kept["chosen"]
        results = [
            [chosen[int(uid) - first], rewards[uid]]
            for uid in sorted(rewards, key=int)
            if int(uid) >= first
        ]
        self.kept = self.kept | {"results": self.kept["results"] + results}


def nothing_chosen(place: int) -> dict[str, Any]:
    return {"first": place, "chosen": [], "state": {}, "results": []}


def choose(
    sampler: IsolatedFunction, state: dict[str, Any], count: int, seed: int, records: int
) -> dict[str, Any]:
    """Return `state` after the choice of `count` more records.

    Raises ConfigError if the sampler fails, DataError for another value.
    """
    rng = np.random.default_rng((seed, SAMPLER, state["first"] + len(state["chosen"])))
    value = sampler(count=count, state=state["state"], results=state["results"], rng=rng)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not isinstance(value[0], list)
        or len(value[0]) != count
    ):
        raise DataError(
            f"{sampler.key}: it returned {quote(value)}. Return {count} record numbers, and a state."
        )
    numbers = check_numbers(value[0], records, sampler.key).tolist()
    return state | {"chosen": state["chosen"] + numbers, "state": value[1], "results": []}
