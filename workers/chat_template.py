"""Chat templates: found among a model's files, and limited in time, because they are programs that may never end."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

DEFAULT = "default"  # of several templates, the one for prompts without tools


@dataclass(frozen=True)
class Template:
    """text: in Jinja. special_tokens: variables of the template beside the messages, such as bos_token."""

    text: str
    special_tokens: dict[str, str]


def template_of(folder: Path) -> Template | None:
    """The chat template among a model's files, where transformers looks for it; None if there is none.

    Raises ConfigError if a file of it is no JSON object, or no UTF-8.
    """
    settings = _read_json(folder / "tokenizer_config.json")
    text: Any = settings.get("chat_template")
    if (folder / "chat_template.json").is_file():
        text = _read_json(folder / "chat_template.json").get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        text = _read(folder / "chat_template.jinja")
    if isinstance(text, list):
        text = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}.get(DEFAULT)
    return Template(text, _special_tokens(folder, settings)) if isinstance(text, str) and text else None


@contextmanager
def time_limit(seconds: float, setting: str) -> Iterator[None]:
    """Raise TimeoutError inside, naming `setting`, after so many seconds; for Python code alone.

    In the main thread, which takes signals; in others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {setting}={seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    found = settings | _read_json(folder / "special_tokens_map.json")
    plain = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: token for name, token in plain.items() if name.endswith("_token") and isinstance(token, str)}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path} is not a JSON object.")
    return content


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}.") from None
