"""Read, try and check a run's inputs before anything starts.

    files --> records | users' code --separate process--> packed, tried once | first prompts --process--> rendered
    = Tried, the end of a dry run --tokenizer--> Inputs, the start of a run

Users' code and chat templates are programs. This process runs them only after a trial in another process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from balancing import CostModel
from controller.checkpoints.progress import check_same_data
from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.functions import requested_columns
from controller.config.model_files import positions, read_model_files
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.config.training import counted, path_setting
from controller.data.curriculum import SampledPrompts
from controller.data.data_files import data_folder
from controller.data.identity import DataIdentity, data_identity
from controller.data.image_columns import COMPARED, blind_images, image_columns, reads_images, texts_of
from controller.data.prompts import (
    Curriculum,
    Prompt,
    PromptDataset,
    PromptMixture,
    PromptRules,
    Prompts,
    characters,
    is_too_long,
    left_out,
    shown_image,
    with_system_prompt,
)
from controller.data.records import Record, check_loss_columns, check_teachers, read_records
from controller.data.sample_functions import Functions
from controller.data.unread_columns import CHATS, names_in, unread_columns
from controller.lifecycle.judge_inputs import find_parser, question
from controller.lifecycle.math_inputs import answer_warnings
from controller.lifecycle.template_report import Examined, examine, short_lines
from controller.lifecycle.user_functions import (
    Records,
    check_columns,
    find_step,
    imported,
    try_curriculum,
    try_functions,
    try_loss,
    try_sampler,
    waiting,
)
from controller.observability.shown_text import redacted, shortened
from controller.observability.slow_work import Log, log_if_slow
from controller.planning.planner import counted_costs
from controller.preflight.algorithm_checks import check_keep_best
from controller.preflight.training_checks import check_caps
from workers.batch.score import RAW, Score
from workers.chat_templates import template_of
from workers.config.roles import HTTP
from workers.environment import as_text
from workers.episodes.parser_names import known_parsers, parsers_of
from workers.errors import ConfigError, DataError, Problems
from workers.images.images import ImageSource
from workers.rendering import Messages, Options, Renderer
from workers.user_code.environments import Answered, try_environment
from workers.user_code.functions import Tools, find_class, find_tools
from workers.user_code.pictures import Pictures
from workers.user_code.rewards import MESSAGES, RewardFunction, try_rewards
from workers.user_code.task_sources import find_verifiers_agent

Chat = tuple[Messages, Options]
"""Chat messages, and the options to render them with."""

TRIED_PROMPTS = 32  # of each data set, because the run renders the others as it tokenizes them
AGENT_TAKES = ("record", "base_url", "api_key")
LONGEST_SHOWN = 2_000  # characters of a prompt in a dry run


@dataclass(frozen=True)
class Tried:
    """Inputs that need no tokenizer.

    train, held_out: records by path. environment, step: pickled class of rollout.environment, functions of
    rollout.tools or function of rollout.agent, and function of run.step, or empty. tools: schemas of
    rollout.tools.
    identity: of the training data, for checkpoints. score, answered: of the reward and the environment, for
    an empty response to the first record. template: None for texts. functions: of samples. sampled: prompts
    of data.sampler.
    parser: of a judge's answers. answer_warnings: answers that the math reward cannot read.
    """

    train: Records
    held_out: Records
    reward_functions: list[RewardFunction]
    parser: RewardFunction | None
    environment: bytes
    step: bytes
    curriculum: Curriculum | None
    cost_model: CostModel
    identity: DataIdentity
    score: Score | None
    answered: Answered | None
    tools: list[dict[str, Any]]
    template: Examined | None
    functions: Functions
    sampled: Callable[[PromptDataset], SampledPrompts] | None
    answer_warnings: tuple[str, ...]


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


def try_inputs(config: Config, log: Log = print, call_functions: GivenFunctions = NONE_GIVEN) -> Tried:
    """Read all data, and try users' code and the chat template in separate processes.

    call_functions: passed to the call. Raises ConfigError or DataError.
    """
    data = config.data
    train, held_out = _read_data(config, log)
    identity = data_identity(config, train)
    check_same_data(config, identity)
    path, (first, *_) = next(iter(train.items()))
    if values := first.get(data.image_key):
        folder = str(data_folder(path))
        pixels = data.image_pixels.limits
        images = [ImageSource(value, f"{path} record 1", folder, pixels) for value in values]
        first = first | {data.image_key: Pictures(images)}
    problems = Problems()
    functions = list[RewardFunction]()
    score = None
    tools = Tools(b"", [])
    template = None
    environment, answered, agent = b"", None, b""
    with problems.collecting():
        functions, score = reward_functions(config, first, log, call_functions)
    with problems.collecting():
        parser = find_parser(config, train | held_out, log)
    with problems.collecting():
        _check_records(config, train, held_out, functions, first)
    with problems.collecting():
        tools, template = _try_chats(config, train | held_out, log)
    with problems.collecting():
        environment, answered = _environment(config, first, log)
    with problems.collecting():
        agent = _agent(config, log) if config.rollout.runs_agent else b""
    with problems.collecting():
        curriculum = try_curriculum(config, train, log)
    with problems.collecting():
        sampler = try_sampler(config, train, log)
    parts = {**(score.parts if score else {}), **(answered.observation.parts if answered else {})}
    with problems.collecting():
        if not problems.errors:  # what replaces parts of a run may read those of a reward
            own_functions = try_functions(config, train, parts, log)
    with problems.collecting():
        if config.algorithm.loss.name == "custom":
            try_loss(config, next(iter(train.values())), log)
    with problems.collecting():
        step = find_step(config, log, call_functions) if config.run.step else b""
    problems.raise_all()
    cost_model = counted_costs(config)
    environment = environment or agent or tools.packed
    return Tried(
        train,
        held_out,
        functions,
        parser,
        environment,
        step,
        curriculum,
        cost_model,
        identity,
        score,
        answered,
        tools.schemas,
        template,
        own_functions,
        sampler,
        answer_warnings(config, train | held_out, log),
    )


def _read_data(config: Config, log: Log) -> tuple[Records, Records]:
    """Read the training data and the validation data, by path."""
    data = config.data
    problems = Problems()
    records: Records = {}
    for path in filter(None, (*data.weights, data.validation)):
        with problems.collecting():
            records[path] = read_records(path, prompt_key=data.prompt_key, log=log, image_key=data.image_key)
    problems.raise_all()
    train = {path: records[path] for path in data.weights}
    return train, {data.validation: records[data.validation]} if data.validation else {}


def _check_records(
    config: Config, train: Records, held_out: Records, functions: Sequence[RewardFunction], first: Record
) -> None:
    """Check that records have the columns that are read, and that not all prompts are too long."""
    added = {RAW} | (_with_messages(config, first).keys() - first.keys())
    takers = {column: f.name for f in functions for column in f.columns if column not in added}
    problems = Problems()
    for path, rows in (train | held_out).items():
        with problems.collecting():
            check_columns(path, rows, takers)
        with problems.collecting():
            _check_lengths(config, path, rows)
    for path, rows in train.items():
        with problems.collecting():
            check_loss_columns(path, rows, config.loss_columns)
        with problems.collecting():
            if config.uses_teacher and config.teacher.paths:
                check_teachers(path, rows, config.teacher.key, config.teacher.paths)
    problems.raise_all()


def _try_chats(config: Config, data: Records, log: Log) -> tuple[Tools, Examined | None]:
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
    chats = _first_chats(config, data, tools.schemas)
    if config.rollout.tools:
        _check_offered(config, chats, tools.schemas)
    return tools, try_template(config, chats, _run_options(config, tools.schemas), log)


def tried_lines(config: Config, tried_inputs: Tried) -> list[str]:
    code = [*config.reward.weights, *([config.rollout.environment] if tried_inputs.answered else [])]
    agent = config.rollout.agent or ("" if tried_inputs.answered else config.rollout.environment)
    return [
        *(
            f"{path}: {counted(len(rows), 'record')}"
            for path, rows in (tried_inputs.train | tried_inputs.held_out).items()
        ),
        *_epoch_lines(config, tried_inputs.train),
        *([f"{', '.join(code)}: tried on the first record and an empty response"] if code else []),
        *([_score_line(tried_inputs.score)] if tried_inputs.score else []),
        *(_episode_lines(tried_inputs.answered) if tried_inputs.answered else []),
        *(
            quoted("the judge reads:", question(config, next(iter(tried_inputs.train.values()))[0]))
            if tried_inputs.parser
            else []
        ),
        *(
            [f"{config.rollout.tools}: tools {', '.join(map(_name, tried_inputs.tools))}"]
            if tried_inputs.tools
            else []
        ),
        *(
            short_lines(tried_inputs.template, turns_follow=config.rollout.plays_episodes)
            if tried_inputs.template
            else []
        ),
        *([f"{agent}: {_agent_line(config)}"] if agent else []),
        *(
            [f"{config.rollout.agent_command}: started for each sample"]
            if config.rollout.agent_command
            else []
        ),
        *([f"{config.run.step}: imported, makes each step"] if tried_inputs.step else []),
        *(f"{value_of(config, key)}: {key}, tried on made-up samples" for key in tried_inputs.functions),
        *([f"{config.data.sampler}: data.sampler, tried on two steps"] if tried_inputs.sampled else []),
        *(f"warning: {line}" for line in tried_inputs.answer_warnings),
    ]


def _epoch_lines(config: Config, train: Records) -> list[str]:
    """Say how often the run reads each source, by its share of the prompts. data.sampler may choose any."""
    if config.data.sampler:
        return []
    least = "at least " if config.algorithm.zero_variance_groups == "replace" else ""
    weights = config.data.weights
    prompts = config.run.steps * config.batch.prompts_per_step
    shares = {path: prompts * weights[path] / sum(weights.values()) for path in train}
    return [
        f"{path}: {least}{share / len(train[path]):.3g} epochs, {share:,.0f} of run.steps * "
        f"batch.prompts_per_step = {prompts:,} prompts"
        for path, share in shares.items()
    ]


def _episode_lines(answered: Answered) -> list[str]:
    observation = answered.observation
    parts = "".join(f", {name} {value:g}" for name, value in observation.parts.items())
    end = ", which ends the episode" if observation.done else ""
    return [
        *quoted("the environment adds to the first prompt:", as_text(answered.opening)),
        f"the environment's reward of an empty response: {observation.reward:g}{parts}{end}",
        *([] if observation.done else quoted("its observation:", as_text(observation.text))),
    ]


def quoted(title: str, text: str) -> list[str]:
    excerpt = shortened(redacted(text), LONGEST_SHOWN)
    return [title, *(f"    {line}" for line in excerpt.split("\n"))] if text else []


def _score_line(score: Score) -> str:
    parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
    answer = f", read from it the answer {score.answer!r}" if score.answer else ""
    return f"the reward of an empty response: {score.reward:g}{parts}{answer}"


def prompt_lines(inputs: Inputs) -> list[str]:
    datasets = [*inputs.sources, *([inputs.validation] if inputs.validation else [])]
    quote = quoted("the first prompt, as engines read it:", inputs.first_prompt)
    return [
        *quote,
        *(_tokens_line(dataset) for dataset in datasets),
        *(f"warning: {line}" for line in inputs.warnings),
    ]


def _tokens_line(dataset: PromptDataset) -> str:
    tokens = dataset.lengths
    changed = [
        f"{count} {change}"
        for count, change in ((dataset.dropped, "dropped"), (dataset.truncated, "truncated"))
    ]
    return (
        f"{dataset.name}: {counted(len(dataset), 'prompt')} of {min(tokens)} to {max(tokens)} tokens, "
        f"{sum(tokens) / len(tokens):.0f} on average; above data.max_prompt_tokens: {', '.join(changed)}"
    )


def read_inputs(config: Config, log: Log = print, call_functions: GivenFunctions = NONE_GIVEN) -> Inputs:
    return tokenized(config, try_inputs(config, log, call_functions), log)


def tokenized(config: Config, tried_inputs: Tried, log: Log = print) -> Inputs:
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
        from workers.episodes.conversation import check_template

        options = _run_options(config, tried_inputs.tools)
        if config.rollout.tools:
            answer = [{"role": "tool", "content": "three"}]
            check_template(renderer, config.model.path, options, key="rollout.tools", answer=answer)
        else:
            check_template(renderer, config.model.path, options, key="rollout.environment")
    blind = _blind_images(config, tried_inputs.train | tried_inputs.held_out)
    dataset = partial(PromptDataset, renderer=renderer, rules=rules, log=log)
    sources = [
        dataset(
            rows, shuffle=data.shuffle, seed=config.run.seed, name=path, curriculum=tried_inputs.curriculum
        )
        for path, rows in tried_inputs.train.items()
    ]
    if config.uses_teacher and config.teacher.context_key:
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
    if cap := config.policy.max_patches_per_micro_batch:
        patches = max(source.most_image_tokens for source in sources) * tried_inputs.cost_model.patches
        if patches > cap:
            raise ConfigError(
                f"policy.max_patches_per_micro_batch={cap}: the images of a prompt have {patches:,.0f} "
                "patches. Raise it, or lower data.image_pixels.max."
            )
    unread = [] if _reads_records(config) else _unread_columns(config, tried_inputs, blind, chats=chats)
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
            *renderer.unread.values(),
            *(
                line
                for source in (*sources, *validation)
                for line in left_out(source.name, source.unreadable)
            ),
        ),
    )


def _reads_records(config: Config) -> bool:
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


def _unread_columns(config: Config, tried_inputs: Tried, blind: Sequence[str], *, chats: bool) -> list[str]:
    """Return warnings of columns that nothing reads. blind: warnings of `blind_images`, which name columns
    too.
    """
    data = tried_inputs.train | tried_inputs.held_out
    names = {name for rows in data.values() for row in rows[:COMPARED] for name in row}
    of_functions = {name for function in tried_inputs.reward_functions for name in function.columns}
    of_functions |= {name for function in tried_inputs.functions.values() for name in function.names}
    of_images = {
        name for rows in data.values() for name in image_columns(rows, config.data.image_key) if blind
    }
    of_chats = CHATS if chats else set()
    return unread_columns(data, {*names_in(config, names), *of_functions, *of_images, *of_chats})


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


def prompt_renderer(config: Config, tools: Sequence[Any], log: Log = print) -> tuple[Renderer, PromptRules]:
    """Return what turns records into prompts. tools: schemas of rollout.tools."""
    renderer = replace(load_renderer(config, log), continue_last=config.data.continue_last_message)
    return renderer, _rules(config, tools)


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
            f"[{shown_image(image.image)}: {image.tokens} tokens]",
        ]
        start = image.first + image.tokens
    return "".join([*texts, tokenizer.decode(prompt.ids[start:])])


def reward_functions(
    config: Config, example: Record, log: Log = print, call_functions: GivenFunctions = NONE_GIVEN
) -> tuple[list[RewardFunction], Score | None]:
    """Try the reward functions on `example`, the first record, with an empty response. Raises ConfigError."""
    functions = []
    score = None
    example = _with_messages(config, example)
    key = "reward.functions" if config.reward.functions else "reward.function"
    problems = Problems()
    for name, weight in config.reward.weights.items():
        with problems.collecting():
            function = call_functions.get(name) or imported(config, log, key, name)
            columns = requested_columns(function.signature, example, name, key=key)
            functions.append(RewardFunction(name.rpartition(":")[2], weight, function.packed, columns))
    problems.raise_all()
    if functions:
        with waiting(log, f"{key}, tried on an empty response", config, "reward.timeout_s"):
            score = try_rewards(functions, example, config.reward.timeout_s)
        check_keep_best(config, score.parts)
    return functions, score


def _environment(config: Config, example: Record, log: Log) -> tuple[bytes, Answered | None]:
    key = "rollout.environment"
    name = config.rollout.environment
    if not name or config.rollout.runs_agent:
        return b"", None
    with waiting(log, f"the import of {name}, {key}", config):
        packed = find_class(key, name, ("reset", "step"), timeout_s=config.resources.user_code_timeout_s)
    with waiting(log, f"{key}, tried on an empty response", config, "reward.timeout_s"):
        answered = try_environment(packed, example, config.reward.timeout_s)
    return packed, answered


def _agent(config: Config, log: Log) -> bytes:
    """Pickle the function of rollout.agent, which must take what it is called with, or the agent of
    verifiers.

    Raises ConfigError.
    """
    if verifiers := config.rollout.environment:
        key = "rollout.environment"
        timeout_s = config.resources.user_code_timeout_s
        with waiting(log, f"the import of {verifiers}, {key}", config):
            return find_verifiers_agent(key, verifiers, timeout_s)
    key = "rollout.agent"
    name = config.rollout.agent
    if not name or name == HTTP:
        return b""
    agent = imported(config, log, key, name)
    if len(agent.signature.required) > len(AGENT_TAKES) or len(agent.signature.names) < len(AGENT_TAKES):
        raise ConfigError(
            f"{key}={name!r}: must take {', '.join(AGENT_TAKES)}. Write `def run(record, ...)` so."
        )
    return agent.packed


def _agent_line(config: Config) -> str:
    return (
        "agents elsewhere play each sample" if config.rollout.agent == HTTP else "imported, plays each sample"
    )


def _tools(config: Config, log: Log) -> Tools:
    key = "rollout.tools"
    name = config.rollout.tools
    with waiting(log, f"the import of {name}, {key}", config):
        return find_tools(key, name, timeout_s=config.resources.user_code_timeout_s)


def _name(schema: dict[str, Any]) -> str:
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
    template = template_of(read_model_files(model, "model.path").folder, config.model.chat_template)
    if template and not config.rollout.tool_parser and not parsers_of(template.text_for({"tools": True}))[0]:
        raise ConfigError(
            f"rollout.tools={tools}: which parser reads the calls of model.path={model} is unknown. Set "
            f"rollout.tool_parser to one of: {', '.join(sorted(known_parsers('tool_parser')))}."
        )


def _check_offered(config: Config, chats: Sequence[Chat], schemas: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError if one of the first records offers another tool."""
    defined_names = set(map(_name, schemas))
    offered = {_name(tool) for _, options in chats for tool in options.get("tools", ())}
    if undefined_names := sorted(offered - defined_names):
        raise ConfigError(
            f"rollout.tools={config.rollout.tools}: it defines {', '.join(sorted(defined_names))}, but "
            f"records offer {', '.join(undefined_names)} in their column tools. Define these, or leave them "
            "out."
        )


