"""The subject of a certificate: what a configuration names, read by the readers of a run.

    mine.yaml | --environment verifiers:NAME | --reward file.py:f --data file --> Config --> Subject

Users' code is imported and pickled in processes of its own. This process never unpickles it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from controller.config import Config, load
from controller.config.functions import requested_columns
from controller.config.model_files import read_model_files
from controller.data.records import Record, read_records
from controller.lifecycle.judge_inputs import find_parser
from controller.lifecycle.reward_inputs import find_agent, with_messages
from controller.lifecycle.user_functions import import_function
from workers.errors import ConfigError, Problems
from workers.user_code.functions import Tools, find_class, find_tools
from workers.user_code.rewards import RewardFunction
from workers.user_code.task_sources import package_of

NO_MODEL = "no-model"  # model.path where the command line names no configuration
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label", "expected", "reference")


def quiet(text: str) -> None:
    """Drop a line about slow work: the page of the certificate is the output."""


@dataclass(frozen=True)
class Subject:
    """What is certified.

    train, held_out: records by path. functions: of the reward, to be run by `RewardProcess`. environment:
    pickled class of rollout.environment, or empty. agent: pickled rollout.agent or agent of verifiers, or
    empty. tools: pickled functions of rollout.tools and their schemas. parser: of the judge's answers.
    answer_key: column with the records' answers, or empty.
    """

    config: Config
    name: str
    train: dict[str, list[Record]]
    held_out: dict[str, list[Record]]
    answer_key: str
    functions: list[RewardFunction] = field(default_factory=list)
    environment: bytes = b""
    agent: bytes = b""
    tools: Tools = field(default_factory=lambda: Tools(b"", []))
    parser: RewardFunction | None = None

    @property
    def prompt_key(self) -> str:
        return self.config.data.prompt_key

    @property
    def records(self) -> list[Record]:
        """All training records, file by file."""
        return [record for rows in self.train.values() for record in rows]

    @property
    def has_tokenizer(self) -> bool:
        try:
            return bool(read_model_files(self.config.model.path, "model.path").tokenizer)
        except ConfigError:
            return False


def make_config(
    path: Path | None, environment: str, reward: str, data: str, overrides: Sequence[str] = ()
) -> Config:
    """Load the configuration, or make one of the command line's parts. Raises ConfigError."""
    settings = [f"model.path={NO_MODEL}"] if path is None else []
    if environment:
        settings.append(f"rollout.environment={environment}")
    if environment and package_of(environment) and not data:
        data = environment
    if reward:
        settings.append(f"reward.function={reward}")
    if data:
        settings.append(f"data.train={data}")
    config = load(path, [*settings, *overrides])
    if not config.data.weights:
        raise ConfigError("data.train='': names no data. Give --data FILE, or set it.")
    return config


def read_subject(config: Config, name: str, answer_key: str = "") -> Subject:
    """Read the data, and import users' code in processes of its own. Raises ConfigError or DataError."""
    train = {path: _read(config, path) for path in config.data.weights}
    validation = config.data.validation
    held_out = {validation: _read(config, validation)} if validation else {}
    first = next(iter(train.values()))[0]
    subject = Subject(config, name, train, held_out, _answer_key(first, answer_key))
    problems = Problems()
    functions: list[RewardFunction] = []
    environment, agent, tools, parser = b"", b"", Tools(b"", []), None
    timeout_s = config.resources.user_code_timeout_s
    with problems.collecting():
        functions = _find_rewards(config, first)
    with problems.collecting():
        if config.rollout.environment and not config.rollout.runs_agent:
            name_of_class = config.rollout.environment
            environment = find_class(
                "rollout.environment", name_of_class, ("reset", "step"), timeout_s=timeout_s
            )
    with problems.collecting():
        agent = find_agent(config, quiet) if config.rollout.runs_agent else b""
    with problems.collecting():
        if config.rollout.tools:
            tools = find_tools("rollout.tools", config.rollout.tools, timeout_s=timeout_s)
    with problems.collecting():
        parser = find_parser(config, train | held_out, quiet)
    problems.raise_all()
    return replace(
        subject, functions=functions, environment=environment, agent=agent, tools=tools, parser=parser
    )


def _read(config: Config, path: str) -> list[Record]:
    return read_records(path, prompt_key=config.data.prompt_key, log=quiet, image_key=config.data.image_key)


def _find_rewards(config: Config, first: Record) -> list[RewardFunction]:
    key = "reward.functions" if config.reward.functions else "reward.function"
    example = with_messages(config, first)
    functions = []
    for name, weight in config.reward.weights.items():
        function = import_function(config, quiet, key, name)
        columns = requested_columns(function.signature, example, name, key=key)
        functions.append(RewardFunction(name.rpartition(":")[2], weight, function.packed, columns))
    return functions


def _answer_key(first: Record, answer_key: str) -> str:
    if answer_key and answer_key not in first:
        raise ConfigError(
            f"--answer-key={answer_key}: the first record has {', '.join(sorted(first))}. Name one of these."
        )
    return answer_key or next((column for column in ANSWER_COLUMNS if column in first), "")
