"""An agent that answers questions about prices. It asks a SQLite database by SQL.

OPENAI_API_KEY=... python examples/agent/agent.py "73 in shop 95?"
"""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from openai import OpenAI

DATABASE = Path(__file__).resolve().with_name("cache") / "prices.db"
MODEL = "gpt-4o-mini"
TURNS = 3
ROWS = 20
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "query",
            "description": "Ask the table prices (item, shop, price) by SQL.",
            "parameters": {
                "type": "object",
                "properties": {"sql": {"type": "string"}},
                "required": ["sql"],
            },
        },
    }
]


def query(sql: str) -> str:
    """Return the rows that SQLite finds, a line each. Statements that do more than read are refused."""
    with closing(sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True)) as database:
        database.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY
        )
        rows = database.execute(sql).fetchmany(ROWS)
    return "\n".join(" ".join(map(str, row)) for row in rows)


def answer(client: OpenAI, messages: list[Any]) -> str:
    """Return the model's answer, after it has called the tool as often as it likes."""
    for _ in range(TURNS):
        said = (
            client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            .choices[0]
            .message
        )
        messages.append(said)
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            assert call.type == "function"
            try:
                result = query(**json.loads(call.function.arguments))
            except Exception as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said.content or ""


def run(
    record: dict[str, Any], base_url: str | None = None, api_key: str | None = None
) -> None:
    """Answer the question of a record."""
    answer(OpenAI(base_url=base_url, api_key=api_key), list(record["prompt"]))


if __name__ == "__main__":
    print(answer(OpenAI(), [{"role": "user", "content": sys.argv[1]}]))
