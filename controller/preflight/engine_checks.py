"""Check turns and lengths of samples, for training and sampling."""

import os
from collections.abc import Mapping
from functools import partial

from controller.config import Config
from controller.config.functions import check_command, check_function, check_source
from controller.preflight.training_checks import check_caps
from workers.config.model import ROUNDED
from workers.config.roles import GATEWAY_KEY, HTTP, SamplingConfig
from workers.engine.batch_invariance import check_options
from workers.engine.engine_options import LORA_RANKS
from workers.episodes.parser_names import known_parsers
from workers.errors import ConfigError, Problems, check_together, raise_all
from workers.model.rules.batch_invariance import settings_problems
from workers.user_code.task_sources import (
    HARBOR,
    OPENENV,
    check_installed,
    name_and_options,
    package_of,
)

PLAYERS = ("environment", "tools", "agent", "agent_command")
"""Settings of rollout that make samples episodes, of which a run has one."""

SANDBOX_TOOLS = "workers.sandbox.tools"
SHORTEST_KEY = 16
COLDEST = 0.01
"""Lowest temperature at which vLLM samples."""


def response_limit(config: Config) -> str:
    """Name the settings that determine `Config.longest_response`."""
    if not config.rollout.plays_episodes:
        return f"{config.sampling_key}.max_new_tokens"
    if config.rollout.max_episode_tokens:
        return "rollout.max_episode_tokens"
    return f"rollout.max_turns * {config.sampling_key}.max_new_tokens"


def check_engine_count(config: Config) -> None:
    """Raise ConfigError if the number of engines is unknown, or a range that the placement cannot follow."""
    engines = config.rollout.engine_range
    if engines.is_elastic and config.rollout_placement == "colocated":
        raise ConfigError(
            f"rollout.replicas={config.rollout.replicas}: colocated engines share the policy's GPUs, whose "
            "number is fixed. Set rollout.placement=apart, or a number of engines."
        )
    if (
        config.uses_gpus
        and config.rollout_placement == "apart"
        and not (config.rollout.replicas or config.gpus)
    ):
        raise ConfigError(
            "rollout.replicas=0: the number of GPUs for engines is unknown. Set the number of "
            "engines, or describe the cluster of a dry run (--cluster)."
        )


def check_engine_adapters(config: Config) -> None:
    """Raise ConfigError where engines cannot take adapters."""
    lora = config.model.lora
    if not lora.sends_adapters:
        return
    several = (
        f"model.lora.policies={lora.policies}"
        if lora.policies > 1
        else "model.lora.sync=adapters"
    )
    if lora.rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: with {several}, the limit is {LORA_RANKS[-1]}. Lower it."
        )
    if lora.target_parameters and lora.target_parameters.count("experts.") != 2:
        raise ConfigError(
            f"model.lora.target_parameters={lora.target_parameters}: with {several}, vLLM takes both weights "
            "of experts or none. Set experts.gate_up_proj,experts.down_proj."
        )
    if config.model.base_dtype in ROUNDED:
        raise ConfigError(
            f"model.base_dtype={config.model.base_dtype}: with {several}, engines keep the base model of its "
            "files, not the rounded one that is trained. Set bfloat16, or one policy and "
            "model.lora.sync=merged."
        )
    if config.rollout_placement == "colocated":
        raise ConfigError(
            f"rollout.placement=colocated: engines that sleep lose the base model, which {several} never "
            "sends. Set apart."
        )
    if config.rollout.weight_sync == "delta":
        raise ConfigError(
            f"rollout.weight_sync=delta: with {several}, engines get whole adapters, which are small. "
            "Set full."
        )
    if config.rollout.runs_agent and lora.policies > 1:
        raise ConfigError(
            f"{several}: the requests of an agent name no policy. Use rollout.environment or tools."
        )


def check_batch_invariance(config: Config) -> None:
    """Raise ConfigError for settings with which the trainer could not compute as its engines do."""
    if not config.model.batch_invariant:
        return
    problems = settings_problems(config.model, config.policy.parallel)
    if config.rollout.tensor_parallel > 1:
        problems.append(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}: an engine's GPUs add in another "
            "order than the trainer, against model.batch_invariant=true. Set 1."
        )
    check_options(config.rollout.engine)
    raise_all([ConfigError(problem) for problem in problems])


