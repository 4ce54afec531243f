"""Say in lines what a dry run and a run have read and tried."""

from typing import Any

from controller.config import Config
from controller.config.file import value_of
from controller.config.training import count_noun
from controller.data.prompts import PromptDataset
from controller.lifecycle.chat_inputs import tool_name
from controller.lifecycle.inputs import Tried
from controller.lifecycle.judge_inputs import question
from controller.lifecycle.template_report import short_lines
from controller.lifecycle.tokenized_inputs import Inputs
from controller.lifecycle.user_functions import Records
from controller.observability.certificates import read_certificate
from controller.observability.shown_text import redact, shorten
from workers.batch.score import Score
from workers.config.roles import HTTP
from workers.environment import as_text
from workers.user_code.environments import Answered

LONGEST_SHOWN = 2_000  # characters of a prompt in a dry run


def tried_lines(config: Config, tried_inputs: Tried) -> list[str]:
    code = [
        *config.reward.weights,
        *([config.rollout.environment] if tried_inputs.answered else []),
    ]
    agent = config.rollout.agent or (
        "" if tried_inputs.answered else config.rollout.environment
    )
    return [
        *(
            f"{path}: {count_noun(len(rows), 'record')}"
            for path, rows in (tried_inputs.train | tried_inputs.held_out).items()
        ),
        *_epoch_lines(config, tried_inputs.train),
        *(
            [f"{', '.join(code)}: tried on the first record and an empty response"]
            if code
            else []
        ),
        *([_score_line(tried_inputs.score)] if tried_inputs.score else []),
        *(_episode_lines(tried_inputs.answered) if tried_inputs.answered else []),
        *(
            quote_lines(
                "the judge reads:",
                question(config, next(iter(tried_inputs.train.values()))[0]),
            )
            if tried_inputs.parser
            else []
        ),
        *(
            [
                f"{config.rollout.tools}: tools {', '.join(map(tool_name, tried_inputs.tools))}"
            ]
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
        *_sandbox_lines(config),
        *([f"{config.run.step}: imported, makes each step"] if tried_inputs.step else []),
        *(
            f"{value_of(config, key)}: {key}, tried on made-up samples"
            for key in tried_inputs.functions
        ),
        *(
            [f"{config.data.sampler}: data.sampler, tried on two steps"]
            if tried_inputs.sampled
            else []
        ),
        *(f"warning: {line}" for line in tried_inputs.answer_warnings),
        *certificate_lines(config),
    ]


def _sandbox_lines(config: Config) -> list[str]:
    sandbox = config.rollout.sandbox
    if not sandbox.kind:
        return []
    network = "the network" if sandbox.network else "no network"
    limits = f"{sandbox.cpus:g} CPUs, {sandbox.memory_gib:g} GiB, {sandbox.processes:,} processes"
    return [f"{sandbox.kind}: a sandbox for each sample, {limits}, {network}"]


def certificate_lines(config: Config) -> list[str]:
    """Return the summary of the certificate beside the data, if there is one."""
    certificate = read_certificate(config.data.weights)
    return [certificate.line] if certificate else []


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
        *quote_lines(
            "the environment adds to the first prompt:", as_text(answered.opening)
        ),
        f"the environment's reward of an empty response: {observation.reward:g}{parts}{end}",
        *(
            []
            if observation.done
            else quote_lines("its observation:", as_text(observation.text))
        ),
    ]


def quote_lines(title: str, text: str) -> list[str]:
    excerpt = shorten(redact(text), LONGEST_SHOWN)
    return [title, *(f"    {line}" for line in excerpt.split("\n"))] if text else []


def _score_line(score: Score) -> str:
    parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
    answer = f", read from it the answer {score.answer!r}" if score.answer else ""
    return f"the reward of an empty response: {score.reward:g}{parts}{answer}"


def prompt_lines(inputs: Inputs) -> list[str]:
    datasets = [*inputs.sources, *([inputs.validation] if inputs.validation else [])]
    quote = quote_lines("the first prompt, as engines read it:", inputs.first_prompt)
    return [
        *quote,
        *(_tokens_line(dataset) for dataset in datasets),
        *(f"warning: {line}" for line in inputs.warnings),
    ]


def token_facts(dataset: Any) -> dict[str, Any]:
    """Return numbers of a data set of prompts or sequences."""
    tokens = dataset.lengths
    return {
        "name": dataset.name,
        "count": len(tokens),
        "shortest": int(min(tokens)),
        "longest": int(max(tokens)),
        "dropped": dataset.dropped,
    }


def _tokens_line(dataset: PromptDataset) -> str:
    tokens = dataset.lengths
    changed = [
        f"{count} {change}"
        for count, change in (
            (dataset.dropped, "dropped"),
            (dataset.truncated, "truncated"),
        )
    ]
    return (
        f"{dataset.name}: {count_noun(len(dataset), 'prompt')} of {min(tokens)} to {max(tokens)} tokens, "
        f"{sum(tokens) / len(tokens):.0f} on average; above data.max_prompt_tokens: {', '.join(changed)}"
    )


def _agent_line(config: Config) -> str:
    return (
        "agents elsewhere play each sample"
        if config.rollout.agent == HTTP
        else "imported, plays each sample"
    )
