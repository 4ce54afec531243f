"""Pages of `ballast template` in docs/conversations.md. `python -m tests.documentation.template_pages` writes
them.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from ballast.pages.template import PLACEHOLDERS
from controller.lifecycle.template_report import Examined, examine, page
from workers.chat_templates import Template
from workers.rendering import Options

PAGE = Path(__file__).parents[2] / "docs" / "conversations.md"
STOCK = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
SHOWN = (
    *("qwen3", "qwen3_5_think", "qwen3_8", "gptoss", "glm4moe"),
    *("nemotron_3_nano", "deepseekv3", "llama3_1", "gemma3", "gemma4_v5"),
)
BLOCK = re.compile(
    r"(?<=<!-- pages of `ballast template` -->\n)```text\n.*?```\n", re.DOTALL
)


def examined(name: str, options: Options | None = None) -> Examined:
    """The findings about a stock template of TRL."""
    template = Template((STOCK / f"{name}.jinja").read_text(), PLACEHOLDERS)
    found = examine(
        template, [], options or {}, f"the chat template of {name}.jinja", 120.0
    )
    assert found is not None
    return found


def block() -> str:
    pages = [
        "\n".join([f"$ ballast template {name}.jinja", *page(examined(name))])
        for name in SHOWN
    ]
    return "```text\n" + "\n\n".join(pages) + "\n```\n"


if __name__ == "__main__":
    new = block()
    PAGE.write_text(BLOCK.sub(lambda _: new, PAGE.read_text()))
