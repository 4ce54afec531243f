"""Sessions of an agent as `Session.describe_turns` gives them."""

from typing import Any


def node(
    number: int, parent: int | None, text: str, *asked: tuple[str, Any], **facts: Any
) -> dict[str, Any]:
    """A turn of 10 tokens that took half of every second."""
    return {
        "number": number,
        "parent": parent,
        "messages": [{"role": role, "content": found} for role, found in asked],
        "said": {"role": "assistant", "content": text},
        "given_tokens": 20,
        "tokens": 10,
        "log_prob": -0.25,
        "versions": [3, 3],
        "finish_reason": "stop",
        "kept": True,
        "replayed": False,
        "joined": 0,
        "reward": None,
        "turn": number,
        "began": float(number),
        "seconds": 0.5,
    } | facts


CALL = {"function": {"name": "sql", "arguments": '{"query": "select 1"}'}}
CHAIN = [
    node(
        0,
        None,
        "hm",
        ("system", "be brief"),
        ("user", [{"type": "text", "text": "how many?"}, {"type": "image"}]),
    ),
    node(
        1,
        0,
        "",
        ("tool", "7"),
        said={"reasoning": "a number", "content": None, "tool_calls": [CALL]},
        versions=[3, 4],
    ),
    node(2, 1, "seven", ("tool", "1"), finish_reason="length", log_prob=None),
]
FORKED = [
    node(0, None, "plan", ("user", "begin"), replayed=True),
    node(1, 0, "abandoned", ("user", "go"), kept=False, turn=None),
    node(2, 0, "answered", ("user", "go"), joined=2, turn=1),
    node(3, None, "compacted", ("user", "in short"), turn=3, began=2.25),
    node(4, 2, "done", ("user", "more"), reward=0.5, turn=2),
]
"""A turn that was replayed, a retry that was dropped, one that was joined, and history that was rewritten."""