def check_weight_sync(config: Config) -> None:
    if config.model.train_vision and config.rollout.kv_cache_after_update == "keep":
        raise ConfigError(
            "rollout.kv_cache_after_update=keep: with model.train_vision=true an update also changes the "
            "embeddings of images, whose keys and values would stay. Set auto or recompute."
        )
    if config.rollout.weight_sync == "full":
        return
    if config.rollout_placement == "colocated":
        raise ConfigError(
            "rollout.weight_sync=delta: engines that share the policy's GPUs (rollout.placement=colocated) "
            "drop their weights to sleep. Set full, or rollout.placement=apart."
        )
    if config.model.dtype == "float32" or (
        config.model.dtype == "auto" and not config.uses_gpus
    ):
        raise ConfigError(
            f"rollout.weight_sync=delta: model.dtype={config.model.dtype} is float32 here, and an update "
            "changes nearly all such weights. Set full, or model.dtype=bfloat16."
        )


FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def check_samplings(config: Config) -> None:
    judge = (
        {"reward.judge.sampling": config.reward.judge.sampling} if config.uses_judge else {}
    )
    problems = Problems()
    for key, sampling in (samplings(config) | judge).items():
        with problems.collecting():
            _check_sampling(key, sampling)
    problems.raise_all()


def _check_sampling(key: str, sampling: SamplingConfig) -> None:
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise ConfigError(
            f"{key}.min_new_tokens={sampling.min_new_tokens} is above {key}.max_new_tokens="
            f"{sampling.max_new_tokens}. Lower it."
        )
    if sampling.max_thinking_tokens >= sampling.max_new_tokens:
        raise ConfigError(
            f"{key}.max_thinking_tokens={sampling.max_thinking_tokens}: it leaves no room for an answer in "
            f"{key}.max_new_tokens={sampling.max_new_tokens}. Lower it."
        )
    if sampling.max_thinking_tokens and sampling.undivided:
        raise ConfigError(
            f"{key}.{sampling.undivided[0]} needs the whole response in one request, and "
            f"{key}.max_thinking_tokens={sampling.max_thinking_tokens} samples it in two. Remove one of the "
            "two."
        )
    for name in ("stop", "bad_words"):
        if not all(getattr(sampling, name)):
            raise ConfigError(
                f"{key}.{name}={getattr(sampling, name)}: a text is empty. Remove it."
            )
    if sampling.structured_outputs and [*sampling.structured_outputs] not in [
        [form] for form in FORMS
    ]:
        names = ", ".join(sampling.structured_outputs)
        raise ConfigError(
            f"{key}.structured_outputs has {names}. Give one of {', '.join(FORMS)}."
        )
    if 0 < sampling.temperature < COLDEST:
        raise ConfigError(
            f"{key}.temperature={sampling.temperature:g}: vLLM samples at {COLDEST:g} or above. Raise it, "
            "or set 0 (greedy, not in training)."
        )


def samplings(config: Config) -> dict[str, SamplingConfig]:
    by_key = {config.sampling_key: config.rollout.sampling}
    return by_key | (
        {"validation.sampling": config.validation.sampling}
        if config.data.validation
        else {}
    )


def check_turns(config: Config) -> None:
    """Raise ConfigError for a missing environment, tools or agent, unknown parsers, or turns longer than an
    episode.
    """
    rollout = config.rollout
    players = {
        f"rollout.{name}": getattr(rollout, name)
        for name in PLAYERS
        if getattr(rollout, name)
    }
    if not players:
        return
    key = next(iter(players))
    check_together(
        lambda: _check_one_player(players),
        lambda: check_together(
            *(partial(_check_player, *player) for player in players.items())
        ),
        lambda: _check_whole_turns(config, key),
        lambda: _check_agent(config, key) if rollout.runs_agent else None,
        lambda: _check_parser("tool_parser", rollout.tool_parser),
        lambda: _check_parser("reasoning_parser", rollout.reasoning_parser),
        lambda: _check_history(config),
        lambda: _check_longest_turn(config),
        lambda: _check_sandbox(config),
    )


def _check_one_player(players: Mapping[str, str]) -> None:
    (key, name), *others = players.items()
    for other, value in others:
        raise ConfigError(
            f"{key}={name}: {other}={value} plays the same episodes. Remove one of the two. Tools can be "
            "called in the environment or the agent."
        )


def _check_player(key: str, name: str) -> None:
    """Check the environment, tools or agent, which the setting `key` names."""
    if key == "rollout.tools":
        check_source(key, name)
    elif key == "rollout.agent_command":
        check_command(key, name)
    elif (key, name) == ("rollout.agent", HTTP):
        if len(os.environ.get(GATEWAY_KEY, "")) < SHORTEST_KEY:
            raise ConfigError(
                f"rollout.agent=http: {GATEWAY_KEY} has fewer than {SHORTEST_KEY} characters. Set this "
                "environment variable to a secret that agents send."
            )
    elif name.startswith("reasoning_gym:"):
        raise ConfigError(
            f"{key}={name}: its tasks have one turn. Set data.train={name} and "
            "reward.function=workers.reward_functions:reasoning_gym."
        )
    elif package_of(name) == OPENENV:
        _check_server(key, name)
    elif not package_of(name):
        check_function(key, name)


