"""Conditions that sections name in `only_with`. Settings without effect are refused, and before that those
of CPUs left out on GPUs.

"model.lora.rank above 0"       another setting: KEY, KEY=a or b, KEY above 0, KEY other than a,
                                KEY left empty
".schedule=linear or cosine"    a setting of the same section
"GPUs"                          a name in the schema's `conditions`, with its words and whether it holds
"""

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from controller.config.file import settings, value_of
from workers.errors import ConfigError, raise_all

Conditions = dict[str, tuple[str, Callable[[Any], bool]]]

CONDITIONS: Conditions = {
    "GPUs": ("GPUs", lambda c: c.uses_gpus),
    "CPUs": ("engines on CPUs", lambda c: not c.uses_gpus),
    "engines": ("engines (a run of controller.fit)", lambda c: c.samples),
    "engines on GPUs": (
        "engines on GPUs (vLLM's on CPUs do not say which experts a token went through)",
        lambda c: c.uses_gpus and c.samples,
    ),
    "episodes": (
        "rollout.environment, rollout.tools or an agent",
        lambda c: c.rollout.plays_episodes,
    ),
    "an agent": ("rollout.agent or rollout.agent_command", lambda c: c.rollout.runs_agent),
    "an agent's process": (
        "rollout.agent (other than http) or rollout.agent_command",
        lambda c: c.rollout.runs_agent and c.rollout.agent != "http",
    ),
    "code in a sandbox": (
        "rollout.tools, rollout.environment or rollout.agent_command",
        lambda c: bool(c.rollout.tools or c.rollout.environment or c.rollout.agent_command),
    ),
    "reasoning": (
        "rollout.environment, rollout.tools, an agent or a thinking budget (sampling.max_thinking_tokens)",
        lambda c: (
            c.rollout.plays_episodes
            or c.rollout.sampling.max_thinking_tokens > 0
            or c.validation.sampling.max_thinking_tokens > 0
        ),
    ),
    "several ranks": ("several training ranks", lambda c: c.training_workers > 1),
    "copies in memory": (
        "run.max_restarts above 0, rollout.max_staleness=0 and batch.replay.share=0",
        lambda c: (
            c.run.max_restarts > 0
            and not (c.samples and (c.rollout.max_staleness or c.batch.replay.share))
        ),
    ),
    "reference": (
        "algorithm.loss.kl_coefficient above 0 or algorithm.kl_in_reward.coefficient above 0",
        lambda c: (
            c.algorithm.loss.kl_coefficient > 0 or c.algorithm.kl_in_reward.coefficient > 0
        ),
    ),
    "own reference": (
        "a separate reference (with model.lora.rank above 0 that needs reference.path)",
        lambda c: c.uses("reference") and (not c.model.lora.rank or bool(c.reference.path)),
    ),
    "own teacher": (
        "teacher.path or teacher.paths",
        lambda c: c.uses("teacher") and bool(c.teacher.path or c.teacher.paths),
    ),
    "a reward model": (
        "reward.model.path or reward.model.paths",
        lambda c: bool(c.reward.model.path or c.reward.model.paths),
    ),
    "discount": (
        "algorithm.gamma below 1 (with gae algorithm.gae.gamma)",
        lambda c: (c.algorithm.gae if c.uses_critic else c.algorithm).gamma < 1,
    ),
    "several updates": (
        "batch.mini_batches or batch.epochs above 1 (the only update of a step starts at the old values)",
        lambda c: c.updates_per_step > 1,
    ),
    "old policy": (
        "batch.mini_batches, batch.epochs above 1, rollout.max_staleness or batch.replay.share above 0 "
        "(the only update of a step starts where the samples came from: all ratios are 1)",
        lambda c: c.updates_per_step > 1 or c.old_log_probs == "sampler",
    ),
    "policy's forward pass": (
        "batch.mini_batches or batch.epochs above 1 (and no ratios to the sampler's log-probs)",
        lambda c: c.has_forward_pass,
    ),
    "forward pass": (
        "a forward-only pass: batch.mini_batches or batch.epochs above 1, a KL, a teacher, a critic or a "
        "reward model",
        lambda c: c.has_forward_pass or len(c.used_roles) > 1,
    ),
}
"""Conditions by name, which a command's schema may replace."""

FORWARD_PASSES = ("policy's forward pass", "forward pass")

_OF_A_SETTING = re.compile(r"([\w.]+)(=| above | other than | left empty)?(.*)")


def effect_words(conditions: Conditions, only_with: Iterable[str]) -> str:
    """Describe a setting's conditions in a sentence, or return "" if every run of the command meets them."""
    words = [
        conditions[condition][0] if condition in conditions else condition
        for condition in only_with
    ]
    return f"Only with {', and with '.join(filter(None, words))}." if any(words) else ""


def holds(config: Any, condition: str) -> bool:
    if condition in config.conditions:
        return bool(config.conditions[condition][1](config))
    key, form, words = _OF_A_SETTING.fullmatch(condition).groups()  # type: ignore[union-attr]
    value = value_of(config, key)
    met = {
        "=": str(value) in words.split(" or "),
        " other than ": str(value) != words,
        " above ": form == " above " and value > float(words),
        " left empty": not value,
    }
    return met[form] if form else bool(value)


def leave_out_cpu_settings(config: Any) -> None:
    """Give settings of CPUs their default again on GPUs, with one line.

    Settings of GPUs are refused on CPUs instead: a run that was written for GPUs and finds none should not
    begin.
    """
    names: list[str] = []
    for setting in settings(type(config)()) if config.uses_gpus else ():
        value = value_of(config, setting.key)
        if "CPUs" in setting.only_with and value != setting.default:
            section, _, name = setting.key.rpartition(".")
            setattr(value_of(config, section), name, setting.default)
            names.append(f"{setting.key}={value}")
    if names:
        print(
            f"{', '.join(names)}: left out, because this run is on GPUs.", file=sys.stderr
        )


def check_settings_have_effect(config: Any) -> None:
    """Raise CombinedConfigError with every changed setting that has no effect in this combination."""
    errors: list[ConfigError] = []
    for setting in settings(type(config)()):
        value = value_of(config, setting.key)
        if value == setting.default or setting.follows:
            continue
        condition = next(
            (condition for condition in setting.only_with if not holds(config, condition)),
            None,
        )
        if condition is not None:
            needed = (
                config.conditions[condition][0]
                if condition in config.conditions
                else condition
            )
            errors.append(
                ConfigError(
                    f"{setting.key}={value} has no effect without {needed}. Set that, or remove "
                    f"{setting.key}."
                )
            )
    raise_all(errors)
