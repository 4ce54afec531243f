"""Try what a judge needs before anything starts: its prompt and chat template, and the parser of
its answers.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import cloudpickle

from controller.config import Config
from controller.config.functions import requested_columns
from controller.config.model_files import read_model_files
from controller.data.questions import Questions
from controller.data.records import Record
from controller.lifecycle.user_functions import import_function, waiting
from controller.observability.slow_work import Log
from workers.chat_templates import template_of
from workers.errors import ConfigError
from workers.rendering import render_isolated
from workers.reward_functions import last_match
from workers.user_code.rewards import RewardFunction

VERDICTS = {"A": 1.0, "B": 0.0, "C": 0.5}


def find_parser(
    config: Config, data: Mapping[str, Sequence[Record]], log: Log
) -> RewardFunction | None:
    """Return the function that reads the judge's answers, or None without a judge.

    Raises ConfigError, also if the prompt cannot be written for one of the records.
    """
    settings = config.reward.judge
    first = next(iter(data.values()))[0]
    if not config.uses_judge:
        return None
    _try_chat_template(config, question(config, first), log)
    if question(config, first, "1") == question(config, first, "2"):
        raise ConfigError(
            "reward.judge.prompt: it does not show the response. Write {{ response }} in it."
        )
    for rows in data.values():
        for row in {
            frozenset(row): row for row in rows
        }.values():  # one for each set of columns
            question(config, row)
    if not settings.function:
        values = None if settings.form == "score" else VERDICTS
        packed = cloudpickle.dumps(
            partial(last_match, pattern=settings.pattern, values=values)
        )
        return RewardFunction("parser", 1.0, packed, ())
    key = "reward.judge.parser"
    name = settings.function
    parser = import_function(config, log, key, name)
    return RewardFunction(
        "parser",
        1.0,
        parser.packed,
        requested_columns(parser.signature, first, name, key=key),
    )


def _try_chat_template(config: Config, text: str, log: Log) -> None:
    key = "reward.judge.model"
    model = config.judge_model
    options = config.reward.judge.chat_template_arguments
    template = template_of(read_model_files(model.path, key).folder, model.chat_template)
    if template is None and options:
        raise ConfigError(
            f"reward.judge.chat_template_arguments={options}: the judge has no chat template. Remove it."
        )
    if template is not None:
        template_name = f"the chat template of {key}={model.path}"
        timeout_s = config.resources.user_code_timeout_s
        chat = [([{"role": "user", "content": text}], options)]
        with waiting(log, template_name, config):
            render_isolated(
                template,
                chat,
                options,
                [],
                template_name,
                answered=False,
                timeout_s=timeout_s,
            )


def question(config: Config, record: Record, response: str = "") -> str:
    """Return the judge's question about a response, or about two equal ones. Raises ConfigError."""
    settings = config.reward.judge
    return Questions(settings, config.data.prompt_key).text(
        record, [response] * (1 if settings.form == "score" else 2)
    )