def _check_server(key: str, name: str) -> None:
    from workers.openenv.packages import check_name

    check_installed(key, name)
    try:
        check_name(name_and_options(name)[0])
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{key}={name}: {str(error).rstrip('.')}.") from None


def _check_sandbox(config: Config) -> None:
    """Raise ConfigError if the sandbox cannot be made here, or if nothing runs in it."""
    rollout = config.rollout
    if not rollout.sandbox.kind:
        if rollout.tools == SANDBOX_TOOLS:
            raise ConfigError(
                f"rollout.tools={SANDBOX_TOOLS}: rollout.sandbox.kind is empty. Set it, see "
                "docs/sandboxes.md."
            )
        if package_of(rollout.environment) == HARBOR:
            raise ConfigError(
                f"rollout.environment={rollout.environment}: rollout.sandbox.kind is empty, and tasks run "
                "in a sandbox. Set it, see docs/tasks.md."
            )
        return
    from workers.sandbox.kinds import check_agent_command, check_sandbox

    check_sandbox(rollout.sandbox)
    if package_of(rollout.environment) == HARBOR:
        from workers.harbor.task_folders import check_tasks

        check_tasks(rollout.environment, rollout.sandbox.kind, config.reward.timeout_s)
    if rollout.agent_command:
        check_agent_command(rollout.sandbox.kind)


def _check_whole_turns(config: Config, key: str) -> None:
    if config.data.continue_last_message:
        raise ConfigError(
            f"data.continue_last_message=true: {key} plays whole turns. Remove one of the two settings."
        )


def _check_parser(kind: str, name: str) -> None:
    if name and name not in (known := known_parsers(kind)):
        raise ConfigError(
            f"rollout.{kind}={name}: vLLM has no such parser. Use one of: {', '.join(sorted(known))}."
        )


def _check_history(config: Config) -> None:
    if config.rollout.history == "template" and config.needs_one_row:
        raise ConfigError(
            f"rollout.history=template: {config.needs_one_row} needs a sample in one row, and a chat "
            "template that rewrites earlier turns makes several. Set keep, or another algorithm."
        )


def _check_longest_turn(config: Config) -> None:
    rollout = config.rollout
    for key, sampling in samplings(config).items():
        if sampling.max_new_tokens > rollout.response_limit(sampling):
            raise ConfigError(
                f"rollout.max_episode_tokens={rollout.max_episode_tokens} is below "
                f"{key}.max_new_tokens={sampling.max_new_tokens}, the longest turn. Raise it, or leave it "
                "at 0."
            )


def _check_agent(config: Config, key: str) -> None:
    thoughts = {
        f"{section}.max_thinking_tokens": s.max_thinking_tokens
        for section, s in samplings(config).items()
    }
    problems = {
        "rollout.history=template": config.rollout.history == "template"
        and "sends its own history",
        "data.system_prompt": config.data.system_prompt and "writes all messages",
        config.needs_one_row: config.needs_one_row and "makes several rows of a sample",
        "algorithm.advantage=gigpo": config.algorithm.advantage == "gigpo"
        and "has no states that recur",
        "reward.overlong_tokens": config.reward.overlong_tokens
        and "has no limit on the length of a whole session",
        **{
            setting: budget and "has each turn sampled in one request"
            for setting, budget in thoughts.items()
        },
    }
    remove = "Remove one of the two settings"
    raise_all(
        [
            ConfigError(f"{setting}: {key} {problem}. {remove}.")
            for setting, problem in problems.items()
            if problem
        ]
    )


def check_lengths(config: Config) -> None:
    """Raise ConfigError if the longest possible sequence exceeds a micro-batch or an engine."""
    longest = config.longest_sequence
    parts = (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"{response_limit(config)}={config.longest_response} = {longest} tokens"
    )
    if config.rollout.runs_agent and config.rollout.max_model_tokens:
        parts = f"rollout.max_model_tokens={longest}"
    check_caps(config, config.limits.values(), longest, parts)
    if config.uses_reward_model and config.data.validation:  # it scores these sequences too
        key = "validation.sampling.max_new_tokens"
        response = config.rollout.response_limit(config.validation.sampling)
        validated = config.data.max_prompt_tokens + response
        parts = (
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
            f"{key}={response} = {validated} tokens"
        )
        check_caps(config, [config.limits["reward_model.scores"]], validated, parts)
    if config.max_model_tokens < config.needed_model_tokens:
        raise ConfigError(
            f"rollout.max_model_tokens={config.max_model_tokens} is below the {config.needed_model_tokens} "
            f"tokens that data.max_prompt_tokens and {response_limit(config)} (or validation.sampling) "
            "allow. Raise it or leave it at 0."
        )
