"""`python -m controller.config.settings_page [COMMAND]`: print the reference of a command's settings.

dataclass fields --settings--> key | type | default | allowed | documentation, a table for each section
"""

import sys
from dataclasses import dataclass, is_dataclass
from typing import Any

from controller.config.conditions import Conditions, effect_words
from controller.config.file import LARGEST_FLOAT, LARGEST_INT, Numbers, Options, Setting, settings, value_of
from controller.config.offline import PreferencesConfig, SftConfig
from controller.config.schema import Config
from controller.config.training import TrainingConfig

HEAD = """\
# {title}

Made from the dataclasses in {sources} by
`python -m controller.config.settings_page{argument} > docs/{file}`; a test holds this page to them. In YAML dots nest:
`policy.optimizer.beta1` is `policy: {{optimizer: {{beta1: ...}}}}`. Any setting can be given behind the command, as in
`run.steps=200`. A setting that would do nothing in a combination is refused: "Only with" says what it needs. Where no
maximum is given, whole numbers are at most {largest_int:,} and others at most {largest_float:,.0f} in size. Numbers are
read in base 10.
"""


@dataclass(frozen=True)
class Page:
    """The settings of one command. sources: modules that declare them."""

    title: str
    schema: type[TrainingConfig]
    sources: str
    file: str


_OFFLINE = "`controller/config/offline.py`, `controller/config/sections.py` and `workers/config.py`"
PAGES = {
    "": Page("Settings", Config, "`controller/config/sections.py` and `workers/config.py`", "settings.md"),
    "sft": Page("Settings of supervised fine-tuning", SftConfig, _OFFLINE, "settings-sft.md"),
    "preferences": Page("Settings of preference optimisation", PreferencesConfig, _OFFLINE, "settings-preferences.md"),
}
"""By the argument of this module."""
BLANK = "\n\n"
TABLE = """\
<div class="keys settings" markdown>

| key | type | default | what it does |
| --- | --- | --- | --- |
{rows}

</div>
"""
"""The classes are those of docs/stylesheets/extra.css: on a narrow screen each row is a paragraph."""


def settings_markdown(argument: str = "") -> str:
    """Write one of PAGES in full."""
    page = PAGES[argument]
    config, sections = page.schema(), dict[str, list[Setting]]()
    for setting in settings(config):
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    parts = [_section(name, value_of(config, name), found, config.conditions) for name, found in sections.items()]
    head = HEAD.format(
        title=page.title,
        sources=page.sources,
        file=page.file,
        argument=f" {argument}" if argument else "",
        largest_int=LARGEST_INT,
        largest_float=LARGEST_FLOAT,
    )
    return "\n".join([head, *parts])


def _section(name: str, section: Any, found: list[Setting], conditions: Conditions) -> str:
    level = "##" if "." not in name else "###"
    shared = [each for each in found[0].only_with if all(each in setting.only_with for setting in found)]
    introduction = f"{_introduction(section)} {effect_words(conditions, shared)}".strip()
    own = [effect_words(conditions, (each for each in setting.only_with if each not in shared)) for setting in found]
    rows = "\n".join(map(_row, found, own))
    return f"{level} {name}\n\n{introduction}{introduction and BLANK}{TABLE.format(rows=rows)}"


def _introduction(section: Any) -> str:
    """Return the docstring of a section's class, without the signature that Python generates."""
    doc = type(section).__doc__ or ""
    if not is_dataclass(section) or doc.startswith(f"{type(section).__name__}("):
        return ""
    return " ".join(doc.split())


def _row(setting: Setting, effect: str) -> str:
    told = " ".join(filter(None, (setting.doc, setting.range and _allowed(setting), effect)))
    return f"| `{setting.key}` | {_type(setting)} | {_default(setting)} | {_escaped(told)} |"


def _type(setting: Setting) -> str:
    by_name: dict[type, str] = {Numbers: "numbers by name", Options: "values by name"}
    return by_name.get(setting.type, setting.type.__name__)


def _default(setting: Setting) -> str:
    if setting.required:
        return "must be set"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    return "empty" if setting.default in ("", {}) else f"`{setting.default}`"


def _allowed(setting: Setting) -> str:
    if setting.choices:
        return "One of " + ", ".join(f"`{choice}`" for choice in setting.choices) + "."
    return f"{setting.range[0].upper()}{setting.range[1:]}."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(settings_markdown(*sys.argv[1:]), end="")
