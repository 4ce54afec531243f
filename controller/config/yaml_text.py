"""Read YAML as Ballast allows it: not nested too deep, numbers in base 10, references only to settings."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from workers.errors import ConfigError, clause

LONGEST_SHOWN = 100  # characters of a value in an error


def read_yaml(path: Path) -> DictConfig:
    if not path.is_file():
        exists = path.exists()
        problem = (
            f"{path} is a folder, a pipe or a device. Name a file"
            if exists
            else f"there is no file {path}"
        )
        raise ConfigError(f"--config: {problem}.")
    try:
        check_scalars(path.read_text(encoding="utf-8"), str(path))
        content = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {yaml_problem(error)}.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {yaml_problem(error)}. Correct the value.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a YAML text file: {yaml_problem(error)}."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deep to be read. Settings are nested 4 deep at most."
        ) from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path} must hold sections (`run:`, `model:`, ...), not a list.")
    return content


def yaml_events(text: str) -> Iterator[yaml.Event]:
    """Parse a YAML text, and raise RecursionError if it is nested too deep.

    On 100,000 brackets PyYAML's time grows with the square of the depth, and libyaml ends the process.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST_YAML:
            raise RecursionError(f"it is nested more than {DEEPEST_YAML} deep")
        yield event


DEEPEST_YAML = 50


_SURPRISES = re.compile(
    r"[-+]?(0[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)"
)
"""Numbers in base 8, 2, 16 and 60, as YAML 1.1 reads 010, 0b10, 0x10 and 1:30."""


def check_scalars(text: str, file: str = "", key: str = "") -> None:
    """Raise ConfigError for a ${...} that does not name a setting, and for long or non-decimal numbers."""
    for event in yaml_events(text):
        if not isinstance(event, yaml.ScalarEvent):
            continue
        place = f"{file}, line {event.start_mark.line + 1}: " if file else f"{key}: "
        if re.search(r"(?<!\\)\$\{(?![\w.]+\})", event.value):
            raise ConfigError(
                f"{place}of ${{...}} only other settings are read, not {show_value(event.value)}."
            )
        if event.tag or event.implicit[0]:
            if _SURPRISES.fullmatch(event.value):
                raise ConfigError(
                    f"{place}{event.value} is a number in another base in YAML. Write it in base 10, or "
                    "quote a text."
                )
            if re.fullmatch(r"[-+]?[0-9_]{20,}", event.value):
                digits = f"{len(event.value):,} digits"
                raise ConfigError(
                    f"{place}{show_value(event.value)} has {digits}. Give a smaller number, or quote a text."
                )


def yaml_problem(error: Exception) -> str:
    """Say what is wrong with a YAML text, without its place and without advice on the library's limits."""
    text = (
        error.problem
        if isinstance(error, yaml.MarkedYAMLError) and error.problem
        else clause(error)
    )
    if "expan" in text and "http" in text:
        return "its aliases (*NAME) repeat too much"
    return re.split(r" *(?:full_key:|in \"<)|\n", text)[0].rstrip(".")


def show_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "empty" if value is None else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
