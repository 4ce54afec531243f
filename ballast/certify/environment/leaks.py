"""Look for the record's answer in what the policy reads."""

import re
from collections.abc import Sequence

from ballast.certify.environment.play import PlayedEpisode, Record
from ballast.certify.environment.policies import answer_of, panel
from ballast.certify.findings import Finding, Level

MARKED = r"(answer|solution|correct|expected|target|truth)\W+(\w+\W+){0,3}"
"""Words before an answer that say what it is, so that no chance put it there."""


def leak_findings(
    kind: str,
    setting: str,
    prompt_key: str,
    answer_key: str,
    chosen: Sequence[tuple[int, Record]],
    episodes: Sequence[PlayedEpisode],
) -> list[Finding]:
    """Name answers in what a policy reads. The answers of other records say how often that is chance."""
    answers = {number: answer_of(record, answer_key) for number, record in chosen}
    prompts = {number: str(record[prompt_key]) for number, record in chosen}
    by_record: dict[int, list[str]] = {}
    knowing = {policy.name for policy in panel(1) if policy.may_know}
    for episode in episodes:
        if episode.policy not in knowing and not episode.policy.startswith("oracle,"):
            by_record.setdefault(episode.record, []).extend(episode.texts)
    leaks = []
    chance = 0
    marked = 0
    for number, texts in by_record.items():
        text = "\n".join(texts)
        answer = answers[number]
        if not answer or _holds(prompts[number], answer):
            continue
        others = [other for other in answers.values() if other not in ("", answer)]
        chance += (
            bool(others) and sum(_holds(text, other) for other in others) > len(others) / 2
        )
        if _holds(text, answer):
            leaks.append((number, text))
            marked += _holds(text, answer, MARKED)
    if not leaks or 2 * len(leaks) < len(by_record) or 2 * chance >= len(leaks):
        return []
    number, text = leaks[0]
    place = re.search(_pattern(answers[number]), text, re.IGNORECASE)
    assert place is not None
    return [
        Finding(
            name=f"{kind}.observation_holds_answer",
            level=Level.CERTAIN if 2 * marked >= len(leaks) else Level.LIKELY,
            problem=f"what the policy reads holds the answer in {len(leaks)} of {len(by_record)} records, "
            "though the policy did not write it",
            place=f"{setting}, record {number}",
            advice="leave the answer out of what reset and step return",
            evidence=repr(text[max(0, place.start() - 40) : place.end() + 10]),
        )
    ]


def _holds(text: str, answer: str, before: str = "") -> bool:
    return re.search(before + _pattern(answer), text, re.IGNORECASE) is not None


def _pattern(answer: str) -> str:
    return rf"(?<!\w){re.escape(answer)}(?!\w)"
