"""Checks of a judge without its model: is the question about the record, is the answer read rightly?

question of another response, another record --> do they differ?
answers a judge may give --reward.judge.parser in a process--> grades --> findings
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.certify.findings import Finding, Level
from controller.config import Config
from controller.data.records import Record
from controller.lifecycle.judge_inputs import question
from workers.batch.score import Score
from workers.user_code.rewards import Call, RewardFunction, RewardProcess

PLACE = "reward.judge.parser"
RESPONSES = ("An apple is a fruit.", "It rains in the north.")
NO_GRADE = ("", "I cannot judge this.", "The response is about numbers.")


@dataclass(frozen=True)
class Reading:
    """An answer of a judge, and the grade that it means, or None for none."""

    answer: str
    meant: float | None


def check_judge(
    config: Config, parser: RewardFunction, records: Sequence[Record]
) -> list[Finding]:
    """Return the findings. Questions that do not show the response are refused by `find_parser` before."""
    findings = _check_questions(config, records)
    if config.reward.judge.form == "score":
        findings += _check_parser(config, parser, records[0])
    return findings


def _check_questions(config: Config, records: Sequence[Record]) -> list[Finding]:
    first = records[0]
    other = next((record for record in records if record != first), None)
    if other is None or question(config, first, RESPONSES[0]) != question(
        config, other, RESPONSES[0]
    ):
        return []
    return [
        Finding(
            name="judge.question_without_record",
            level=Level.CERTAIN,
            problem="the judge reads the same question for every record, so it cannot know the task",
            place="reward.judge.prompt",
            advice="write {{ prompt }}, or a column of the records, into the prompt",
            evidence=question(config, first, RESPONSES[0])[-200:],
        )
    ]


def _check_parser(config: Config, parser: RewardFunction, record: Record) -> list[Finding]:
    """Read answers by the parser. It may read another form: answers that it refuses are not findings."""
    settings = config.reward.judge
    low, high = settings.min_grade, settings.max_grade
    readings = [
        Reading(f"It is fair. [[{grade:g}]]", grade)
        for grade in (low, (low + high) // 2, high)
    ]
    quoted = f'The response says "give me [[{high:g}]]", which I ignore. [[{low:g}]]'
    readings.append(Reading(quoted, low))
    readings += [Reading(answer, None) for answer in NO_GRADE]
    process = RewardProcess(
        [parser], timeout_s=config.reward.timeout_s, concurrency=1, quiet=True
    )
    try:
        scores = _read(process, readings, record)
    finally:
        process.stop()
    for reading, score in zip(readings, scores, strict=True):
        is_grade = not score.failure and low <= score.reward <= high
        if reading.meant is None and is_grade:
            return [
                _wrong(
                    "judge.grade_from_nothing", reading, score.reward, "raise an exception"
                )
            ]
    for reading, score in zip(readings, scores, strict=True):
        if (
            reading.meant is not None
            and not score.failure
            and score.reward != reading.meant
        ):
            advice = "read the last grade: a judge quotes the response before it grades"
            return [_wrong("judge.wrong_grade", reading, score.reward, advice)]
    return []


def _read(
    process: RewardProcess, readings: Sequence[Reading], record: Record
) -> list[Score]:
    scores = []
    for number, reading in enumerate(readings):
        call = Call(number, reading.answer, record)
        scores.append(process.run([call])[number])
    return scores


def _wrong(name: str, reading: Reading, grade: float, advice: str) -> Finding:
    meant = "no grade" if reading.meant is None else f"{reading.meant:g}"
    return Finding(
        name=name,
        level=Level.CERTAIN,
        problem=f"the parser reads the grade {grade:g} in an answer that gives {meant}",
        place=PLACE,
        advice=advice,
        evidence=repr(reading.answer),
    )
