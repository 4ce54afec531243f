"""Functions for `ask` that import torch or transformers, which settings and their checks must not."""

import resource
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from typing import Any

from workers.config import LossConfig
from workers.errors import ConfigError
from workers.isolation.process import named
from workers.model.loss_rules import undecorated
from workers.rendering import Messages, check_size, forms, in_form
from workers.user_code import load

MOST_BYTES = 2**31  # of memory, for a template


def bind_loss(key: str, name: str) -> None:
    """Import the policy loss `name` that setting `key` names, and bind it as workers do. Raises ConfigError."""
    load(key, name)  # first, so that every error of the import is ours, and need not wait for torch
    if "workers.model.losses.registry" not in sys.modules:  # where the decorator is
        raise undecorated(name)
    from workers.model.losses import make_policy_loss

    make_policy_loss(LossConfig(name="custom", function=name))


def _without_models(name: str) -> None:
    """Let only modules of this package be imported: its own `__init__` reads the names of all its models, for a second.

    For this process, which ends after one answer.
    """
    spec = find_spec(name)
    assert spec is not None  # a requirement of ours
    package = sys.modules[name] = module_from_spec(spec)
    package.__dict__["__version__"] = version(name)


def render_prompts(template: str, options: dict[str, Any], prompts: Sequence[Any], which: str) -> None:
    """Render prompts, each a list of chat messages.

    options: special tokens, and add_generation_prompt. Raises ConfigError, naming `which` template, for one that fails,
    or writes or keeps more than it may.
    """
    _without_models("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Messages) -> str:
        (text,), _ = render_jinja_template([messages], chat_template=template, **options)
        return check_size(str(text))

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))  # this process ends after one answer
    shown = forms(render)
    for number, messages in enumerate(prompts, start=1):
        try:
            render(in_form(messages, *shown))
        except Exception as error:
            line = f", in line {error.lineno}" if hasattr(error, "lineno") else ""
            raise ConfigError(f"{which} raised {named(error)}{line}, on prompt {number} of those tried.") from None
