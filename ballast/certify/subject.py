"""The subject of a certificate: what a configuration names, read by the readers of a run.

    mine.yaml | --environment verifiers:NAME | --reward file.py:f --data file --> Config --> Subject

Users' code is imported and pickled in processes of its own. This process never unpickles it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from controller.config import Config, load
from controller.config.functions import requested_columns
from controller.config.model_files import read_model_files
from controller.config.yaml_text import read_yaml
from controller.data.records import Record, iter_records
from controller.lifecycle.judge_inputs import find_parser
from controller.lifecycle.reward_inputs import find_agent, pack_environment, with_messages
from controller.lifecycle.user_functions import import_function
from workers.chat_messages import check_not_blank, clean_prompt
from workers.errors import ConfigError, DataError, Problems, clause
from workers.image_parts import with_images
from workers.sandbox.kinds import export_settings
from workers.user_code.functions import Tools, find_tools
from workers.user_code.rewards import RewardFunction
from workers.user_code.task_sources import package_of

NO_MODEL = "no-model"  # model.path if neither configuration nor command line names a model
ANSWER_COLUMNS = (
    *(
        "answer",
        "solution",
        "ground_truth",
        "reward_model.ground_truth",
        "extra_info.answer",
        "expected",
    ),
    *("expected_answer", "final_answer", "target", "label", "reference", "gold"),
)
"""Columns that hold a record's answer in common data sets, by preference. A dot leads into a mapping."""
NOT_ANSWERS = {"response_raw", "messages", "data_source", "extra_info", "id", "index"}


def quiet(text: str) -> None:
    """Drop a line about slow work: the page of the certificate is the output."""


@dataclass(frozen=True)
class Subject:
    """What is certified.

    train, held_out: records by path. functions: of the reward, to be run by `RewardProcess`. environment:
    pickled class of rollout.environment, or empty. agent: pickled rollout.agent or agent of verifiers, or
    empty. tools: pickled functions of rollout.tools and their schemas. parser: of the judge's answers.
    answer_key: column with the records' answers, or empty. refused: records that a run would refuse, each
    with its problem.
    """

    config: Config
    name: str
    train: dict[str, list[Record]]
    held_out: dict[str, list[Record]]
    answer_key: str = ""
    refused: Sequence[tuple[str, str]] = ()
    functions: list[RewardFunction] = field(default_factory=list)
    environment: bytes = b""
    agent: bytes = b""
    tools: Tools = field(default_factory=lambda: Tools(b"", []))
    parser: RewardFunction | None = None
    model: str = ""
    write: bool = False

    @property
    def prompt_key(self) -> str:
        return self.config.data.prompt_key

    @property
    def records(self) -> list[Record]:
        """All training records, file by file."""
        return [record for rows in self.train.values() for record in rows]

    def answer_of(self, record: Record) -> Any:
        """Return the record's answer, the first of a list, or None."""
        value = value_at(record, self.answer_key) if self.answer_key else None
        return value[0] if isinstance(value, list) and value else value

    @property
    def has_tokenizer(self) -> bool:
        try:
            return bool(read_model_files(self.config.model.path, "model.path").tokenizer)
        except ConfigError:
            return False


def make_config(
    path: Path | None,
    environment: str,
    reward: str,
    data: str,
    overrides: Sequence[str] = (),
) -> Config:
    """Load the configuration, or make one of the command line's parts. Raises ConfigError."""
    settings = [] if path and _names_model(path) else [f"model.path={NO_MODEL}"]
    if environment:
        settings.append(f"rollout.environment={environment}")
    if environment and package_of(environment) and not data:
        data = environment
    if reward:
        settings.append(f"reward.function={reward}")
    if data:
        settings.append(f"data.train={data}")
    config = load(path, [*settings, *overrides])
    if not (config.data.train or config.data.sources):
        raise ConfigError("data.train='': names no data. Give --data FILE, or set it.")
    return config


def _names_model(path: Path) -> bool:
    section = read_yaml(path).get("model")
    return isinstance(section, DictConfig) and "path" in section


