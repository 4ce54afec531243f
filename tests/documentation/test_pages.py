"""The pages name what is there: settings, messages, files; and the site builds without a warning."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ballast.audit.checks import CHECKS
from ballast.audit.run_checks import RUN_CHECKS
from controller.config.file import settings
from controller.config.settings_page import PAGES as SETTINGS_PAGES
from controller.config.settings_page import settings_markdown
from tests.documentation.blocks import PAGES, ROOT

KEYS = [
    setting.key for _, schema in SETTINGS_PAGES.values() for setting in settings(schema())
]
EXTERNAL = ("http://", "https://", "mailto:", "#")


@pytest.mark.parametrize("argument", SETTINGS_PAGES)
def test_the_reference_of_settings_is_the_schemas(argument: str) -> None:
    page = (ROOT / "docs" / f"settings-{argument}.md".replace("-.", ".")).read_text(
        encoding="utf-8"
    )
    assert page == settings_markdown(argument), "run: make docs"
    assert all(
        f"| `{setting.key}` |" in page
        for setting in settings(SETTINGS_PAGES[argument][1]())
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(build, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    fetched = re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(https?://[^"]+)"', page)
    assert [address for address in fetched if "canonical" not in address] == [], (
        "a reader would need the network"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_linked_file_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if not link.startswith(EXTERNAL)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_is_named_exists(page: Path) -> None:
    sections = "|".join(dict.fromkeys(key.partition(".")[0] for key in KEYS))
    named = re.findall(
        rf"`((?:{sections})\.[a-z_0-9.]*\w)", page.read_text(encoding="utf-8")
    )
    if page.name == "migration.md":  # the left column has other systems' names
        rows = (
            line.split(" | ")[-1]
            for line in page.read_text(encoding="utf-8").splitlines()
            if line.startswith("|")
        )
        named = [
            name
            for row in rows
            for name in re.findall(rf"`((?:{sections})\.[a-z_0-9.]*\w)", row)
        ]
    unknown = [
        name
        for name in named
        if not any(key == name or key.startswith(f"{name}.") for key in KEYS)
    ]
    assert [name for name in unknown if not is_no_setting(name)] == []


AUDIT_CHECKS = (*CHECKS, *RUN_CHECKS)


def is_no_setting(name: str) -> bool:
    """A file's name that begins like a section, or a check of `ballast audit`."""
    return name in AUDIT_CHECKS or name.endswith(
        (".py", ".yaml", ".json", ".md", ".safetensors", ".log")
    )


def messages() -> list[str]:
    """Every text in the program, with `...` for what is filled in."""
    texts = []
    for path in [
        *ROOT.glob("controller/**/*.py"),
        *ROOT.glob("workers/**/*.py"),
        *ROOT.glob("balancing/**/*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "..."
                    for part in node.values
                )
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_messages_under_troubleshooting_are_the_programs() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]* [^`]*)`", page, re.M)
    assert len(quoted) > 15
    foreign = ("Authentication required",)
    program = "\n".join(messages())
    pieces = {
        piece.strip()
        for message in quoted
        if message not in foreign
        for piece in message.split("...")
    }
    assert (
        sorted(piece for piece in pieces if len(piece) > 3 and piece not in program) == []
    )
