"""What a check reports: findings, and what it looked at."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """certain: a defect. likely: a defect unless meant so. note: no defect, worth knowing."""

    CERTAIN = "certain"
    LIKELY = "likely"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A defect, or what may be one.

    name: fixed, such as `reward.not_deterministic`. problem, advice: a sentence each. place: a record, file
    or setting. evidence: what the check saw, such as numbers or a response.
    """

    name: str
    level: Level
    problem: str
    place: str
    advice: str
    evidence: str = ""


@dataclass(frozen=True)
class Coverage:
    """What a check looked at.

    check: such as `reward determinism`. over: such as `64 of 10,000 records`. bound: what the check cannot
    see, such as `differences rarer than 1 in 64 answers`.
    """

    check: str
    over: str
    bound: str = ""
