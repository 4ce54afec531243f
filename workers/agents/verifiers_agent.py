"""Environments of the package verifiers, as records and as an agent. Imported only in users' processes.

verifiers:NAME?select.limit=100 --records--> the tasks of its task set, a record each
verifiers:NAME?agent.harness.id=null --Agent--> (record, base_url, api_key) --> an episode, and its reward
"""

import base64
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

import cloudpickle
import httpx
import verifiers.v1 as vf
from pydantic import ValidationError

from workers.errors import LONGEST_QUOTE, ConfigError, EpisodeError
from workers.user_code.task_sources import TASK, name_and_options


def records(text: str) -> list[dict[str, Any]]:
    _, tasks = _make_environment(text, str(Path.cwd()))
    if not tasks.bounded:
        raise ConfigError(
            "it has tasks without end. Add select.limit=1000, or another number."
        )
    return [_record(task.data) for task in tasks]


def _make_environment(text: str, folder: str) -> tuple[vf.Env, vf.Taskset]:
    """Make an environment and the chosen tasks. Options are those of `vf-eval`, without `--env.`.

    folder: in which modules are found too, as by `python -m`.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name, options = name_and_options(text)
    options["taskset"] = {"id": name} | options.get("taskset", {})
    try:
        select = vf.SelectConfig.model_validate(options.pop("select", {}))
        env = vf.load_environment(vf.resolve_env_config(options))
        return env, env.taskset.select(select)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError(f"verifiers refuses its options: {', '.join(wrong)}.") from None


def _record(data: vf.TaskData) -> dict[str, Any]:
    prompt = data.prompt or data.name or "(the environment begins)"
    system = (
        [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    )
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [
            message.model_dump(mode="json", exclude_none=True) for message in prompt
        ]
    return {
        "prompt": system + messages,
        TASK: data.model_dump(mode="json", exclude_none=True),
    }


def pack_agent(text: str) -> str:
    """Return the agent of an environment, pickled, in base 64."""
    return base64.b64encode(cloudpickle.dumps(Agent(text, str(Path.cwd())))).decode()


class Agent:
    """Plays one episode of an environment a session. Unpickling makes the environment, so forks have it."""

    def __init__(self, text: str, folder: str) -> None:
        self._given = text, folder
        self._environment, _ = _make_environment(text, folder)

    def __reduce__(self) -> tuple[type["Agent"], tuple[str, str]]:
        return Agent, self._given

    async def __call__(
        self, record: dict[str, Any], base_url: str, api_key: str
    ) -> dict[str, float]:
        """Return the reward, and the rewards and metrics by name. Raises EpisodeError if the
        episode failed.
        """
        env = self._environment
        task_type = type(env.taskset).task_type()
        task = task_type(
            task_type.data_type().model_validate(record[TASK]), env.config.taskset.task
        )
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        async with env.serving():
            episode = await env.run_episode(
                task, vf.ModelContext(model="policy", client=client)
            )
        if not episode.ok:
            errors = [
                *episode.errors,
                *(error for trace in episode.traces for error in trace.errors),
            ]
            messages = [f"{error.type}: {error.message}" for error in errors]
            raise EpisodeError(
                shorten(", ".join(messages), LONGEST_QUOTE) or "the episode is not ok"
            )
        traces = [
            trace
            for trace in episode.traces
            if trace.agent.config.client.base_url == base_url
        ]
        _check_seats(traces)
        if len(traces) == 1:
            return _numbers(traces[0]) | {"reward": traces[0].reward}
        await _reward_seats(traces, base_url, api_key)
        return _mean_numbers(traces) | {"reward": fmean(trace.reward for trace in traces)}


def _check_seats(traces: list[vf.Trace]) -> None:
    """Raise EpisodeError unless agents sampled from the policy, and all of these learn."""
    if not traces or not all(trace.agent.trainable for trace in traces):
        seats = ", ".join(
            f"{trace.agent.name} (trainable={trace.agent.trainable})" for trace in traces
        )
        raise EpisodeError(
            f"agents that have the policy as their model must be trainable, not {seats}"
        )


async def _reward_seats(traces: list[vf.Trace], base_url: str, api_key: str) -> None:
    """Give the turns of each agent its own reward. verifiers names the agent's trace in each request."""
    url = f"{base_url.removesuffix('/v1')}/reward"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}) as client:
        for trace in traces:
            body = {"reward": trace.reward, "response_id": trace.id}
            answer = await client.post(url, json=body)
            if answer.is_error:
                raise EpisodeError(
                    f"the reward of {trace.agent.name}: {shorten(answer.text, LONGEST_QUOTE)}"
                )


def _numbers(trace: vf.Trace) -> dict[str, float]:
    """Return the rewards and metrics of an agent, by name."""
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {
        name: reward.score for name, reward in trace.rewards.items() if reward is not None
    }
    return metrics | rewards


def _mean_numbers(traces: list[vf.Trace]) -> dict[str, float]:
    """Return the numbers of several agents, by seat and name."""
    numbers = defaultdict[str, list[float]](list)
    for trace in traces:
        for name, value in (_numbers(trace) | {"reward": trace.reward}).items():
            numbers[f"{trace.agent.name}_{name}"].append(value)
    return {name: fmean(values) for name, values in numbers.items()}
