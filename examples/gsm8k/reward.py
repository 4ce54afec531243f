"""1 for the right final number, 0 otherwise."""

import re
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """The last number behind `####`, or None if there is none."""
    _, marker, tail = text.rpartition("####")
    found = NUMBER.findall(tail) if marker else []
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def reward(response: str, answer: str) -> dict[str, float]:
    """Compare the response's final number with `answer`.

    Returns `reward`, `exact_match`, and `formatted`: whether there is a final number at all.
    """
    number = final_number(response)
    exact = float(number is not None and number == Decimal(answer))
    return {"reward": exact, "exact_match": exact, "formatted": float(number is not None)}
