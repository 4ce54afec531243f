"""The pictures of a run in docs/, taken from its report by Chromium.

    python -m controller.fit --config examples/addition/config.yaml run.name=addition
    python -m tests.documentation.pictures runs/addition

runs/NAME/report.html, made anew --up to "Lengths"-->         docs/run.png     of the first page
                                 --up to "Slowest samples"--> docs/report.png  of Watching a run
"""

import argparse
import tempfile
from pathlib import Path

from controller.observability.report import write_report
from tests.browser import Browser, browser
from tests.documentation.blocks import ROOT

WIDTH = 1200
"""Pixels: more than a page shows, so that letters are sharp on good screens."""
ENDS = {"run.png": "Lengths", "report.png": "Slowest samples"}
"""Before which heading a picture ends."""


def top_of(shown: Browser, heading: str) -> float:
    """Pixels from the top of the page to where the section before that heading ends."""
    found = (
        f"[...document.querySelectorAll('h2')].find(h2 => h2.textContent === {heading!r})"
    )
    return (
        float(shown.value(f"{found}.previousElementSibling.getBoundingClientRect().bottom"))
        + 20
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="folder of a run with validation, such as runs/addition"
    )
    report = write_report(parser.parse_args().folder)
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile) / "new") as shown:
        shown.open(report.resolve().as_uri(), width=WIDTH)
        for name, heading in ENDS.items():
            shown.picture(ROOT / "docs" / name, height=top_of(shown, heading))


if __name__ == "__main__":
    main()
