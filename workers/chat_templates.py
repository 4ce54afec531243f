"""Read chat templates: from which file each comes, which variables it reads, and how long it may run."""

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from workers.errors import ConfigError
from workers.json_file import read_json

# Names of the templates for prompts without and with tools.
DEFAULT, TOOLS = ("default", "tool_use")
OF_EVERY_TEMPLATE = {
    "messages",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
}
ASKING = ("defined", "undefined", "default")
FUNCTIONS = {"raise_exception", "strftime_now"}  # that transformers gives to templates


@dataclass(frozen=True)
class Template:
    """text: in Jinja. special_tokens: further variables, such as bos_token. with_tools: another text for
    prompts with tools, or empty.
    """

    text: str
    special_tokens: dict[str, str]
    with_tools: str = ""

    def text_for(self, options: Mapping[str, Any]) -> str:
        return (options.get("tools") and self.with_tools) or self.text


def template_of(folder: Path, file: str = "") -> Template | None:
    """Read the template where transformers looks for it, or None. Raises ConfigError for invalid JSON or
    UTF-8.

    file: model.chat_template, which replaces the template of the model in `folder`.
    """
    settings = _of_file(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, settings)
    if file:
        return Template(read_template(file), special_tokens)
    template: Any = settings.get("chat_template")
    if (folder / "chat_template.json").is_file():
        template = _of_file(folder / "chat_template.json").get("chat_template")
    texts: dict[Any, Any] = {DEFAULT: template}
    if isinstance(template, list):
        texts = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
    files = {
        DEFAULT: folder / "chat_template.jinja",
        TOOLS: folder / "additional_chat_templates" / f"{TOOLS}.jinja",
    }
    texts |= {
        name: read_template(str(file), "model.path")
        for name, file in files.items()
        if file.is_file()
    }
    text, with_tools = (
        texts[name] if isinstance(texts.get(name), str) else "" for name in (DEFAULT, TOOLS)
    )
    return Template(text, special_tokens, with_tools) if text else None


def read_template(file: str, setting: str = "model.chat_template") -> str:
    """Read a Jinja file. Raises ConfigError, naming `setting`."""
    try:
        if not Path(file).is_file():
            raise OSError("there is no such file")
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting}={file}: cannot be read: {error}. Give a Jinja file in UTF-8."
        ) from None
    if not text.strip():
        raise ConfigError(f"{setting}={file}: the file is empty. Give a Jinja file.")
    return text


@dataclass(frozen=True)
class Variables:
    """Names that a template reads. arguments: those that look like a caller's, because the template does not
    set them, or asks whether they are set. words: all texts in its code, among them the keys of messages and
    the roles.
    """

    read: frozenset[str]
    arguments: frozenset[str]
    words: frozenset[str] = frozenset()


@lru_cache
def variables_of(template: str) -> Variables:
    """Analyse a template. Compiles it, which may take forever: try it in another process first."""
    from jinja2 import meta, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag of transformers that marks an assistant's turn."""

        tags = {"generation"}  # noqa: RUF012 (as in jinja2)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    tree = ImmutableSandboxedEnvironment(
        extensions=[Generation, "jinja2.ext.loopcontrols"]
    ).parse(template)
    read = meta.find_undeclared_variables(tree) - FUNCTIONS
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    in_macros = {
        (id(node), parameter.name)
        for macro in tree.find_all(nodes.Macro)
        for node in macro.find_all(nodes.Name)
        for parameter in macro.args
    }
    optional_names = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ASKING
        and isinstance(node.node, nodes.Name)
        and (id(node.node), node.node.name) not in in_macros
    }
    words = {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {
        node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
    }
    return Variables(
        frozenset(read),
        frozenset(read - OF_EVERY_TEMPLATE - (stored - optional_names)),
        frozenset(words),
    )


def check_read(template: str, options: Iterable[str]) -> None:
    """Raise ConfigError for options that the template never reads. Compiles it, as `variables_of` does."""
    if unread := sorted(set(options) - (variables_of(template).read if options else set())):
        arguments = sorted(variables_of(template).arguments)
        advice = (
            f"It reads {', '.join(arguments)}"
            if arguments
            else "It reads no arguments and no tools"
        )
        raise ConfigError(f"the chat template never reads {unread[0]!r}. {advice}.")


@contextmanager
def time_limit(seconds: float, setting: str) -> Iterator[None]:
    """Raise TimeoutError, naming `setting`, after `seconds` of Python code in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no limit: only the main thread receives signals
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {setting}={seconds:g} s")

    old_handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    tokens = settings | _of_file(folder / "special_tokens_map.json")
    plain = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {
        name: token
        for name, token in plain.items()
        if name.endswith("_token") and isinstance(token, str)
    }


def _of_file(path: Path) -> dict[str, Any]:
    return read_json(path, "model.path") if path.is_file() else {}
