"""Draw a recorded sample as a tree: who said what, what was sampled, and what it earned.

    Session.describe_turns --as_recorded--> row of samples.jsonl or validation/step-N.jsonl
    row --headline, entries--> [Entry] --draw_tree--> terminal, or report.html

A response, or an episode, is a tree of one path.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from controller.observability.run_folder import Row
from controller.observability.shown_text import redact, shorten

log = logging.getLogger(__name__)
SHOWN = 240  # characters of a text in a tree


@dataclass(frozen=True)
class Entry:
    """A message, a sampled turn, or a branch. facts: numbers of a turn. under: what a branch contains."""

    who: str
    text: str = ""
    facts: str = ""
    under: Sequence["Entry"] = ()


def summary(row: Row) -> dict[str, str]:
    """Return a sample's main numbers as text by name, without those that the row does not have."""
    nodes = row.get("session") or []
    turns = row.get("turns") or [{"policy": ""}]
    parents = {node["parent"] for node in nodes}
    numbers = {
        "turns": len(nodes)
        or sum(("policy" in turn) - ("inserted" in turn) for turn in turns),
        "branches": sum(node["number"] not in parents for node in nodes) or None,
        "dropped": sum(not node["kept"] for node in nodes) or None,
        "tokens": sum(node["tokens"] for node in nodes) or row.get("response_tokens"),
        "reward": row.get("reward"),
        "advantage": row.get("advantage"),
        "seconds": row.get("seconds"),
    }
    forms = {"reward": ".3f", "advantage": "+z.3f", "seconds": ".1f"}
    texts = {
        name: f"{value:{forms.get(name, ',')}}"
        for name, value in numbers.items()
        if value is not None
    }
    return texts | ({"failure": clean(row["failure"], SHOWN)} if "failure" in row else {})


def headline(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in summary(row).items())


def entries(row: Row, longest: int = SHOWN) -> list[Entry]:
    """Return a row's tree: a path, then the branches. longest: characters of a text."""
    if not (nodes := row.get("session")):
        turns = row.get("turns") or [{"policy": row.get("response", "")}]
        texts = [
            ("prompt", row.get("prompt", "")),
            *(part for turn in turns for part in turn.items()),
        ]
        return [Entry(who, clean(text, longest)) for who, text in texts]
    ordered = sorted(nodes, key=lambda node: (node["kept"], -node["number"]))
    # The first kept turn, or the first.
    goes_on = {node["parent"]: node["number"] for node in ordered}
    main = list[Entry]()
    branches = list[Entry]()
    paths: dict[int | None, list[Entry]] = {None: main}  # of the path that a turn is in
    for node in nodes:
        number = node["number"]
        parent = node["parent"]
        if goes_on[parent] == number:
            paths[number] = paths[parent]
        else:
            paths[number] = []
            origin = "from the start" if parent is None else f"after turn {parent + 1}"
            branches.append(Entry("branch", origin, under=paths[number]))
        paths[number] += [
            Entry(message["role"], clean(message["content"], longest))
            for message in node["messages"]
        ]
        paths[number].append(
            Entry(f"turn {number + 1}", clean(node["said"], longest), _facts(node, row))
        )
    return main + branches


def is_whole(row: Row) -> bool:
    """Whether a row can be drawn. Warns of one that is damaged."""
    try:
        return bool(headline(row)) and bool(entries(row))
    except Exception:  # damage can look like anything
        log.warning(
            "a recorded sample of step %s is damaged. It is left out", row.get("step", "?")
        )
        return False


def _facts(node: Row, row: Row) -> str:
    advantage = row.get("advantage")
    by_turn = row.get("advantages")
    turn = node.get("turn")
    if by_turn and turn is not None:
        advantage = by_turn[turn]
    facts = [
        "" if node["kept"] else "dropped",
        "replayed" if node["replayed"] else "",
        f"retried {node['joined']}x" if node["joined"] else "",
        f"{node['tokens']:,} tokens",
        f"version {'-'.join(map(str, dict.fromkeys(node['versions'])))}",
        "" if node["log_prob"] is None else f"log-prob {node['log_prob']:.3f}",
        node["finish_reason"],
        "" if node["reward"] is None else f"reward {node['reward']:.3f}",
        f"advantage {advantage:+z.3f}" if node["kept"] and advantage is not None else "",
    ]
    return ", ".join(filter(None, facts))


def clean(text: str, longest: int) -> str:
    """Return what a terminal may print of `text`: cut, without secrets and control characters."""
    excerpt = shorten(redact("\n".join(text.strip().splitlines())), longest).expandtabs(4)
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in excerpt
    )


def draw_tree(row: Row, title: str) -> Tree:
    """Draw a row for a terminal."""
    tree = Tree(Text(f"{title}\n{headline(row)}", "bold"), guide_style="dim")
    _grow(tree, entries(row))
    return tree


def _grow(tree: Tree, children: Sequence[Entry]) -> None:
    width = max((len(entry.who) for entry in children), default=0)
    for entry in children:
        line = Table.grid(padding=(0, 1))
        line.add_column(width=width, no_wrap=True)
        line.add_column(overflow="fold")
        between = "\n" if entry.text and entry.facts else ""
        line.add_row(
            Text(entry.who, "bold"),
            Text.assemble(entry.text, between, (entry.facts, "dim")),
        )
        _grow(tree.add(line), entry.under)
