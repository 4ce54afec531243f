"""Checks of an environment: episodes end, repeat, do not see one another, and do not tell the answer.

records x panel --one pool of processes--> played episodes --> failures, ends, leaks, rewards
a few of these again: in a new process, twice in one, interleaved --> repeats, state, isolation
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ballast.certify.environment.failures import failure_findings
from ballast.certify.environment.leaks import leak_findings
from ballast.certify.environment.play import (
    PlayedEpisode,
    Record,
    Rules,
    play,
    play_interleaved,
    play_one,
    spread,
)
from ballast.certify.environment.policies import RANDOM, Policy, answer_of, oracles, panel
from ballast.certify.environment.rewards import (
    ANOTHER,
    Payments,
    best_oracle,
    payment_findings,
    totals_of,
)
from ballast.certify.findings import Finding, Level
from workers.user_code.environments import EnvironmentPool

RECORDS = 8  # that are played by the whole panel
REPEATED = 2  # records that are played again in new processes
HANGS = 2  # episodes that may hang before the panel is cut short
SLOW_S = 1.0
CHARACTERS_A_TOKEN = 20  # more is not one token


@dataclass(frozen=True)
class TriedEnvironment:
    """An environment to try. packed: its class. place: its setting, as messages name it.

    max_new_tokens: of a turn. max_tokens: of an episode after the prompt.
    """

    packed: bytes
    place: str
    rules: Rules
    answer_key: str
    timeout_s: float
    max_new_tokens: int
    max_tokens: int

    def new_pool(self) -> EnvironmentPool:
        return EnvironmentPool(self.packed, self.timeout_s)


async def check_environment(
    target: TriedEnvironment, records: Sequence[Record]
) -> tuple[list[Finding], list[PlayedEpisode]]:
    """Return the findings, and the episodes that were played."""
    chosen = spread(records, RECORDS)
    pool = target.new_pool()
    try:
        episodes = await _play_panel(target, pool, chosen)
        findings = failure_findings("environment", target.place, episodes)
        totals = totals_of(episodes)
        oracle = best_oracle(totals)
        if not findings:
            another = await _play_other_answers(target, pool, chosen, oracle)
            totals |= {ANOTHER: [episode.reward for episode in another]} if another else {}
            may_repeat = frozenset(
                policy.name for policy in panel(target.max_new_tokens) if policy.may_know
            )
            findings += payment_findings(
                Payments("environment", target.place, totals, oracle, may_repeat)
            )
        findings += _ending_findings(target, episodes)
        findings += leak_findings(
            "environment",
            target.place,
            target.rules.prompt_key,
            target.answer_key,
            chosen,
            episodes,
        )
        findings += _length_findings(target, episodes)
        findings += await _seed_findings(target, pool, chosen)
    finally:
        await pool.stop()
    findings += await _repetition_findings(target, chosen, episodes, oracle)
    return findings, episodes


async def _play_panel(
    target: TriedEnvironment, pool: EnvironmentPool, chosen: Sequence[tuple[int, Record]]
) -> list[PlayedEpisode]:
    episodes = list[PlayedEpisode]()
    for number, record in chosen:
        for policy in [*panel(target.max_new_tokens), *oracles(record, target.answer_key)]:
            episodes.append(await play_one(pool, target.rules, number, record, policy))
            if sum("took more than" in episode.failure for episode in episodes) >= HANGS:
                return episodes
    return episodes


async def _play_other_answers(
    target: TriedEnvironment,
    pool: EnvironmentPool,
    chosen: Sequence[tuple[int, Record]],
    oracle: str,
) -> list[PlayedEpisode]:
    """Play each record by the answer of the next one that has another answer."""
    if not oracle:
        return []
    episodes = []
    for position, (number, record) in enumerate(chosen):
        candidates = [row for _, row in [*chosen[position + 1 :], *chosen[:position]]]
        answer = answer_of(record, target.answer_key)
        candidate = next(
            (
                row
                for row in candidates
                if answer_of(row, target.answer_key) not in ("", answer)
            ),
            None,
        )
        if candidate is not None:
            policy = next(
                p for p in oracles(candidate, target.answer_key) if p.name == oracle
            )
            policy = Policy(ANOTHER, policy.answer)
            episodes.append(await play_one(pool, target.rules, number, record, policy))
    return [episode for episode in episodes if not episode.failure]


def _ending_findings(
    target: TriedEnvironment, episodes: Sequence[PlayedEpisode]
) -> list[Finding]:
    """Name an environment that no policy of the panel brought to an end."""
    whole = [episode for episode in episodes if not episode.failure]
    if not whole or any(episode.done for episode in whole):
        return []
    return [
        Finding(
            name="environment.episodes_do_not_end",
            level=Level.LIKELY,
            problem=f"no policy of the panel ended an episode: all {len(whole)} went on to "
            f"rollout.max_turns={target.rules.max_turns}",
            place=target.place,
            advice="return Observation(done=True) when the task is over, also after an answer that is wrong",
            evidence=f"{len(whole)} episodes, {target.rules.max_turns} turns each",
        )
    ]


def _length_findings(
    target: TriedEnvironment, episodes: Sequence[PlayedEpisode]
) -> list[Finding]:
    longest = max(episodes, key=lambda episode: max(map(len, episode.texts)))
    characters = max(map(len, longest.texts))
    if characters > CHARACTERS_A_TOKEN * target.max_tokens:
        return [
            Finding(
                name="environment.observation_too_long",
                level=Level.CERTAIN,
                problem=f"an observation has {characters:,} characters, more than "
                f"rollout.max_episode_tokens={target.max_tokens} tokens hold",
                place=f"{target.place}, record {longest.record}",
                advice="shorten it, or raise rollout.max_episode_tokens: no turn can follow",
                evidence=f"policy {longest.policy!r}",
            )
        ]
    answered = [episode for episode in episodes if not episode.failure]
    seconds = sorted(second for episode in answered for second in episode.seconds)
    if not seconds or (slow := seconds[int(0.95 * (len(seconds) - 1))]) <= SLOW_S:
        return []
    return [
        Finding(
            name="environment.slow",
            level=Level.NOTE,
            problem=f"one call in twenty takes more than {slow:.1f} s",
            place=target.place,
            advice="load what steps need at the import, which episodes share",
            evidence=f"median {seconds[len(seconds) // 2]:.2f} s over {len(seconds)} calls",
        )
    ]


async def _repetition_findings(
    target: TriedEnvironment,
    chosen: Sequence[tuple[int, Record]],
    episodes: Sequence[PlayedEpisode],
    oracle: str,
) -> list[Finding]:
    """Play a few episodes again: in new processes, twice in one process, and interleaved."""
    failed = {episode.record for episode in episodes if episode.failure}
    whole = {episode.record for episode in episodes} - failed
    cases = []
    for number, record in [case for case in chosen if case[0] in whole][:REPEATED]:
        for policy in [*panel(target.max_new_tokens), *oracles(record, target.answer_key)]:
            if policy.name in (RANDOM, oracle):
                cases.append((number, record, policy))
    pool = target.new_pool()
    try:
        return await _repeat(target, pool, cases, episodes)
    finally:
        await pool.stop()


async def _repeat(
    target: TriedEnvironment,
    pool: EnvironmentPool,
    cases: Sequence[tuple[int, Record, Policy]],
    episodes: Sequence[PlayedEpisode],
) -> list[Finding]:
    panels = {(episode.record, episode.policy): episode for episode in episodes}
    firsts = []
    async with AsyncExitStack() as stack:
        # All at once, so that each has a process in which nothing was played.
        environments = [await stack.enter_async_context(pool.episode()) for _ in cases]
        for case, environment in zip(cases, environments, strict=True):
            first = await play(environment, target.rules, *case)
            again = await play(environment, target.rules, *case)
            for repeat in (again, panels[first.record, first.policy]):
                if first.trace != repeat.trace:
                    return [await _name_difference(target, case, first, repeat)]
            firsts.append(first)
    together = await play_interleaved(pool, target.rules, [*cases, *cases])
    for first, interleaved in zip([*firsts, *firsts], together, strict=True):
        if first.trace != interleaved.trace:
            return [_shared(target, first, interleaved)]
    return []


async def _name_difference(
    target: TriedEnvironment,
    case: tuple[int, Record, Policy],
    first: PlayedEpisode,
    later: PlayedEpisode,
) -> Finding:
    """Play an episode in one more new process, which tells chance from what earlier episodes left."""
    pool = target.new_pool()
    try:
        repeat = await play_one(pool, target.rules, *case)
    finally:
        await pool.stop()
    if first.trace != repeat.trace:
        return _differs(target, first, repeat)
    return _left_behind(target, first, later)


def _differs(
    target: TriedEnvironment, first: PlayedEpisode, repeat: PlayedEpisode
) -> Finding:
    opening = first.opening != repeat.opening
    return Finding(
        name="environment.reset_differs" if opening else "environment.steps_differ",
        level=Level.CERTAIN if opening else Level.LIKELY,
        problem=f"{'reset' if opening else 'step'} answers differently in two processes, to the same record "
        f"{'' if opening else 'and the same turns'}".strip(),
        place=f"{target.place}, record {first.record}",
        advice="take randomness from the record, such as random.Random(record['seed']): responses of a group "
        "are compared as answers to one task",
        evidence=_difference(first, repeat),
    )


def _left_behind(
    target: TriedEnvironment, first: PlayedEpisode, later: PlayedEpisode
) -> Finding:
    return Finding(
        name="environment.state_left_behind",
        level=Level.CERTAIN,
        problem="an episode differs when others were played before it in the same process",
        place=f"{target.place}, record {first.record}",
        advice="keep state in self, and set all of it in reset: processes are used again",
        evidence=_difference(first, later),
    )


def _shared(
    target: TriedEnvironment, first: PlayedEpisode, together: PlayedEpisode
) -> Finding:
    return Finding(
        name="environment.episodes_share_state",
        level=Level.CERTAIN,
        problem="an episode differs when others are played at the same time",
        place=f"{target.place}, record {first.record}",
        advice="give each episode its own files, ports and tables, such as tempfile.mkdtemp() in reset",
        evidence=_difference(first, together),
    )


def _difference(first: PlayedEpisode, repeat: PlayedEpisode) -> str:
    pairs = zip(first.trace, repeat.trace, strict=False)
    position, (value, changed) = next(
        ((position, pair) for position, pair in enumerate(pairs) if pair[0] != pair[1]),
        (0, ("", "")),
    )
    where = "reset" if position == 0 else f"turn {position}"
    return f"{where}: {str(value)[:80]!r}, then {str(changed)[:80]!r} (policy {first.policy!r})"


async def _seed_findings(
    target: TriedEnvironment, pool: EnvironmentPool, chosen: Sequence[tuple[int, Record]]
) -> list[Finding]:
    """Say whether a record's seed matters, if it has one."""
    seeded = [
        (number, record) for number, record in chosen if isinstance(record.get("seed"), int)
    ][:REPEATED]
    if not seeded:
        return []
    policy = panel(target.max_new_tokens)[1]
    matters = False
    for number, record in seeded:
        traces = []
        for offset in range(3):
            changed = record | {"seed": record["seed"] + offset}
            traces.append(
                (await play_one(pool, target.rules, number, changed, policy)).trace
            )
        matters = matters or any(trace != traces[0] for trace in traces)
    if matters:
        return []
    return [
        Finding(
            name="environment.seed_not_read",
            level=Level.LIKELY,
            problem="episodes are the same for other seeds of a record",
            place=f"{target.place}, record {seeded[0][0]}, column seed",
            advice="seed the environment by record['seed'], or leave the column out",
            evidence=f"3 seeds each of {len(seeded)} records",
        )
    ]
