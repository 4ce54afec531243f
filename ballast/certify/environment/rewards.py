"""What policies without a model were paid: an oracle must win, and nobody else may come near it.

totals by policy and record --means--> pays_everything | pays_without_an_answer | pays_another_answer | ...
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ballast.certify.environment.play import PlayedEpisode
from ballast.certify.findings import Finding, Level

NEAR = 0.1  # of the distance from the worst policy to the oracle
ANOTHER = "oracle of another record"
EPSILON = 1e-9


@dataclass(frozen=True)
class Payments:
    """kind: environment or agent. place: the setting. totals: rewards of episodes by policy, one a record.

    oracle: the policy of the best form of the answer.
    may_repeat: policies that may be right without knowing, such as one that repeats what it reads.
    """

    kind: str
    place: str
    totals: Mapping[str, Sequence[float]]
    oracle: str = ""
    may_repeat: frozenset[str] = frozenset()

    @property
    def means(self) -> dict[str, float]:
        return {policy: fmean(totals) for policy, totals in self.totals.items() if totals}

    @property
    def evidence(self) -> str:
        return ", ".join(f"{policy} {mean:.3g}" for policy, mean in self.means.items())


def totals_of(episodes: Iterable[PlayedEpisode]) -> dict[str, list[float]]:
    """Return the rewards of whole episodes by policy."""
    totals: dict[str, list[float]] = {}
    for episode in episodes:
        if not episode.failure:
            totals.setdefault(episode.policy, []).append(episode.reward)
    return totals


def best_oracle(totals: Mapping[str, Sequence[float]]) -> str:
    """Return the form of the answer that is paid most, or ""."""
    oracles = {
        policy: fmean(paid)
        for policy, paid in totals.items()
        if policy.startswith("oracle,") and paid
    }
    return max(oracles, key=lambda policy: oracles[policy]) if oracles else ""


def payment_findings(payments: Payments) -> list[Finding]:
    """Name what is wrong with the rewards of the panel."""
    means = payments.means
    if not means:
        return []
    if constant := _constant_finding(payments):
        return [constant]
    if not payments.oracle:
        return []
    oracle = means[payments.oracle]
    others = {
        policy: mean
        for policy, mean in means.items()
        if not policy.startswith("oracle,") and policy != ANOTHER
    }
    best = max(others, key=lambda policy: others[policy], default="")
    lowest = min(others.values(), default=oracle)
    wins = best and oracle > others[best] + EPSILON
    punished = (
        min(mean for policy, mean in means.items() if policy.startswith("oracle,"))
        < lowest - EPSILON
    )
    if best and (oracle < others[best] - EPSILON or (punished and not wins)):
        return [_losing_oracle(payments, best)]
    threshold = oracle - NEAR * (oracle - lowest)
    findings = []
    for policy, mean in others.items():
        if mean >= threshold - EPSILON:
            findings.append(_hack(payments, policy))
    if ANOTHER in means and means[ANOTHER] >= threshold:
        findings.append(
            Finding(
                name=f"{payments.kind}.pays_another_answer",
                level=Level.CERTAIN,
                problem=f"{payments.place} pays the answer of another record as much as the record's answer",
                place=payments.place,
                advice="compare the response with the answer of the record that reset received",
                evidence=payments.evidence,
            )
        )
    return findings


def _constant_finding(payments: Payments) -> Finding | None:
    paid = {round(total, 9) for totals in payments.totals.values() for total in totals}
    if len(paid) > 1 or sum(map(len, payments.totals.values())) < 2:
        return None
    (total,) = paid
    if total <= 0:
        return Finding(
            name=f"{payments.kind}.nobody_paid",
            level=Level.NOTE,
            problem=f"{payments.place} paid {total:g} in every episode, so the panel says nothing on rewards",
            place=payments.place,
            advice="name the column of the answers by --answer-key, or try a model by the default level",
            evidence=payments.evidence,
        )
    return Finding(
        name=f"{payments.kind}.pays_everything",
        level=Level.CERTAIN,
        problem=f"{payments.place} paid {total:g} in every episode, whatever was written",
        place=payments.place,
        advice="let the reward depend on the policy's turns: a group of equal rewards teaches nothing",
        evidence=payments.evidence,
    )


def _losing_oracle(payments: Payments, best: str) -> Finding:
    means = payments.means
    oracles = [policy for policy in means if policy.startswith("oracle,")]
    oracle = min(oracles, key=lambda policy: means[policy])
    return Finding(
        name=f"{payments.kind}.oracle_does_not_win",
        level=Level.LIKELY,
        problem=f"{payments.place} pays the policy {best!r} {means[best]:.3g} and the record's answer "
        f"({oracle.removeprefix('oracle, ')}) {means[oracle]:.3g}",
        place=payments.place,
        advice="check the sign of the reward and the form in which the answer is read. Ignore this if an "
        "episode is won by several moves",
        evidence=payments.evidence,
    )


def _hack(payments: Payments, policy: str) -> Finding:
    means = payments.means
    return Finding(
        name=f"{payments.kind}.pays_without_an_answer",
        level=Level.LIKELY if policy in payments.may_repeat else Level.CERTAIN,
        problem=f"{payments.place} pays the policy {policy!r} {means[policy]:.3g}, and the right answer "
        f"{means[payments.oracle]:.3g}",
        place=payments.place,
        advice="make the reward depend on the answer: this policy knows nothing",
        evidence=payments.evidence,
    )
