"""1 for the right final answer. The transcript tells whether the policy called a tool."""

from typing import Any


def exact_match(
    response: str, answer: str, messages: list[dict[str, Any]]
) -> dict[str, float]:
    """Compare the text behind the last turn's thoughts."""
    right = float(response.rpartition("</think>")[2].strip() == answer)
    return {
        "reward": right,
        "called": float(any("tool_calls" in message for message in messages)),
    }
