"""Checks of rollout.agent and of environments of verifiers: policies without a model answer their requests.

record --AgentPool: a process--> agent --HTTP--> Script: a policy of the panel
                                   '--> its reward, and what it showed --> PlayedEpisode --> findings
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ballast.certify.environment.failures import failure_findings
from ballast.certify.environment.leaks import leak_findings
from ballast.certify.environment.play import PlayedEpisode, Record, spread
from ballast.certify.environment.policies import RANDOM, Policy, constant, oracles, panel
from ballast.certify.environment.rewards import (
    Payments,
    best_oracle,
    payment_findings,
    totals_of,
)
from ballast.certify.environment.scripted_server import Script, serving
from ballast.certify.findings import Finding, Level
from workers.agents.processes import AgentPool, session_variables
from workers.config.sandbox import SandboxConfig
from workers.environment import Observation
from workers.errors import EpisodeError

RECORDS = 3
POLICIES = ("empty", RANDOM, "a call of an unknown tool", "odd characters")
KEY = "certify"  # of the HTTP address, which asks for none


@dataclass(frozen=True)
class TriedAgent:
    """packed: the agent, or a command line, which runs in the sandbox. place: its setting. memory_gib,
    processes: of a session.
    """

    packed: bytes | str
    place: str
    prompt_key: str
    answer_key: str
    timeout_s: float
    max_turns: int
    memory_gib: float
    processes: int
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def new_pool(self) -> AgentPool:
        limits: dict[str, Any] = {
            "memory_gib": self.memory_gib,
            "processes": self.processes,
        }
        if isinstance(self.packed, str) and self.sandbox.kind:
            from workers.sandbox.pools import SandboxAgentPool

            return SandboxAgentPool(
                self.packed, self.timeout_s, sandbox=self.sandbox, **limits
            )
        return AgentPool(self.packed, self.timeout_s, **limits)


@dataclass
class AgentReport:
    """other_routes: of the API that agents call and the panel does not serve."""

    findings: list[Finding]
    episodes: list[PlayedEpisode]
    other_routes: list[str]


async def check_agent(target: TriedAgent, records: Sequence[Record]) -> AgentReport:
    chosen = spread(records, RECORDS)
    pool = target.new_pool()
    report = AgentReport([], [], [])
    try:
        for number, record in chosen:
            silent = [policy for policy in panel(64) if policy.name in POLICIES]
            for policy in [*silent, *oracles(record, target.answer_key)]:
                report.episodes.append(
                    await _play(target, pool, number, record, policy, report)
                )
        if report.other_routes:
            return report
        report.findings = failure_findings("agent", target.place, report.episodes)
        # Without a reward of the agent, reward functions score the sample.
        rewarded = [
            episode for episode in report.episodes if episode.observations and episode.done
        ]
        totals = totals_of(episode for episode in rewarded if episode.observations[-1].done)
        if not report.findings:
            payments = Payments("agent", target.place, totals, best_oracle(totals))
            report.findings += payment_findings(payments)
            report.findings += leak_findings(
                "agent",
                target.place,
                target.prompt_key,
                target.answer_key,
                chosen,
                report.episodes,
            )
        if not report.findings:
            report.findings += await _repeat(target, pool, chosen, report)
    finally:
        await pool.stop()
    return report


async def _play(
    target: TriedAgent,
    pool: AgentPool,
    number: int,
    record: Record,
    policy: Policy,
    report: AgentReport,
) -> PlayedEpisode:
    """Play a session. An agent's reward stands in the last observation, none without a reward."""
    played = PlayedEpisode(number, policy.name)
    script = Script(policy, target.max_turns)
    score = None
    with serving(script) as url:
        try:
            score = await pool.run(record, session_variables(f"{url}/v1", url, KEY))
            played.done = True
        except EpisodeError as error:
            played.failure = "" if script.too_many else str(error)
    report.other_routes.extend(script.other_routes)
    played.opening = script.texts[0] if script.texts else ""
    played.observations = [Observation(text) for text in script.texts[1:]]
    if score is not None:
        played.observations.append(Observation(reward=score.reward, done=True))
    return played


async def _repeat(
    target: TriedAgent,
    pool: AgentPool,
    chosen: Sequence[tuple[int, Record]],
    report: AgentReport,
) -> list[Finding]:
    """Play sessions of the first records again, alone and at once."""
    policy = Policy("a word", constant("stone"))
    cases = list(chosen[:2])
    alone = [await _play(target, pool, *case, policy, report) for case in cases]
    again = [await _play(target, pool, *case, policy, report) for case in cases]
    for first, repeat in zip(alone, again, strict=True):
        if first.trace != repeat.trace:
            return [_finding(target, first, repeat, at_once=False)]
    together = await asyncio.gather(
        *(_play(target, pool, *case, policy, report) for case in [*cases, *cases])
    )
    for first, repeat in zip([*alone, *alone], together, strict=True):
        if first.trace != repeat.trace:
            return [_finding(target, first, repeat, at_once=True)]
    return []


def _finding(
    target: TriedAgent, first: PlayedEpisode, repeat: PlayedEpisode, *, at_once: bool
) -> Finding:
    return Finding(
        name="agent.episodes_share_state" if at_once else "agent.not_repeatable",
        level=Level.CERTAIN if at_once else Level.LIKELY,
        problem="a session differs when others are played at the same time"
        if at_once
        else "two sessions of the same record and the same policy differ",
        place=f"{target.place}, record {first.record}",
        advice="give each session its own files, ports and tables"
        if at_once
        else "take randomness from the record: responses of a group are compared as answers to one task",
        evidence=f"{first.trace!r:.100}, then {repeat.trace!r:.100}",
    )
