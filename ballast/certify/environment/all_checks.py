"""The check of what plays and judges episodes, as the command calls it.

Subject --environment | tools | agent | judge--> findings, coverage, tables --> Certificate
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from ballast.certify.certificate import Certificate
from ballast.certify.environment.agent_checks import TriedAgent, check_agent
from ballast.certify.environment.checks import REPEATED, TriedEnvironment, check_environment
from ballast.certify.environment.judge_checks import check_judge
from ballast.certify.environment.play import PlayedEpisode, Rules
from ballast.certify.environment.policies import answer_of
from ballast.certify.environment.rewards import totals_of
from ballast.certify.environment.solutions import check_solutions
from ballast.certify.environment.tool_checks import TriedTools, check_tools
from ballast.certify.findings import Finding, Level
from ballast.certify.subject import ANSWER_COLUMNS, Subject
from controller.config import Config
from controller.lifecycle.tokenized_inputs import task_warnings
from workers.config.roles import HTTP
from workers.environment import as_text

CHECK = "environment and tools"


def check_environments(subject: Subject, certificate: Certificate) -> None:
    """Try what plays the episodes of a configuration, and its judge. Raises ConfigError for a sandbox that
    this machine cannot make.
    """
    sandbox = subject.config.rollout.sandbox
    if not sandbox.kind:
        _check_players(subject, certificate)
        return
    from workers.sandbox.kinds import (
        check_sandbox,
        export_settings,
        remove_left_over_sandboxes,
    )

    check_sandbox(sandbox)
    export_settings(sandbox)
    try:
        _check_players(subject, certificate)
    finally:
        remove_left_over_sandboxes(sandbox)


def _check_players(subject: Subject, certificate: Certificate) -> None:
    rollout = subject.config.rollout
    if subject.environment:
        _check_environment(subject, certificate)
    elif subject.tools.packed:
        _check_tools(subject, certificate)
    elif rollout.runs_agent and rollout.agent != HTTP:
        _check_agent(subject, certificate)
    elif rollout.runs_agent:
        certificate.skip(CHECK, "rollout.agent=http: the agent runs elsewhere")
    else:
        certificate.skip(CHECK, "samples have one turn: no environment, tools or agent")
    if subject.parser is not None:
        certificate.add(*check_judge(subject.config, subject.parser, subject.records))
        certificate.add_coverage(
            "judge", "its question, and its parser on 7 answers", "not its model"
        )


def _check_environment(subject: Subject, certificate: Certificate) -> None:
    config = subject.config
    target = TriedEnvironment(
        subject.environment,
        f"rollout.environment={config.rollout.environment}",
        Rules(subject.prompt_key, config.rollout.max_turns),
        _answer_key(subject),
        config.reward.timeout_s,
        config.rollout.sampling.max_new_tokens,
        config.longest_response,
    )
    findings, episodes = asyncio.run(check_environment(target, subject.records))
    certificate.add(*findings)
    solved, count = asyncio.run(check_solutions(target, subject.records))
    certificate.add(*solved, *_unread_findings(config, target.place))
    if count:
        certificate.add_coverage(
            "solutions", f"{count:,} of {len(subject.records):,} tasks, each once"
        )
    _cover(
        certificate,
        "environment",
        subject,
        episodes,
        f"{REPEATED} records again, alone and interleaved",
    )


def _unread_findings(config: Config, place: str) -> list[Finding]:
    return [
        Finding(
            name="environment.task_not_read",
            level=Level.NOTE,
            problem=line,
            place=place,
            advice="set what the task needs in rollout.sandbox, or leave the task out",
        )
        for line in task_warnings(config)
    ]


def _check_agent(subject: Subject, certificate: Certificate) -> None:
    rollout = subject.config.rollout
    value = rollout.environment or rollout.agent or rollout.agent_command
    key = next(
        name
        for name in ("environment", "agent", "agent_command")
        if getattr(rollout, name) == value
    )
    target = TriedAgent(
        subject.agent or rollout.agent_command,
        f"rollout.{key}={value}",
        subject.prompt_key,
        _answer_key(subject),
        rollout.agent_timeout_s,
        rollout.max_turns,
        rollout.agent_memory_gib,
        rollout.agent_processes,
        rollout.sandbox,
    )
    report = asyncio.run(check_agent(target, subject.records))
    if report.other_routes:
        route = report.other_routes[0]
        certificate.skip(
            CHECK, f"the agent calls {route}, and the panel serves chat completions alone"
        )
        return
    certificate.add(*report.findings)
    _cover(
        certificate,
        "agent",
        subject,
        report.episodes,
        "behind an address of chat completions",
    )


def _check_tools(subject: Subject, certificate: Certificate) -> None:
    config = subject.config
    rollout = config.rollout
    target = TriedTools(
        subject.tools,
        config.reward.timeout_s,
        rollout.max_tool_calls,
        rollout.max_tool_characters,
        rollout.sandbox,
    )
    texts = [as_text(record[subject.prompt_key]) for record in subject.records[:3]]
    findings, calls = asyncio.run(check_tools(target, texts))
    certificate.add(*findings)
    certificate.add_coverage(
        "tools", f"{calls} calls of {len(subject.tools.schemas)} tools", "not their use"
    )


def _answer_key(subject: Subject) -> str:
    """Return the column with the answers. A task of verifiers has columns of its own."""
    record = subject.records[0]
    keys = [subject.answer_key, *ANSWER_COLUMNS]
    return next((key for key in keys if key and answer_of(record, key)), "")


def _cover(
    certificate: Certificate,
    name: str,
    subject: Subject,
    episodes: Sequence[PlayedEpisode],
    also: str,
) -> None:
    records = len({episode.record for episode in episodes})
    over = (
        f"{len(episodes)} episodes of {records} of {len(subject.records):,} records, {also}"
    )
    certificate.add_coverage(name, over, "policies without a model do not play well")
    certificate.add_table(f"{name} rewards", _reward_rows(episodes))


def _reward_rows(episodes: Sequence[PlayedEpisode]) -> list[dict[str, Any]]:
    rows = []
    for policy, totals in totals_of(episodes).items():
        mean = sum(totals) / len(totals)
        rows.append(
            {"policy": policy, "mean": mean, "lowest": min(totals), "highest": max(totals)}
        )
    return rows
