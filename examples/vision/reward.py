"""1 for the exact answer, otherwise half the share of dots that it names."""

from collections import Counter


def reward(response: str, solution: str) -> dict[str, float]:
    """Score `response` against `solution`, both `dots=number`.

    Returns `reward`, and `exact_match`: whether dots and number are right.
    """
    exact = float(response == solution)
    named, dots = (Counter(text.partition("=")[0]) for text in (response, solution))
    share = (named & dots).total() / max(named.total(), dots.total(), 1)
    return {"reward": exact or 0.5 * share, "exact_match": exact}
