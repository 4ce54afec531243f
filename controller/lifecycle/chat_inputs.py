"""Try tools and the chat template on the first prompts that are chat messages.

A template is a program: it runs in another process, on the first chats of each data set.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.model_files import read_model_files
from controller.data.prompts import PromptRules, with_system_prompt
from controller.data.records import Record
from controller.lifecycle.template_report import Examined, examine
from controller.lifecycle.user_functions import Records, waiting
from controller.observability.slow_work import Log
from workers.chat_templates import template_of
from workers.episodes.parser_names import known_parsers, parsers_of
from workers.errors import ConfigError, DataError, Problems
from workers.rendering import Messages, Options
from workers.sandbox import tools as sandbox_tools
from workers.user_code.functions import Tools, find_tools

Chat = tuple[Messages, Options]
"""Chat messages, and the options to render them with."""

# Of each data set, because the run renders the others as it tokenizes them.
TRIED_PROMPTS = 32


def try_chats(config: Config, data: Records, log: Log) -> tuple[Tools, Examined | None]:
    """Describe the tools, and render the first prompts with them."""
    tools = Tools(b"", [])
    problems = Problems()
    with problems.collecting():
        if config.rollout.tools:
            _check_tools(config, data)
    with problems.collecting():
        if config.rollout.tools:
            tools = _tools(config, log)
    problems.raise_all()
    if config.rollout.tools and config.rollout.sandbox.kind:
        _check_sandbox_tools(config, tools)
    chats = _first_chats(config, data, tools.schemas)
    if config.rollout.tools:
        _check_offered(config, chats, tools.schemas)
    return tools, try_template(config, chats, run_options(config, tools.schemas), log)


def _tools(config: Config, log: Log) -> Tools:
    key = "rollout.tools"
    name = config.rollout.tools
    with waiting(log, f"the import of {name}, {key}", config):
        return find_tools(key, name, timeout_s=config.resources.user_code_timeout_s)


def tool_name(schema: dict[str, Any]) -> str:
    return str(schema["function"]["name"])


def _check_tools(config: Config, data: Mapping[str, list[Record]]) -> None:
    """Raise ConfigError if prompts are texts, or no parser is known for the template's calls."""
    tools = config.rollout.tools
    model = config.model.path
    for path, rows in data.items():
        if any(isinstance(row[config.data.prompt_key], str) for row in rows):
            raise ConfigError(
                f"rollout.tools={tools}: {path} has prompts that are texts. Give chat messages."
            )
    template = template_of(
        read_model_files(model, "model.path").folder, config.model.chat_template
    )
    if (
        template
        and not config.rollout.tool_parser
        and not parsers_of(template.text_for({"tools": True}))[0]
    ):
        raise ConfigError(
            f"rollout.tools={tools}: which parser reads the calls of model.path={model} is unknown. Set "
            f"rollout.tool_parser to one of: {', '.join(sorted(known_parsers('tool_parser')))}."
        )


def _check_sandbox_tools(config: Config, tools: Tools) -> None:
    names = {tool_name(schema) for schema in tools.schemas}
    if not names & set(sandbox_tools.__all__):
        raise ConfigError(
            f"rollout.sandbox.kind={config.rollout.sandbox.kind}: rollout.tools={config.rollout.tools} has "
            f"none of {', '.join(sandbox_tools.__all__)}, so nothing runs in the sandbox. Import one into "
            "the file and its __all__ from workers.sandbox.tools, or remove the setting."
        )


def _check_offered(
    config: Config, chats: Sequence[Chat], schemas: Sequence[dict[str, Any]]
) -> None:
    """Raise ConfigError if one of the first records offers another tool."""
    defined_names = set(map(tool_name, schemas))
    offered = {tool_name(tool) for _, options in chats for tool in options.get("tools", ())}
    if undefined_names := sorted(offered - defined_names):
        raise ConfigError(
            f"rollout.tools={config.rollout.tools}: it defines {', '.join(sorted(defined_names))}, but "
            f"records offer {', '.join(undefined_names)} in their column tools. Define these, or leave them "
            "out."
        )


def _first_chats(
    config: Config, data: Mapping[str, list[Record]], tools: Sequence[Any]
) -> list[Chat]:
    first_chats: list[Chat] = []
    key = config.data.prompt_key
    rules = prompt_rules(config, tools)
    for path, rows in data.items():
        chats = [
            (f"{path} record {i}", row)
            for i, row in enumerate(rows, start=1)
            if isinstance(row[key], list)
        ]
        first_chats += [
            (
                with_system_prompt(row[key], rules.system_prompt, place),
                rules.options_of(row, place),
            )
            for place, row in chats[:TRIED_PROMPTS]
        ]
    return first_chats


def try_template(
    config: TrainingConfig,
    chats: Sequence[Chat],
    options: Options,
    log: Log = print,
    *,
    answered: bool = False,
) -> Examined | None:
    """Render `chats`, which may end with a response, by the chat template in a separate process.

    options: of the run. Raises DataError without a template, ConfigError if it fails, or if a setting of
    templates has no chat to act on.
    """
    if not chats:
        for key in ("model.chat_template", "data.chat_template_arguments"):
            if value := value_of(config, key):
                raise ConfigError(
                    f"{key}={value}: the prompts are texts. Give chat messages, or remove {key}."
                )
        return None
    model = read_model_files(config.model.path, "model.path")
    template = template_of(model.folder, config.model.chat_template)
    if template is None and config.is_described:
        return None  # the tokenizer is on another machine
    if template is None:
        raise DataError(
            f"some prompts are chat messages, but the tokenizer of model.path={config.model.path} has no "
            "chat template."
        )
    timeout_s = config.resources.user_code_timeout_s
    key = "model.chat_template" if config.model.chat_template else "model.path"
    template_name = f"the chat template of {key}={value_of(config, key)}"
    with waiting(log, template_name, config):
        return examine(
            template, chats, options, template_name, timeout_s, model, answered=answered
        )


def run_options(config: Config, tools: Sequence[Any]) -> Options:
    return config.data.chat_template_arguments | ({"tools": tools} if tools else {})


def prompt_rules(config: Config, tools: Sequence[Any]) -> PromptRules:
    data = config.data
    return PromptRules(
        data.prompt_key,
        data.max_prompt_tokens,
        data.overlong_prompts,
        data.system_prompt,
        data.source_key,
        run_options(config, tools),
        config.teacher.context_key if config.uses_teacher else "",
        config.teacher.context_template,
        data.image_key,
        data.image_pixels.limits,
    )