def _with_messages(config: Config, record: Record) -> Record:
    """The record, with the transcript that reward functions get of an episode of chat messages."""
    if not config.rollout.plays_episodes or isinstance(prompt := record[config.data.prompt_key], str):
        return record
    return record | {MESSAGES: [*prompt, {"role": "assistant", "content": ""}]}


def _check_lengths(config: Config, path: str, rows: list[Record]) -> None:
    data = config.data
    short = [not is_too_long(row[data.prompt_key], data.max_prompt_tokens) for row in rows]
    if data.overlong_prompts != "truncate" and not any(short):
        raise DataError(
            f"{path}: all prompts, {len(rows)}, have many more characters than data.max_prompt_tokens="
            f"{data.max_prompt_tokens} tokens hold. Raise it, set data.overlong_prompts=truncate, or "
            "shorten them."
        )
    if data.overlong_prompts == "error" and not all(short):
        number = short.index(False) + 1
        raise DataError(
            f"{path} record {number} has {characters(rows[number - 1][data.prompt_key]):,} characters, more "
            f"than data.max_prompt_tokens={data.max_prompt_tokens} tokens hold. Raise it, or set "
            "data.overlong_prompts=drop."
        )


def _first_chats(config: Config, data: Mapping[str, list[Record]], tools: Sequence[Any]) -> list[Chat]:
    first_chats: list[Chat] = []
    key = config.data.prompt_key
    rules = _rules(config, tools)
    for path, rows in data.items():
        chats = [
            (f"{path} record {i}", row) for i, row in enumerate(rows, start=1) if isinstance(row[key], list)
        ]
        first_chats += [
            (with_system_prompt(row[key], rules.system_prompt, place), rules.options_of(row, place))
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
        return examine(template, chats, options, template_name, timeout_s, model, answered=answered)


def load_renderer(config: TrainingConfig, log: Log = print) -> Renderer:
    with log_if_slow(log, f"loading torch, and the tokenizer of model.path={config.model.path}"):
        from workers.model.model import load_tokenizer
        from workers.model.vision.processor import load_placeholders

        tokenizer = load_tokenizer(config.model.path)
        placeholders = load_placeholders(config.model.path)
    vocabulary = config.vocabulary
    timeout_s = config.resources.user_code_timeout_s
    renderer = Renderer.with_template(tokenizer, config.model.chat_template, vocabulary, timeout_s)
    renderer = replace(renderer, placeholders=placeholders)
    if tokenizer.eos_token_id is not None:
        renderer.checked([tokenizer.eos_token_id], f"the tokenizer of model.path={config.model.path}")
    return renderer


def _template_warnings(config: Config, tried_inputs: Tried) -> tuple[str, ...]:
    stops = config.rollout.sampling.stop_token_ids
    return (
        tuple(tried_inputs.template.warnings(tools=bool(tried_inputs.tools), stops=stops))
        if tried_inputs.template
        else ()
    )


def _run_options(config: Config, tools: Sequence[Any]) -> Options:
    return config.data.chat_template_arguments | ({"tools": tools} if tools else {})


def _rules(config: Config, tools: Sequence[Any]) -> PromptRules:
    data = config.data
    return PromptRules(
        data.prompt_key,
        data.max_prompt_tokens,
        data.overlong_prompts,
        data.system_prompt,
        data.source_key,
        _run_options(config, tools),
        config.teacher.context_key if config.uses_teacher else "",
        config.teacher.context_template,
        data.image_key,
        data.image_pixels.limits,
    )
