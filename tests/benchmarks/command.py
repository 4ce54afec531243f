"""Options of a benchmark's command, and the page that it writes."""

import argparse
from pathlib import Path
from typing import Any

BEGIN = "<!-- measured -->\n"
END = "<!-- end of measured -->"


def read_options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Read options of the same types as their defaults: None is a path, a list takes several values."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        if isinstance(default, list):
            kind = type(default[0])
            parser.add_argument(f"--{name}", type=kind, nargs="*", default=default)
        else:
            kind = Path if default is None else type(default)
            parser.add_argument(f"--{name}", type=kind, default=default)
    return parser.parse_args()


def write_page(output: Path | None, text: str) -> None:
    """Write a page unless only its numbers are asked for."""
    if output:
        output.write_text(text, encoding="utf-8")


def replace_measured(page: Path, section: str) -> None:
    """Replace what stands between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + section + END + rest.partition(END)[2])
