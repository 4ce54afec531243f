"""Import what plays and scores samples, and try it on the first record in another process."""

from controller.config import Config
from controller.config.functions import requested_columns
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.data.records import Record
from controller.lifecycle.user_functions import import_function, waiting
from controller.observability.slow_work import Log
from controller.preflight.algorithm_checks import check_keep_best
from workers.batch.score import Score
from workers.config.roles import HTTP
from workers.errors import ConfigError, Problems
from workers.user_code.environments import Answered, try_environment
from workers.user_code.functions import find_class
from workers.user_code.rewards import MESSAGES, RewardFunction, try_rewards
from workers.user_code.task_sources import (
    HARBOR,
    HARBOR_CLASS,
    OPENENV,
    find_verifiers_agent,
    package_of,
)

AGENT_TAKES = ("record", "base_url", "api_key")


def reward_functions(
    config: Config,
    example: Record,
    log: Log = print,
    call_functions: GivenFunctions = NONE_GIVEN,
) -> tuple[list[RewardFunction], Score | None]:
    """Try the reward functions on `example`, the first record, with an empty response. Raises ConfigError."""
    functions = []
    score = None
    example = with_messages(config, example)
    key = "reward.functions" if config.reward.functions else "reward.function"
    problems = Problems()
    for name, weight in config.reward.weights.items():
        with problems.collecting():
            function = call_functions.get(name) or import_function(config, log, key, name)
            columns = requested_columns(function.signature, example, name, key=key)
            functions.append(
                RewardFunction(name.rpartition(":")[2], weight, function.packed, columns)
            )
    problems.raise_all()
    if functions:
        with waiting(log, f"{key}, tried on an empty response", config, "reward.timeout_s"):
            score = try_rewards(functions, example, config.reward.timeout_s)
        check_keep_best(config, score.parts)
    return functions, score


def find_environment(
    config: Config, example: Record, log: Log
) -> tuple[bytes, Answered | None]:
    key = "rollout.environment"
    name = config.rollout.environment
    if not name or config.rollout.runs_agent:
        return b"", None
    with waiting(log, f"the import of {name}, {key}", config):
        packed = pack_environment(config)
    with waiting(log, f"{key}, tried on an empty response", config, "reward.timeout_s"):
        answered = try_environment(packed, example, config.reward.timeout_s)
    return packed, answered


def pack_environment(config: Config) -> bytes:
    """Return the class of rollout.environment, pickled. Raises ConfigError."""
    key = "rollout.environment"
    name = config.rollout.environment
    if package_of(name) == OPENENV:
        from workers.openenv.environment import pack_server_environment

        return pack_server_environment(name)
    place = HARBOR_CLASS if package_of(name) == HARBOR else name
    return find_class(
        key, place, ("reset", "step"), timeout_s=config.resources.user_code_timeout_s
    )


def find_agent(config: Config, log: Log) -> bytes:
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
    agent = import_function(config, log, key, name)
    if len(agent.signature.required) > len(AGENT_TAKES) or len(agent.signature.names) < len(
        AGENT_TAKES
    ):
        raise ConfigError(
            f"{key}={name!r}: must take {', '.join(AGENT_TAKES)}. Write `def run(record, ...)` so."
        )
    return agent.packed


def with_messages(config: Config, record: Record) -> Record:
    """The record, with the transcript that reward functions get of an episode of chat messages."""
    if not config.rollout.plays_episodes or isinstance(
        prompt := record[config.data.prompt_key], str
    ):
        return record
    return record | {MESSAGES: [*prompt, {"role": "assistant", "content": ""}]}