def read_subject(config: Config, name: str, answer_key: str = "") -> Subject:
    """Read the data, and import users' code in processes of its own. Raises ConfigError or DataError."""
    refused: list[tuple[str, str]] = []
    train = {path: _read(config, path, refused) for path in config.data.weights}
    validation = config.data.validation
    held_out = {validation: _read(config, validation, refused)} if validation else {}
    first = next(iter(train.values()))[0]
    problems = Problems()
    functions: list[RewardFunction] = []
    environment = b""
    agent = b""
    tools = Tools(b"", [])
    parser = None
    timeout_s = config.resources.user_code_timeout_s
    with problems.collecting():
        functions = _find_rewards(config, first)
    with problems.collecting():
        environment = _find_environment(config)
    with problems.collecting():
        agent = find_agent(config, quiet) if config.rollout.runs_agent else b""
    with problems.collecting():
        if config.rollout.tools:
            tools = find_tools("rollout.tools", config.rollout.tools, timeout_s=timeout_s)
    with problems.collecting():
        parser = find_parser(config, train | held_out, quiet)
    problems.raise_all()
    answers = _answer_key(config, first, functions, answer_key)
    return Subject(
        config,
        name,
        train,
        held_out,
        answers,
        refused,
        functions,
        environment,
        agent,
        tools,
        parser,
    )


def _read(config: Config, path: str, refused: list[tuple[str, str]]) -> list[Record]:
    """Read the records that a run would take, and note the others. Raises DataError if none is left."""
    records = []
    key = config.data.prompt_key
    for number, record in enumerate(iter_records(path), start=1):
        place = f"{path} record {number}"
        try:
            records.append(_clean(record, place, key, config.data.image_key))
        except DataError as error:
            refused.append((place, clause(error)))
    if not records:
        problem = refused[0][1] if refused else "it has no records"
        raise DataError(f"{path}: no record can be read: {problem}.")
    return records


def _clean(record: Record, place: str, prompt_key: str, image_key: str) -> Record:
    if prompt_key not in record:
        raise DataError(
            f"{place} has no {prompt_key!r}. Set data.prompt_key to the prompt's column."
        )
    prompt, images = with_images(
        clean_prompt(record[prompt_key], place), record.get(image_key), place
    )
    check_not_blank(prompt, place)
    return (
        record
        | {prompt_key: prompt}
        | ({image_key: images} if images and image_key else {})
    )


def _find_environment(config: Config) -> bytes:
    if not config.rollout.environment or config.rollout.runs_agent:
        return b""
    export_settings(config.rollout.sandbox)
    return pack_environment(config)


def _find_rewards(config: Config, first: Record) -> list[RewardFunction]:
    key = "reward.functions" if config.reward.functions else "reward.function"
    example = with_messages(config, first)
    functions = []
    for name, weight in config.reward.weights.items():
        function = import_function(config, quiet, key, name)
        columns = requested_columns(function.signature, example, name, key=key)
        functions.append(
            RewardFunction(name.rpartition(":")[2], weight, function.packed, columns)
        )
    return functions


def _answer_key(
    config: Config, first: Record, functions: Sequence[RewardFunction], answer_key: str
) -> str:
    """Return the column that is named, or of a usual name: one that the reward takes comes first."""
    if answer_key and value_at(first, answer_key) is None:
        raise ConfigError(
            f"--answer-key={answer_key}: the first record has {', '.join(sorted(first))}. Name one of these."
        )
    if answer_key:
        return answer_key
    present = [column for column in ANSWER_COLUMNS if value_at(first, column) is not None]
    taken = {column for function in functions for column in function.columns}
    read = [column for column in present if column.partition(".")[0] in taken]
    others = sorted(taken - NOT_ANSWERS - {config.data.prompt_key})
    alone = others if len(others) == 1 else []
    return next(iter([*read, *alone, *present]), "")


def value_at(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a dotted key in a mapping, or None."""
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
