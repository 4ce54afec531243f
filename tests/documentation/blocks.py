"""The fenced blocks of README.md, CONTRIBUTING.md, docs/ and the examples, and which of them are marked as
not run.

    ```bash    commands, a line each     ```yaml  settings     ```python  code or a session     other: not checked

A block after `<!-- not run: why -->` is one that needs what a test does not have: a GPU, a cluster, minutes.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)
FENCED = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block. page: relative to the root. why: what running it would need, or empty."""

    page: str
    number: int
    language: str
    body: str
    why: str

    @property
    def name(self) -> str:
        """Where it stands, for a test's name."""
        return f"{self.page}-{self.number}"


def blocks(language: str) -> list[Block]:
    """All blocks of one language, in every page."""
    return [
        block for page in PAGES for block in blocks_of(page) if block.language == language
    ]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of one page, in order."""
    for number, found in enumerate(FENCED.finditer(page.read_text(encoding="utf-8"))):
        name = str(page.relative_to(ROOT))
        yield Block(name, number, found["language"], found["body"], found["why"] or "")


def commands(body: str) -> list[list[str]]:
    """The commands of a bash block, as words: comments, `&&` and continued lines are resolved."""
    found = []
    for line in body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            found.append(words[:end])
            words = words[end + 1 :]
    return found
