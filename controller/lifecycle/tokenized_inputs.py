"""Tokenize the inputs of a run, and warn of what the model would not see.

Tried --tokenizer--> prompts --teacher, patches: do they fit?--> Inputs, the start of a run
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from controller.checkpoints.progress import check_same_data
from controller.config import Config, TrainingConfig
from controller.config.model_files import positions, read_model_files
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.config.role_table import path_setting
from controller.data.image_columns import (
    COMPARED,
    blind_images,
    image_columns,
    reads_images,
    texts_of,
)
from controller.data.prompts import (
    Prompt,
    PromptDataset,
    PromptMixture,
    PromptRules,
    Prompts,
    show_image,
    warn_of_left_out,
)
from controller.data.records import Record
from controller.data.unread_columns import CHATS, names_in, unread_columns
from controller.lifecycle.chat_inputs import prompt_rules, run_options
from controller.lifecycle.inputs import Tried, try_inputs
from controller.observability.slow_work import Log, log_if_slow
from controller.planning.planner import counted_costs
from controller.preflight.training_checks import check_caps
from workers.errors import ConfigError
from workers.rendering import Renderer
from workers.text_pieces import loses_blanks
from workers.user_code.task_sources import HARBOR, package_of


@dataclass(frozen=True)
class Inputs(Tried):
    """Inputs of a run. weights: of the sources, by path. first_prompt: its decoded ids. warnings: for the
    user.
    """

    sources: list[PromptDataset]
    validation: PromptDataset | None
    weights: dict[str, float]
    first_prompt: str
    warnings: tuple[str, ...]

    @property
    def prompts(self) -> Prompts:
        if self.sampled is not None:
            return self.sampled(self.sources[0])
        return (
            self.sources[0]
            if len(self.sources) == 1
            else PromptMixture(self.sources, list(self.weights.values()))
        )


def read_inputs(
    config: Config, log: Log = print, call_functions: GivenFunctions = NONE_GIVEN
) -> Inputs:
    return tokenize_inputs(config, try_inputs(config, log, call_functions), log)


def tokenize_inputs(config: Config, tried_inputs: Tried, log: Log = print) -> Inputs:
    """Tokenize the inputs. Raises ConfigError or DataError for unusable prompts."""
    data = config.data
    renderer, rules = prompt_renderer(config, tried_inputs.tools, log)
    chats = isinstance(next(iter(tried_inputs.train.values()))[0][data.prompt_key], list)
    if config.rollout.history == "template" and not chats:
        raise ConfigError(
            f"rollout.history=template: the prompts of {next(iter(tried_inputs.train))} are texts, which no "
            "chat template renders. Remove it, or write them as chat messages."
        )
    if config.rollout.plays_episodes and chats and not config.rollout.runs_agent:
        _check_turns(config, renderer, tried_inputs)
    blind = _blind_images(config, tried_inputs.train | tried_inputs.held_out)
    dataset = partial(PromptDataset, renderer=renderer, rules=rules, log=log)
    sources = [
        dataset(
            rows,
            shuffle=data.shuffle,
            seed=config.run.seed,
            name=path,
            curriculum=tried_inputs.curriculum,
        )
        for path, rows in tried_inputs.train.items()
    ]
    _check_teacher_context(config, sources)
    _check_patches(config, sources, tried_inputs)
    unread = (
        []
        if reads_records(config)
        else _unread_columns(config, tried_inputs, blind, chats=chats)
    )
    untaught = replace(rules, context_key="")
    validation = [
        dataset(rows, rules=untaught, shuffle=False, name=path)
        for path, rows in tried_inputs.held_out.items()
    ]
    identity = tried_inputs.identity | {"prompts": [len(source) for source in sources]}
    check_same_data(config, identity)
    return Inputs(
        **vars(tried_inputs) | {"identity": identity},
        sources=sources,
        validation=validation[0] if validation else None,
        weights=data.weights,
        first_prompt=_as_read(renderer.tokenizer, next(iter(sources[0]))),
        warnings=(
            *_template_warnings(config, tried_inputs),
            *blind,
            *unread,
            *task_warnings(config),
            *renderer.unread.values(),
            *(
                line
                for source in (*sources, *validation)
                for line in warn_of_left_out(source.name, source.unreadable)
            ),
        ),
    )


def _check_turns(config: Config, renderer: Renderer, tried_inputs: Tried) -> None:
    """Raise ConfigError if the template cannot render the turns of episodes."""
    from workers.episodes.conversation import check_template

    if config.history == "template" and loses_blanks(renderer.tokenizer):
        raise ConfigError(
            f"rollout.history={config.rollout.history}: the tokenizer of model.path={config.model.path} "
            "loses blanks, so no turn is recognised in the text that the chat template renders. Set keep."
        )
    options = run_options(config, tried_inputs.tools)
    if config.rollout.tools:
        answer = [{"role": "tool", "content": "three"}]
        check_template(
            renderer, config.model.path, options, key="rollout.tools", answer=answer
        )
    else:
        check_template(renderer, config.model.path, options, key="rollout.environment")


def _check_teacher_context(config: Config, sources: Sequence[PromptDataset]) -> None:
    """Raise ConfigError if the teacher's context and a response are longer than a teacher takes."""
    if not (config.uses_teacher and config.teacher.context_key):
        return
    longest = max(source.longest_taught for source in sources) + config.longest_response
    parts = f"{longest} tokens with the context of teacher.context_key={config.teacher.context_key}"
    check_caps(config, [config.limits["teacher.log_probs"]], longest, parts)
    models = config.models_of("teacher") if config.starts_teacher else {"": config.model}
    for name, model in models.items():
        key = path_setting("teacher", name) if config.starts_teacher else "model.path"
        most = positions(read_model_files(model.path, key).text)
        if most is not None and longest > most:
            raise ConfigError(
                f"{key}={model.path}: it takes {most} tokens, but a sample has {parts}. Shorten them."
            )


