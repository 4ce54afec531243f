"""Built-in reward functions, named in the settings as `reward.function: workers.reward_functions:math`.

Each takes the `response` and the record's columns that its parameters name. `reward.functions` combines
several.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from workers.math_answers import read_expected, read_response


def exact_match(response: str, answer: str) -> dict[str, float | str]:
    """1 if the response equals the answer, ignoring white space around them."""
    response_text = response.strip()
    return {"reward": float(response_text == answer.strip()), "answer": response_text}


def math(response: str, answer: Any) -> dict[str, float | str]:
    r"""1 if the last `\boxed{}` outside of thoughts, or the last expression, equals `answer` as mathematics.

    answer: LaTeX, a number or words. Raises DataError for None, and for a list of several.
    """
    expected = read_expected(answer)
    response_answer = read_response(response)
    # Voting needs one text for equal answers: the parsed expression's, not the response's.
    return {
        "reward": float(expected.equals(response_answer)),
        "answer": str(response_answer),
    }


def format_tags(response: str) -> float:
    """1 if the response is `<think>...</think><answer>...</answer>`, each tag once, with only white space
    outside.
    """
    once = all(
        response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")
    )
    form = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
    return float(once and re.fullmatch(form, response, re.DOTALL) is not None)


def last_match(
    response: str, pattern: str, values: Mapping[str, float] | None = None
) -> float:
    """Return the number in the last match's group, or its value by `values`. Raises ValueError without a
    match.
    """
    matches = [*re.finditer(pattern, response)]
    if not matches:
        raise ValueError(f"no match of {pattern!r}")
    return float(matches[-1][1]) if values is None else values[matches[-1][1].upper()]


def length(response: str) -> float:
    """Return minus the response's length in thousands of characters, to penalise long responses."""
    return -len(response) / 1000


def reasoning_gym(
    response: str, question: str, answer: str | None, metadata: dict[str, Any]
) -> dict[str, float | str]:
    """Score of Reasoning Gym, for records of `data.train: reasoning_gym:NAME`.

    Scores the text in the last `<answer>` tags, or without these the whole response. 0 if it cannot be read.
    """
    from reasoning_gym.utils import extract_answer

    name = metadata["source_dataset"]
    response_answer = extract_answer(response) or response.strip()
    if name in ("arc_agi", "rearc"):  # their boards are tuples, which records hold as lists
        metadata = metadata | {"output": tuple(map(tuple, metadata["output"]))}
    dataset = _dataset(name, json.dumps(metadata["options"], sort_keys=True))
    try:
        score = dataset.score_answer(
            response_answer, {"question": question, "answer": answer, "metadata": metadata}
        )
    except Exception:  # such as of prime_factorization, for words
        score = 0.0
    return {"reward": float(score), "answer": response_answer}


@cache
def _dataset(name: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(options))
