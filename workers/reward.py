"""RewardWorker: decodes finished samples and scores them, beside generation.

block of tokens (object store) --decode--> response text --reward function--> Score
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.errors import DataError
from workers.remote_batch import TokenBlock


@dataclass(frozen=True)
class Score:
    """What a reward function said of one sample.

    `parts`: further numbers it returned by name, logged beside the reward. `response`: the text that it saw. `answer`:
    what it read from the response, if it says so; responses with the same answer vote together in validation.
    """

    reward: float
    response: str
    parts: dict[str, float] = field(default_factory=dict)
    answer: str = ""


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score: row `row` of a block, whose first `prompt_tokens` tokens are the prompt.

    `arguments`: what the reward function asks for by name, beside `response`.
    """

    row: int
    prompt_tokens: int
    arguments: dict[str, Any]


class RewardWorker:
    """An actor that holds a tokenizer and one reward function."""

    def __init__(self, function: Callable[..., Any], tokenizer_path: str) -> None:
        from transformers import AutoTokenizer

        self._function = function
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)

    def ready(self) -> bool:
        """True once the worker is built."""
        return True

    def score(self, block: TokenBlock, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One Score for each request, in order. Raises DataError if the function returns no finite reward."""
        return [self._score(block, request) for request in requests]

    def _score(self, block: TokenBlock, request: ScoreRequest) -> Score:
        ids = block.row(request.row)["input_ids"][request.prompt_tokens :]
        response = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return as_score(self._function(response=response, **request.arguments), response)


def as_score(value: Any, response: str) -> Score:
    """A Score from what a reward function returned: a number, or a mapping with `reward`, other numbers and, if it
    likes, the text `answer`.

    Raises DataError if it is neither or not finite.
    """
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise DataError(f"the reward function returned a mapping without 'reward': {sorted(parts)}.")
    answer = str(parts.pop("answer", ""))
    try:
        numbers = {name: float(part) for name, part in parts.items()}
    except (TypeError, ValueError):
        raise DataError(f"the reward function must return numbers, it returned {value!r} for {response!r}.") from None
    reward = numbers.pop("reward")
    if reward - reward != 0:  # NaN and infinities
        raise DataError(f"the reward function returned {reward} for {response!r}.")
    return Score(reward, response, numbers, answer)
