"""Agents with planted defects, and a clean one. Imported by the processes that run them."""

import random
from typing import Any

from openai import OpenAI


def _ask(record: dict[str, Any], base_url: str, api_key: str, text: str = "") -> str:
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": record["prompt"] + text}]
    return (
        client.chat.completions.create(model="policy", messages=messages)
        .choices[0]
        .message.content
        or ""
    )


def clean(record: dict[str, Any], base_url: str, api_key: str) -> float:
    return float(_ask(record, base_url, api_key).strip() == str(record["answer"]))


def unpaid(record: dict[str, Any], base_url: str, api_key: str) -> None:
    """Give no reward: reward functions do."""
    for _ in range(2):
        _ask(record, base_url, api_key)


def raises(record: dict[str, Any], base_url: str, api_key: str) -> float:
    return float(int(_ask(record, base_url, api_key)) == record["answer"])


def pays_everything(record: dict[str, Any], base_url: str, api_key: str) -> float:
    _ask(record, base_url, api_key)
    return 1.0


def observation_holds_answer(record: dict[str, Any], base_url: str, api_key: str) -> float:
    said = _ask(record, base_url, api_key, f" Hint: the answer is {record['answer']}.")
    return float(said.strip() == str(record["answer"]))


def not_repeatable(record: dict[str, Any], base_url: str, api_key: str) -> float:
    said = _ask(record, base_url, api_key, f" Case {random.SystemRandom().random():.6f}.")
    return float(said.strip() == str(record["answer"]))


DEFECTS = {
    "agent.raises": raises,
    "agent.pays_everything": pays_everything,
    "agent.observation_holds_answer": observation_holds_answer,
    "agent.not_repeatable": not_repeatable,
}
