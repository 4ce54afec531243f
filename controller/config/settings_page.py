"""`python -m controller.config.settings_page [COMMAND]`: print the reference of a command's settings.

dataclass fields --settings--> key | type | default | allowed | documentation, a table for each section
"""

import sys
from dataclasses import is_dataclass
from typing import Any

from controller.config.conditions import Conditions, effect_words
from controller.config.file import LARGEST_FLOAT, LARGEST_INT, Setting, settings, value_of
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.config.schema import Config
from controller.config.training import TrainingConfig
from controller.config.value_types import Biases, Numbers, Options

HEAD = """\
# {title}

Made from the dataclasses in `controller/config` and `workers` by
`python -m controller.config.settings_page{argument} > docs/{file}`. A test holds this page to them. \
In YAML dots nest:
`policy.optimizer.beta1` is `policy: {{optimizer: {{beta1: ...}}}}`. Any setting can be given behind the \
command, as in
`run.steps=200`. A setting that would do nothing in a combination is refused: "Only with" says what it \
needs. Where no
maximum is given, whole numbers are at most {largest_int:,} and others at most {largest_float:,.0f} in \
size. Numbers are
read in base 10.
"""


PAGES: dict[str, tuple[str, type[TrainingConfig]]] = {
    "": ("Settings", Config),
    "sft": ("Settings of supervised fine-tuning", SftConfig),
    "preferences": ("Settings of preference optimisation", PreferencesConfig),
    "reward-model": ("Settings of reward model training", RewardTrainingConfig),
}
"""Title and schema, by the argument of this module."""
TABLE = """\
<div class="keys settings" markdown>

| key | type | default | what it does |
| --- | --- | --- | --- |
{rows}

</div>
"""
"""Classes of docs/stylesheets/extra.css, which turns each row into a paragraph on a narrow screen."""


def settings_markdown(argument: str = "") -> str:
    """Write one of PAGES in full."""
    title, schema = PAGES[argument]
    config = schema()
    sections = dict[str, list[Setting]]()
    for setting in settings(config):
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    parts = [
        _section(name, value_of(config, name), section_settings, config.conditions)
        for name, section_settings in sections.items()
    ]
    head = HEAD.format(
        title=title,
        file=f"settings-{argument}.md" if argument else "settings.md",
        argument=f" {argument}" if argument else "",
        largest_int=LARGEST_INT,
        largest_float=LARGEST_FLOAT,
    )
    return "\n".join([head, *parts])


def _section(
    name: str, section: Any, section_settings: list[Setting], conditions: Conditions
) -> str:
    level = "##" if "." not in name else "###"
    shared = list(section_settings[0].only_with)
    for setting in section_settings:
        shared = [condition for condition in shared if condition in setting.only_with]
    doc = type(section).__doc__ or ""
    # Python's signature.
    if not is_dataclass(section) or doc.startswith(f"{type(section).__name__}("):
        doc = ""
    introduction = f"{' '.join(doc.split())} {effect_words(conditions, shared)}".strip()
    effects = []
    for setting in section_settings:
        further = [condition for condition in setting.only_with if condition not in shared]
        effects.append(effect_words(conditions, further))
    rows = "\n".join(map(_row, section_settings, effects))
    return "\n\n".join(
        filter(None, [f"{level} {name}", introduction, TABLE.format(rows=rows)])
    )


def _row(setting: Setting, effect: str) -> str:
    several: dict[type, str] = {
        Numbers: "numbers by name",
        Biases: "numbers by token id",
        Options: "values by name",
        list[str]: "list of texts",
        list[int]: "list of whole numbers",
    }
    kind = several.get(setting.type, setting.type_name)
    description = " ".join(filter(None, (setting.doc, _allowed(setting), effect))).replace(
        "|", "\\|"
    )
    return f"| `{setting.key}` | {kind} | {_default(setting)} | {description} |"


def _default(setting: Setting) -> str:
    if setting.required:
        return "must be set"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    return "empty" if setting.default in ("", {}, []) else f"`{setting.default}`"


def _allowed(setting: Setting) -> str:
    if setting.choices:
        return "One of " + ", ".join(f"`{choice}`" for choice in setting.choices) + "."
    return setting.range and f"{setting.range[0].upper()}{setting.range[1:]}."


if __name__ == "__main__":
    print(settings_markdown(*sys.argv[1:]), end="")
