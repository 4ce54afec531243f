"""The table of docs/templates.md: `python -m tests.workers.rollout.history_page > docs/templates.md`."""

from tests.workers.episodes.test_history import ANSWERS, KINDS, Case, outcome
from tests.workers.rollout import stock_templates as stock

INTRODUCTION = """\
# Chat templates and what they change

What the 41 stock chat templates of TRL 1.16 make of a turn once a message follows it, by `rollout.history`
([conversations](conversations.md#history)). `tests/workers/episodes/test_history.py` plays each case, and compares the
tokens of both ways with the template's own rendering.

- *same*: the template appends. `keep` and `template` give the same row.
- *branch*: the template changes what came before. `template` makes a new row, `keep` appends.
- *refused*: the template does not take or does not show a tool's answer. Answer with a user's message.

"Thinking" is a turn with a thought, "call" a turn that calls a tool. Before a tool's answer each turn calls a tool.

"""
WORDS = {
    ("appended", "appended"): "same",
    ("appended", "rewritten"): "branch",
    ("refused", "refused"): "refused",
}


def page() -> str:
    columns = [(role, kind) for role in ANSWERS for kind in KINDS]
    heads = " | ".join(
        f"{role} after {kind.removeprefix('tool ')}" for role, kind in columns
    )
    lines = [f"| template | {heads} |", f"| --- |{' --- |' * len(columns)}"]
    for name in stock.NAMES:
        cells = [WORDS[outcome(Case(name, *column))] for column in columns]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
