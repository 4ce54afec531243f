"""Read a run's data, and try users' code on it, before anything starts.

    files --> records | users' code --separate process--> packed, tried once
    first prompts --separate process--> rendered
    = Tried, the end of a dry run, from which `tokenized_inputs` makes the Inputs of a run

Users' code and chat templates are programs. This process runs them only after a trial in another process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from balancing import CostModel
from controller.checkpoints.progress import check_same_data
from controller.config import Config
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.data.curriculum import SampledPrompts
from controller.data.data_files import data_folder
from controller.data.identity import DataIdentity, data_identity
from controller.data.prompts import Curriculum, PromptDataset, characters, is_too_long
from controller.data.records import Record, check_loss_columns, check_teachers, read_records
from controller.data.sample_functions import Functions
from controller.lifecycle.chat_inputs import try_chats
from controller.lifecycle.judge_inputs import find_parser
from controller.lifecycle.math_inputs import answer_warnings
from controller.lifecycle.reward_inputs import (
    find_agent,
    find_environment,
    reward_functions,
    with_messages,
)
from controller.lifecycle.template_report import Examined
from controller.lifecycle.user_functions import (
    Records,
    check_columns,
    find_step,
    try_curriculum,
    try_functions,
    try_loss,
    try_sampler,
)
from controller.observability.slow_work import Log
from controller.planning.planner import counted_costs
from workers.batch.score import RAW, Score
from workers.errors import DataError, Problems
from workers.images.images import ImageSource
from workers.sandbox.kinds import export_settings
from workers.user_code.environments import Answered
from workers.user_code.functions import Tools
from workers.user_code.pictures import Pictures
from workers.user_code.rewards import RewardFunction


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


def try_inputs(
    config: Config, log: Log = print, call_functions: GivenFunctions = NONE_GIVEN
) -> Tried:
    """Read all data, and try users' code and the chat template in separate processes.

    call_functions: passed to the call. Raises ConfigError or DataError.
    """
    train, held_out = _read_data(config, log)
    identity = data_identity(config, train)
    check_same_data(config, identity)
    path, (first, *_) = next(iter(train.items()))
    first = _with_pictures(config, path, first)
    problems = Problems()
    functions = list[RewardFunction]()
    score = None
    tools = Tools(b"", [])
    template = None
    environment, answered, agent = b"", None, b""
    # Also without a kind: an earlier run here may have had one.
    export_settings(config.rollout.sandbox)
    with problems.collecting():
        functions, score = reward_functions(config, first, log, call_functions)
    with problems.collecting():
        parser = find_parser(config, train | held_out, log)
    with problems.collecting():
        _check_records(config, train, held_out, functions, first)
    with problems.collecting():
        tools, template = try_chats(config, train | held_out, log)
    with problems.collecting():
        environment, answered = find_environment(config, first, log)
    with problems.collecting():
        agent = find_agent(config, log) if config.rollout.runs_agent else b""
    with problems.collecting():
        curriculum = try_curriculum(config, train, log)
    with problems.collecting():
        sampler = try_sampler(config, train, log)
    parts = {
        **(score.parts if score else {}),
        **(answered.observation.parts if answered else {}),
    }
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


def _with_pictures(config: Config, path: str, first: Record) -> Record:
    """Return the first record with its images as users' code reads them."""
    data = config.data
    values = first.get(data.image_key)
    if not values:
        return first
    folder = str(data_folder(path))
    pixels = data.image_pixels.limits
    images = [ImageSource(value, f"{path} record 1", folder, pixels) for value in values]
    return first | {data.image_key: Pictures(images)}


def _read_data(config: Config, log: Log) -> tuple[Records, Records]:
    """Read the training data and the validation data, by path."""
    data = config.data
    problems = Problems()
    records: Records = {}
    for path in filter(None, (*data.weights, data.validation)):
        with problems.collecting():
            records[path] = read_records(
                path, prompt_key=data.prompt_key, log=log, image_key=data.image_key
            )
    problems.raise_all()
    train = {path: records[path] for path in data.weights}
    return train, {data.validation: records[data.validation]} if data.validation else {}


def _check_records(
    config: Config,
    train: Records,
    held_out: Records,
    functions: Sequence[RewardFunction],
    first: Record,
) -> None:
    """Check that records have the columns that are read, and that not all prompts are too long."""
    added = {RAW} | (with_messages(config, first).keys() - first.keys())
    takers = {
        column: f.name for f in functions for column in f.columns if column not in added
    }
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
