"""The site as a reader sees it: at a desk and on a telephone, in light and dark."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import (
    CONTRASTS,
    DESKTOP,
    START_S,
    TELEPHONE,
    WIDER,
    Browser,
    browser,
    needs_chromium,
)
from tests.documentation.blocks import ROOT

pytestmark = needs_chromium
READABLE = 4.5
"""Contrast that WCAG 2 asks of text."""
DRAWINGS = ("concepts", "step")
"""Pages with drawings."""
PAGES = ["404", *sorted(path.stem for path in (ROOT / "docs").glob("*.md"))]
LONGEST = ("index", "settings", "metrics")
"""Pages with most tables, which are looked at in every run of the tests. Others are drawn."""
BROKEN = """[...document.querySelectorAll('main :not(pre) > code')]
  .filter(code => code.textContent.length <= (code.closest('td') && !/[-/]/.test(code.textContent) ? 64 : 40))
  .filter(code => !/\\s/.test(code.textContent) && code.getClientRects().length > 1)
  .map(code => code.textContent)"""
"""Keys, options and short paths that stand on two lines; in tables also long keys."""
CUT = """[...document.querySelectorAll(
  ['bash', 'yaml', 'json', 'python'].map(language => `main .language-${language} pre > code`).join())]
  .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.textContent)"""
"""Blocks to copy that go on behind the right edge."""
HIDDEN = """[...document.querySelectorAll('main pre > code, main .keys .md-typeset__scrollwrap')]
  .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.textContent.slice(0, 80))"""
"""All blocks, and tables of settings and metrics, of which some is behind the right edge of a box that
scrolls.
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.drawn(10, always=LONGEST)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_on_a_telephone_and_at_a_desk(
    site: Path, reader: Browser, name: str
) -> None:
    """Within the screen's width, keys and commands whole; at a desk also diagrams, settings and metrics."""
    reader.open((site / f"{name}.html").as_uri(), width=TELEPHONE)
    assert reader.value(f"[{WIDER}, {BROKEN}, {CUT}]") == [0, [], []]
    reader.resize(DESKTOP)
    end = time.monotonic() + START_S
    while (at_a_desk := reader.value(f"[{WIDER}, {BROKEN}, {HIDDEN}]"))[
        0
    ] and time.monotonic() < end:
        time.sleep(0.05)  # the box of the search is still moving to its place
    assert at_a_desk == [0, [], []]


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("dark", [False, True])
def test_drawings_are_readable_in_both_states_of_the_switch_whatever_the_system_has(
    site: Path, reader: Browser, name: str, dark: bool
) -> None:
    reader.open((site / f"{name}.html").as_uri(), width=DESKTOP, dark=dark)
    schemes = set()
    for _ in range(2):
        reader.value(
            "document.querySelector('form[data-md-component=palette] label:not([hidden])').click()"
        )
        schemes.add(reader.value("document.body.dataset.mdColorScheme"))
        found = reader.value(CONTRASTS)
        assert len(found) > 10
        assert [text for text in found if text[1] < READABLE] == []
    assert schemes == {"default", "slate"}


def test_every_page_has_a_logo_and_leads_on(site: Path, reader: Browser) -> None:
    reader.open((site / "concepts.html").as_uri(), width=DESKTOP)
    assert reader.value("document.querySelector('.md-logo img').naturalWidth") > 0
    links = reader.value(
        "[...document.querySelectorAll('.md-footer__link')].map(link => link.href)"
    )
    assert [Path(link).name for link in links] == ["index.html", "step.html"]
    assert all((site / Path(link).name).is_file() for link in links), (
        "links work without a server"
    )


def test_search_finds_pages_without_a_server(site: Path, reader: Browser) -> None:
    reader.open((site / "index.html").as_uri(), width=DESKTOP)
    reader.value("""(() => {
        const query = document.querySelector('[data-md-component=search-query]');
        query.focus();
        query.value = 'Karmarkar';
        query.dispatchEvent(new Event('input', {bubbles: true}));
    })()""")
    found: list[str] = []
    end = time.monotonic() + START_S
    while not found and time.monotonic() < end:
        found = reader.value(
            "[...document.querySelectorAll('a.md-search-result__link')].map(link => link.href)"
        )
    assert any(link.startswith((site / "balancing.html").as_uri()) for link in found)
    assert (
        reader.value(
            "[...document.scripts].filter(script => script.src.startsWith('http')).length"
        )
        == 0
    )
