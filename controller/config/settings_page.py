"""`python -m controller.config.settings_page > docs/settings.md`: the reference of all settings, made from the schema.

dataclass fields --settings--> key | type | default | allowed | documentation, a table for each section
"""

from dataclasses import is_dataclass
from typing import Any

from controller.config.file import Numbers, Options, Setting, settings, value_of
from controller.config.schema import Config

HEAD = """\
# Settings

Made from the dataclasses in `controller/config/sections.py` and `workers/config.py` by
`python -m controller.config.settings_page > docs/settings.md`; a test holds this page to them. In YAML a dot nests:
`policy.optimizer.beta1` is `policy: {optimizer: {beta1: ...}}`. Any setting can be given behind the command, as in
`policy.max_tokens=16384`. A setting that would do nothing in a combination is refused.
"""
TABLE = "| key | type | default | what it does |\n| --- | --- | --- | --- |\n"


def settings_markdown() -> str:
    """The whole page."""
    config, sections = Config(), dict[str, list[Setting]]()
    for setting in settings(config):
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    parts = [_section(name, value_of(config, name), found) for name, found in sections.items()]
    return "\n".join([HEAD, *parts])


def _section(name: str, section: Any, found: list[Setting]) -> str:
    level = "##" if "." not in name else "###"
    rows = "\n".join(_row(setting) for setting in found)
    return f"{level} {name}\n\n{_introduction(section)}{TABLE}{rows}\n"


def _introduction(section: Any) -> str:
    """The docstring of a section's class; dataclasses without one get a signature from Python, which says nothing."""
    doc = type(section).__doc__ or ""
    if not is_dataclass(section) or doc.startswith(f"{type(section).__name__}("):
        return ""
    return " ".join(doc.split()) + "\n\n"


def _row(setting: Setting) -> str:
    allowed = f" {_allowed(setting)}" if setting.range else ""
    return f"| `{setting.key}` | {_type(setting)} | {_default(setting)} | {_escaped(setting.doc)}{allowed} |"


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
    print(settings_markdown(), end="")