def _check_patches(
    config: Config, sources: Sequence[PromptDataset], tried_inputs: Tried
) -> None:
    """Raise ConfigError if the images of a prompt have more patches than a micro-batch may."""
    if cap := config.policy.max_patches_per_micro_batch:
        patches = (
            max(source.most_image_tokens for source in sources)
            * tried_inputs.cost_model.patches
        )
        if patches > cap:
            raise ConfigError(
                f"policy.max_patches_per_micro_batch={cap}: the images of a prompt have {patches:,.0f} "
                "patches. Raise it, or lower data.image_pixels.max."
            )


def reads_records(config: Config) -> bool:
    """Whether code takes whole records, so that any column may be read."""
    data = config.data
    rollout = config.rollout
    return bool(
        rollout.environment
        or rollout.runs_agent
        or rollout.tools
        or data.curriculum
        or data.sampler
        or config.run.step
    )


def _unread_columns(
    config: Config, tried_inputs: Tried, blind: Sequence[str], *, chats: bool
) -> list[str]:
    """Return warnings of columns that nothing reads. blind: warnings of `blind_images`, which name columns
    too.
    """
    data = tried_inputs.train | tried_inputs.held_out
    names = {name for rows in data.values() for row in rows[:COMPARED] for name in row}
    of_functions = {
        name for function in tried_inputs.reward_functions for name in function.columns
    }
    of_functions |= {
        name for function in tried_inputs.functions.values() for name in function.names
    }
    of_images = {
        name
        for rows in data.values()
        for name in image_columns(rows, config.data.image_key)
        if blind
    }
    of_chats = CHATS if chats else set()
    return unread_columns(
        data, {*names_in(config, names), *of_functions, *of_images, *of_chats}
    )


def task_warnings(config: Config) -> list[str]:
    """Return warnings of what stands in folders of tasks and has no effect."""
    named = dict.fromkeys(
        [*config.data.weights, config.data.validation, config.rollout.environment]
    )
    folders = [text for text in named if package_of(text) == HARBOR]
    if not folders:
        return []
    from workers.harbor.task_folders import unread_lines

    return [
        line for text in folders for line in unread_lines(text, config.rollout.sandbox.kind)
    ]


def _blind_images(config: Config, data: Mapping[str, list[Record]]) -> list[str]:
    """Return warnings of images that the model would not see. Raises as `blind_images`."""
    warnings: list[str] = []
    if not reads_images(config):
        return warnings
    prompt_key = config.data.prompt_key
    image_key = config.data.image_key
    for path, rows in data.items():
        read = ((bool(row.get(image_key)), texts_of(row[prompt_key])) for row in rows)
        warnings += blind_images(path, rows, read, image_key)
    return warnings


def prompt_renderer(
    config: Config, tools: Sequence[Any], log: Log = print
) -> tuple[Renderer, PromptRules]:
    """Return what turns records into prompts. tools: schemas of rollout.tools."""
    renderer = replace(
        load_renderer(config, log), continue_last=config.data.continue_last_message
    )
    return renderer, prompt_rules(config, tools)


def inputs_without_data(config: Config) -> Inputs:
    """Return the inputs of a loop that brings its own prompts."""
    nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(Inputs)), None)
    empty: dict[str, Any] = {
        "train": {},
        "held_out": {},
        "reward_functions": [],
        "environment": b"",
        "step": b"",
        "cost_model": counted_costs(config),
        "identity": {},
        "tools": [],
        "functions": {},
        "sources": [],
        "weights": {},
        "first_prompt": "",
        "warnings": (),
        "answer_warnings": (),
    }
    return Inputs(**nothing | empty)


def _as_read(tokenizer: Any, prompt: Prompt) -> str:
    """Decode a prompt, with an image's size in the place of its tokens."""
    texts = []
    start = 0
    for image in prompt.images:
        texts += [
            tokenizer.decode(prompt.ids[start : image.first]),
            f"[{show_image(image.image)}: {image.tokens} tokens]",
        ]
        start = image.first + image.tokens
    return "".join([*texts, tokenizer.decode(prompt.ids[start:])])


def load_renderer(config: TrainingConfig, log: Log = print) -> Renderer:
    with log_if_slow(
        log, f"loading torch, and the tokenizer of model.path={config.model.path}"
    ):
        from workers.model.pretrained import load_tokenizer
        from workers.model.vision.processor import load_placeholders

        tokenizer = load_tokenizer(config.model.path)
        placeholders = load_placeholders(config.model.path)
    vocabulary = config.vocabulary
    timeout_s = config.resources.user_code_timeout_s
    renderer = Renderer.with_template(
        tokenizer, config.model.chat_template, vocabulary, timeout_s
    )
    renderer = replace(renderer, placeholders=placeholders)
    if tokenizer.eos_token_id is not None:
        renderer.check_ids(
            [tokenizer.eos_token_id], f"the tokenizer of model.path={config.model.path}"
        )
    if loses_blanks(tokenizer):
        renderer.unread["blanks"] = (
            f"model.path={config.model.path}: its tokenizer loses blanks and line breaks. Rewards, "
            "environments and templates see texts without them."
        )
    return renderer


def _template_warnings(config: Config, tried_inputs: Tried) -> tuple[str, ...]:
    stops = config.rollout.sampling.stop_token_ids
    return (
        tuple(tried_inputs.template.warnings(tools=bool(tried_inputs.tools), stops=stops))
        if tried_inputs.template
        else ()
    )
