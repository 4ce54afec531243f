"""Point 3, second half: is a score the same again, in time, and without leaks?

the same calls --again, in another process, order, alone, clock, without network--> the same scores?
500 calls in one process --> files, sockets, processes, memory
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from ballast.certify.certificate import Certificate
from ballast.certify.findings import Finding, Level
from ballast.certify.panel import (
    Drawn,
    Policy,
    answer_policies,
    blind_policies,
    draw,
    find_form,
    make_call,
    open_rewards,
)
from ballast.certify.probe import Conditions, Holdings
from ballast.certify.subject import Subject
from workers.batch.score import Score
from workers.errors import quote
from workers.user_code.rewards import Call

COMPARED = 64  # calls, at most, which are scored COMPARISONS times
COMPARISONS = 8
COMPARE_SECONDS = 8.0
TIMED = 4  # calls, by whose time the number of others is chosen
LEAK_CALLS = 500
FEWEST_LEAK_CALLS = 15
WARM_CALLS = 100  # of these, before the first measurement
LEAK_SECONDS = 6.0
MOST_LEAKED = 0.2  # files, sockets or processes a call
MOST_BYTES = 20_000  # of memory a call
MOST_BLOCKS = 0.9  # of Python's allocator a call
CACHED_BLOCKS = 200  # that caches may fill in half of the calls
SLOW_SECONDS = 1.0
SHOWN_TIMES = (50, 90, 99, 100)
MOMENTS = (1_700_000_000.0, 1_734_253_247.0)
"""Every part from year to second is odd in one and even in the other."""
Scores = Mapping[int, Score]


def check_behaviour(subject: Subject, certificate: Certificate) -> None:
    """Score the same calls under several conditions, and measure times and leaks."""
    if not subject.functions:
        certificate.skip("reward behaviour", "the configuration names no reward function")
        return
    calls = _affordable(subject, _calls(subject))
    place = ", ".join(subject.config.reward.weights)
    scores, seconds, addresses = _score_twice(subject, calls, certificate, place)
    if scores is not None:
        certificate.add(*_network(subject, calls, scores, addresses, place))
    check_times(certificate, seconds, place)
    _check_leaks(
        subject, certificate, calls, max(float(np.mean(seconds or [0.0])), 1e-6), place
    )


def _calls(subject: Subject) -> list[Call]:
    """Return calls of several policies, each for another record where the data suffice."""
    drawn = draw(subject, COMPARED)
    policies = blind_policies(subject, drawn)[:3]
    if any(row.answer is not None for row in drawn):
        rewards = open_rewards(subject)
        _, form, _ = find_form(subject, rewards, drawn)
        rewards.stop()
        policies = [*answer_policies(drawn, form)[:3], *policies]
    return [_call(subject, number, drawn, policies) for number in range(COMPARED)]


def _affordable(subject: Subject, calls: Sequence[Call]) -> Sequence[Call]:
    """Return as many calls as fit COMPARE_SECONDS, by the time of the first."""
    rewards = open_rewards(subject)
    rewards.run(calls[:1])  # imports
    rewards.measure()
    rewards.run(calls[:TIMED])
    holdings = rewards.measure()
    rewards.stop()
    mean = float(np.mean(holdings.seconds)) if holdings and holdings.seconds else 1.0
    return calls[: int(max(TIMED, COMPARE_SECONDS / (COMPARISONS * max(mean, 1e-6))))]


def _call(
    subject: Subject, number: int, drawn: Sequence[Drawn], policies: Sequence[Policy]
) -> Call:
    row = number % len(drawn)
    response = policies[number % len(policies)].responses[row]
    return make_call(subject, number, drawn[row].record, response or "")


def _score_twice(
    subject: Subject, calls: Sequence[Call], certificate: Certificate, place: str
) -> tuple[Scores | None, list[float], list[str]]:
    """Compare scores of the same calls. Return them if they are always the same, with times and addresses."""
    rewards = open_rewards(subject)
    first = rewards.run(calls)
    holdings = rewards.measure()
    again = rewards.run(calls)
    backwards = rewards.run(calls[::-1])
    rewards.stop()
    other = open_rewards(subject)
    elsewhere = other.run(calls)
    other.stop()
    alone = _score_alone(subject, calls)
    seconds = holdings.seconds if holdings else []
    addresses = holdings.addresses if holdings else []
    certificate.add_coverage(
        "reward determinism",
        f"{len(calls)} calls: twice, in two processes, in another order, alone, under two clocks",
        f"differences rarer than about 1 in {len(calls)} calls",
    )
    random = _difference(first, elsewhere)
    clock = _clock_difference(subject, calls, first, is_random=bool(random))
    if clock or random:
        certificate.add(
            clock_finding(clock, place) if clock else random_finding(random, place)
        )
        return None, seconds, addresses
    for name, problem, advice, scores in (
        (
            "reward.keeps_state",
            "scores a response differently the second time",
            "Keep no state.",
            again,
        ),
        (
            "reward.depends_on_order",
            "scores depend on the order of calls",
            "Keep no state.",
            backwards,
        ),
        (
            "reward.depends_on_batch",
            "scores a response alone differently than among others",
            "Score each response by itself: which samples meet is chance.",
            alone,
        ),
    ):
        if difference := _difference(first, scores):
            certificate.add(
                Finding(
                    name, Level.CERTAIN, f"The reward {problem}.", place, advice, difference
                )
            )
            return None, seconds, addresses
    return first, seconds, addresses


def _score_alone(subject: Subject, calls: Sequence[Call]) -> Scores:
    rewards = open_rewards(subject)
    scores: dict[int, Score] = {}
    for call in calls:
        scores |= rewards.run([call])
    rewards.stop()
    return scores


def _score_under(
    subject: Subject, calls: Sequence[Call], conditions: Conditions
) -> tuple[Scores, Holdings | None]:
    rewards = open_rewards(subject, conditions)
    scores = rewards.run(calls)
    holdings = rewards.measure()
    rewards.stop()
    return scores, holdings


def _difference(scores: Scores, others: Scores) -> str:
    """Describe the first call whose reward differs, or return an empty text."""
    different = [
        number
        for number in scores.keys() & others.keys()
        if not np.isclose(
            scores[number].reward, others[number].reward, rtol=1e-6, atol=1e-9
        )
    ]
    if not different:
        return ""
    number = min(different)
    return (
        f"{len(different)} of {len(scores)} calls differ, such as {scores[number].reward:.6g} and "
        f"{others[number].reward:.6g} for {quote(scores[number].response)}"
    )


def _clock_difference(
    subject: Subject, calls: Sequence[Call], first: Scores, *, is_random: bool
) -> str:
    """Describe a difference between two frozen clocks, if a frozen clock gives the same scores again."""
    earlier, _ = _score_under(subject, calls, Conditions(MOMENTS[0]))
    later, _ = _score_under(subject, calls, Conditions(MOMENTS[1]))
    difference = _difference(earlier, later)
    if difference and is_random:
        same_moment, _ = _score_under(subject, calls, Conditions(MOMENTS[0]))
        return "" if _difference(earlier, same_moment) else difference
    return difference


def clock_finding(difference: str, place: str) -> Finding:
    return Finding(
        "reward.depends_on_clock",
        Level.CERTAIN,
        "The reward depends on date or time of day.",
        place,
        "Read no clock: the same response must earn the same tomorrow.",
        difference,
    )


def random_finding(difference: str, place: str) -> Finding:
    return Finding(
        "reward.not_deterministic",
        Level.CERTAIN,
        "The reward scores the same response differently in another process.",
        place,
        "Draw nothing at random, or seed by the response.",
        difference,
    )


def _network(
    subject: Subject,
    calls: Sequence[Call],
    first: Scores,
    addresses: Sequence[str],
    place: str,
) -> list[Finding]:
    scores, holdings = _score_under(subject, calls, Conditions(network=False))
    addresses = [*addresses, *(holdings.addresses if holdings else [])]
    difference = _difference(first, scores)
    if not addresses:
        return []
    changed = (
        f". Cut off, {difference}" if difference else ". Cut off, the scores are the same"
    )
    return [
        Finding(
            "reward.needs_network",
            Level.LIKELY,
            "The reward reaches for the network.",
            place,
            "Score without it, or be sure that every node reaches the address for the whole run.",
            f"{', '.join(dict.fromkeys(addresses))}{changed}",
        )
    ]


def check_times(certificate: Certificate, seconds: Sequence[float], place: str) -> None:
    """Tabulate the times of calls by percentile, and name slow ones."""
    if not seconds:
        return
    milliseconds = {
        f"p{percent}": round(float(np.percentile(seconds, percent)) * 1000, 3)
        for percent in SHOWN_TIMES
    }
    certificate.add_table("reward milliseconds", [milliseconds | {"calls": len(seconds)}])
    slow = float(np.percentile(seconds, 90))
    if slow > SLOW_SECONDS:
        certificate.add(
            Finding(
                "reward.slow",
                Level.LIKELY,
                f"A tenth of the calls take longer than {slow:.1f} s.",
                place,
                "Make it faster, make it a coroutine (reward.concurrency), or raise reward.workers.",
            )
        )


def _check_leaks(
    subject: Subject,
    certificate: Certificate,
    calls: Sequence[Call],
    seconds: float,
    place: str,
) -> None:
    """Repeat calls in one process, and compare what it holds after a first part, half and all of them."""
    count = int(min(LEAK_CALLS, max(LEAK_SECONDS / seconds, FEWEST_LEAK_CALLS)))
    warm = count * WARM_CALLS // LEAK_CALLS
    half = (count - warm) // 2
    rewards = open_rewards(subject)
    measured = []
    start = time.monotonic()
    for part in (warm, half, half):
        for offset in range(0, part, len(calls)):
            rewards.run(calls[: min(len(calls), part - offset)])
        measured.append(rewards.measure())
    rewards.stop()
    certificate.add_coverage(
        "reward leaks",
        f"{count} calls in one process, {time.monotonic() - start:.1f} s",
        f"less than {MOST_BYTES / 1000:g} kB a call",
    )
    before, middle, after = measured
    if before and middle and after:
        certificate.add(*_leaks(before, middle, after, half, place))


def _leaks(
    before: Holdings, middle: Holdings, after: Holdings, half: int, place: str
) -> list[Finding]:
    findings = []
    for attribute, words, limit in (
        ("sockets", "sockets", MOST_LEAKED),
        ("files", "open files", MOST_LEAKED),
        ("children", "processes", MOST_LEAKED),
        ("resident", "bytes of memory", MOST_BYTES),
        ("blocks", "objects in memory", MOST_BLOCKS),
    ):
        counts = [getattr(holdings, attribute) for holdings in (before, middle, after)]
        least = min(counts[1] - counts[0], counts[2] - counts[1])
        growth = least / half
        if growth > limit and (attribute != "blocks" or least > CACHED_BLOCKS):
            findings.append(
                Finding(
                    f"reward.leaks_{'memory' if attribute in ('resident', 'blocks') else attribute}",
                    Level.CERTAIN,
                    f"Every call of the reward leaves about {growth:,.2g} {words} behind.",
                    place,
                    "Close, end or drop what a call opens: a run makes millions of calls.",
                    f"{words}: {counts[0]:,}, {counts[1]:,}, {counts[2]:,} after equal numbers of calls",
                )
            )
            break  # a socket is a file too
    return findings
