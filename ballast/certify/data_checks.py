"""Point 2: the data, without a model.

records --> refused, duplicates, overlap with validation, truncated, answers inside prompts, missing answers
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ballast.certify.certificate import Certificate
from ballast.certify.duplicates import (
    FEWEST_PAIRS,
    duplicates,
    near_duplicates,
    normal,
    telling_pairs,
)
from ballast.certify.findings import Finding, Level
from ballast.certify.oracle import text_of
from ballast.certify.panel import prompt_text
from ballast.certify.subject import Subject
from controller.data.prompts import is_too_long
from controller.data.records import Record
from workers.errors import quote
from workers.user_code.task_sources import package_of

FEW = 0.01  # of the records, up to which repeated prompts are a note
CUT_ENDS = re.compile(
    r"(?:…|\[truncated\]|<truncated>|\(truncated\)|\[\.\.\.\]|\.\.\. ?\[cut\])\s*$",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.?!:;)\]}>\"'`$|*=%。？！：）]\s*$")
USUAL = 0.98  # of the prompts end with a sentence: the others are cut
OFTEN = 4  # times as often as other prompts of its length
FEWEST_OFTEN = 8  # times, which tasks of two digits reach by chance
FEWEST = 30  # prompts for a statement about their ends
NAMED_ANSWER = (
    r"(?:answer|solution|hint|ground[ _]truth|result|expected|label|target)"
    r"\W{0,4}(?:\s*is\W{0,3})?\s*"
)
MARKS = (NAMED_ANSWER, r"####\s*", r"\\boxed\{\s*", r"<answer>\s*")
LONG_WORD = re.compile(r"[^\W\d_]{3,}")
LONG_ANSWER = 25  # characters of an answer that stands in a prompt by no chance


@dataclass(frozen=True)
class Row:
    """A record of the training or validation data. text: of its prompt. answer: as a text, or None."""

    place: str
    record: Record
    text: str
    answer: str | None
    held_out: bool


def check_data(subject: Subject, certificate: Certificate) -> None:
    """Check all records of training and validation data."""
    rows = rows_of(subject)
    train = [row for row in rows if not row.held_out]
    certificate.add(*_refused(subject))
    is_generated = any(map(package_of, subject.train))
    checks: Iterable[Callable[[], list[Finding]]] = (
        lambda: _repeated(train, is_generated=is_generated),
        lambda: _conflicting(train, is_generated=is_generated),
        lambda: _overlap(rows),
        lambda: _near(rows),
        lambda: _cut(rows),
        lambda: _overlong(subject, rows),
        lambda: _answers_inside(rows),
        lambda: _missing_answers(subject, rows),
        lambda: _missing_columns(subject, rows),
    )
    for check in checks:
        certificate.add(*check())
    certificate.add_coverage(
        "data",
        f"all {len(train):,} training and {len(rows) - len(train):,} validation records",
        "paraphrases, and duplicates of data that a model was pretrained on",
    )


def rows_of(subject: Subject) -> list[Row]:
    rows = []
    for held_out, data in ((False, subject.train), (True, subject.held_out)):
        for path, records in data.items():
            for number, record in enumerate(records, start=1):
                answer = subject.answer_of(record)
                text = None if answer is None else text_of(answer)
                place = f"{path} record {number}"
                rows.append(
                    Row(place, record, prompt_text(subject, record), text, held_out)
                )
    return rows


def _places(rows: Sequence[Row]) -> str:
    names = ", ".join(row.place for row in rows[:3])
    return names if len(rows) <= 3 else f"{names} and {len(rows) - 3:,} more"


def _identity(row: Row) -> Hashable:
    """Return what two records of one task share: prompt, answer, and whatever images they have.

    With other answers, prompts of the same words are other tasks: blanks draw rectangles and mazes.
    """
    return normal(row.text), row.answer, _media(row)


def _media(row: Row) -> str:
    media = [
        value for value in row.record.values() if isinstance(value, (bytes, list, dict))
    ]
    return json.dumps(media, default=repr) if _has_media(row.record) else ""


def _has_media(record: Record) -> bool:
    return any(
        "image" in name or isinstance(value, bytes) for name, value in record.items()
    )


def _refused(subject: Subject) -> list[Finding]:
    if not subject.refused:
        return []
    problem = subject.refused[0][1]
    is_empty = "empty prompt" in problem
    return [
        Finding(
            "data.empty_prompt" if is_empty else "data.refused",
            Level.CERTAIN,
            f"A run refuses {len(subject.refused):,} records: {problem}.",
            ", ".join(place for place, _ in subject.refused[:3]),
            "Correct or remove them: the run stops at the first.",
        )
    ]


def _repeated(train: Sequence[Row], *, is_generated: bool) -> list[Finding]:
    """Find repeated prompts. Those of a package's generator repeat by chance, which is a note."""
    identities = [_identity(row) for row in train]
    repeated = duplicates(identities)
    if not repeated:
        return []
    share = len(repeated) / len(train)
    are_copies = (
        not is_generated and share > FEW and _are_copies(train, identities, repeated)
    )
    second, first = next(iter(repeated.items()))
    return [
        Finding(
            "data.duplicates",
            Level.LIKELY if are_copies else Level.NOTE,
            f"{len(repeated):,} of {len(train):,} training prompts repeat an earlier one.",
            _places([train[place] for place in repeated]),
            "Remove them, unless they should weigh more.",
            f"{train[second].place} repeats {train[first].place}: {quote(train[first].text)}",
        )
    ]


def _conflicting(train: Sequence[Row], *, is_generated: bool) -> list[Finding]:
    """Find one prompt, to the letter, with two answers.

    Packages of tasks verify answers: two integrals of one function may both be right, which is a note.
    """
    repeated = duplicates([(row.text.strip(), _media(row)) for row in train])
    conflicts = [
        (train[place], train[first])
        for place, first in repeated.items()
        if train[place].answer != train[first].answer
    ]
    if not conflicts:
        return []
    row, first_row = conflicts[0]
    return [
        Finding(
            "data.conflicting_answers",
            Level.NOTE if is_generated else Level.CERTAIN,
            f"{len(conflicts):,} training prompts repeat another record's with a different answer.",
            _places([row for row, _ in conflicts]),
            "Correct one of the answers: a reward cannot pay both.",
            f"{quote(row.answer)}, and {quote(first_row.answer)} in {first_row.place}",
        )
    ]


def _are_copies(
    train: Sequence[Row], identities: Sequence[Hashable], repeated: dict[int, int]
) -> bool:
    """Whether prompts repeat by copying. Draws from a small space of short tasks repeat by chance."""
    offsets = Counter(place - first for place, first in repeated.items())
    if max(offsets.values()) >= max(3, len(repeated) / 2):
        return True  # a block of records
    first = list(
        {
            identity: place for place, identity in reversed(list(enumerate(identities)))
        }.values()
    )
    pairs, _ = telling_pairs([train[place].text for place in first])
    told = dict(zip((identities[place] for place in first), map(len, pairs), strict=True))
    rich = sum(told[identities[place]] >= FEWEST_PAIRS for place in repeated)
    return rich > max(1, FEW * len(train)) or _is_repeated_often(train, identities)


def _is_repeated_often(train: Sequence[Row], identities: Sequence[Hashable]) -> bool:
    """Whether a prompt comes much more often than others of its length."""
    counts = Counter(identities)
    # Prompts that differ in blanks alone are one, and have one length.
    sizes = {
        identity: len(row.text) for row, identity in zip(train, identities, strict=True)
    }
    prompts_of_size = Counter(sizes[identity] for identity in identities)
    distinct_of_size = Counter(sizes.values())
    for identity, size in sizes.items():
        usual = prompts_of_size[size] / distinct_of_size[size]
        if counts[identity] > max(OFTEN * usual, FEWEST_OFTEN):
            return True
    return False


def _overlap(rows: Sequence[Row]) -> list[Finding]:
    """Find validation prompts among the training prompts."""
    first = {_identity(row): row for row in reversed(rows) if not row.held_out}
    held_out = [row for row in rows if row.held_out]
    shared = [row for row in held_out if _identity(row) in first]
    if not shared:
        return []
    twin = first[_identity(shared[0])]
    return [
        Finding(
            "data.validation_in_train",
            Level.CERTAIN if len(shared) > FEW * len(held_out) else Level.LIKELY,
            f"{len(shared):,} of {len(held_out):,} validation prompts are training prompts.",
            _places(shared),
            "Remove the training records: validation would measure memory.",
            f"{shared[0].place} is {twin.place}: {quote(twin.text)}",
        )
    ]


def _near(rows: Sequence[Row]) -> list[Finding]:
    """Find prompts that say the same as others in almost the same words."""
    identities = [_identity(row) for row in rows]
    exact = duplicates(identities)
    remaining = [
        row
        for place, row in enumerate(rows)
        if place not in exact and not _has_media(row.record)
    ]
    near = near_duplicates(
        [row.text for row in remaining], [row.answer for row in remaining]
    )
    crossing = {place: first for place, first in near.items() if remaining[place].held_out}
    crossing = {
        place: first for place, first in crossing.items() if not remaining[first].held_out
    }
    findings = []
    for name, pairs, problem in (
        (
            "data.validation_near_train",
            crossing,
            "validation prompts are almost training prompts",
        ),
        (
            "data.near_duplicates",
            {place: first for place, first in near.items() if place not in crossing},
            "prompts are almost the same as earlier ones",
        ),
    ):
        if pairs:
            place, first = next(iter(pairs.items()))
            findings.append(
                Finding(
                    name,
                    Level.LIKELY
                    if len(pairs) > FEW * len(rows) or pairs is crossing
                    else Level.NOTE,
                    f"{len(pairs):,} {problem}.",
                    _places([remaining[place] for place in pairs]),
                    "Remove the training records, or validation measures memory."
                    if name == "data.validation_near_train"
                    else "Keep one of each, if they ask the same.",
                    f"{remaining[place].place}: {quote(remaining[place].text)}; {remaining[first].place}: "
                    f"{quote(remaining[first].text)}",
                )
            )
    return findings


def _cut(rows: Sequence[Row]) -> list[Finding]:
    """Find prompts that were cut before they came here."""
    texts = [row.text.rstrip() for row in rows]
    marked = [row for row in rows if CUT_ENDS.search(row.text)]
    lengths = Counter(map(len, texts))
    longest = max(lengths)
    typical = sorted(map(len, texts))[len(texts) // 2]
    piled = lengths[longest] >= max(3, FEW * len(rows)) and longest > 2 * typical
    full = [
        row for row, text in zip(rows, texts, strict=True) if piled and len(text) == longest
    ]
    if sum(not SENTENCE_END.search(row.text) for row in full) <= len(full) / 2:
        full = []  # the longest of a generator
    open_ends = [row for row in rows if not SENTENCE_END.search(row.text)]
    is_unusual = len(rows) >= FEWEST and 0 < len(open_ends) <= (1 - USUAL) * len(rows)
    findings: list[Finding] = []
    for cut, problem in (
        (marked, "end with a mark of truncation"),
        (full, f"have exactly {longest:,} characters and none has more, as if cut there"),
        (open_ends if is_unusual else [], "end within a sentence, as no others do"),
    ):
        if cut and not findings:
            findings.append(
                Finding(
                    "data.truncated_prompts",
                    Level.LIKELY,
                    f"{len(cut):,} prompts {problem}.",
                    _places(cut),
                    "Write them whole, or remove them.",
                    f"the end of the first: {cut[0].text[-60:]!r}",
                )
            )
    return findings


def _overlong(subject: Subject, rows: Sequence[Row]) -> list[Finding]:
    data = subject.config.data
    long = [
        row
        for row in rows
        if is_too_long(row.record[subject.prompt_key], data.max_prompt_tokens)
    ]
    if not long:
        return []
    return [
        Finding(
            "data.prompts_above_cap",
            Level.CERTAIN if data.overlong_prompts == "error" else Level.LIKELY,
            f"{len(long):,} prompts cannot fit data.max_prompt_tokens={data.max_prompt_tokens}.",
            _places(long),
            f"Raise it, or remove them: data.overlong_prompts={data.overlong_prompts} applies.",
        )
    ]


def _answers_inside(rows: Sequence[Row]) -> list[Finding]:
    """Find prompts that name their own answer, more often than they name other records' answers."""
    answered = [row for row in rows if row.answer and row.answer.strip()]
    inside = [row for row in answered if _names(row.text, row.answer or "")]
    shifted = zip(answered, [*answered[1:], *answered[:1]], strict=True)
    chance = sum(_names(row.text, other.answer or "") for row, other in shifted)
    if len(inside) <= 2 * chance:
        return []
    share = len(inside) / len(answered)
    row = inside[0]
    start = max(0, row.text.rfind((row.answer or "").strip()) - 40)
    return [
        Finding(
            "data.answer_in_prompt",
            Level.CERTAIN if share > FEW or chance == 0 else Level.LIKELY,
            f"{len(inside):,} of {len(answered):,} prompts name their own answer.",
            _places(inside),
            "Take the answer out of the prompt: the policy only has to copy it.",
            f"answer {quote(row.answer)} in {quote(row.text[start : start + 80])}",
        )
    ]


def _names(text: str, answer: str) -> bool:
    """Whether a text marks an answer as the answer, or holds a long one."""
    answer = answer.strip()
    if not answer or answer not in text:
        return False
    if len(answer) >= LONG_ANSWER and len(LONG_WORD.findall(answer)) >= 4:
        return True
    end = r"(?![\w.]*\w)"
    return any(
        re.search(mark + re.escape(answer) + end, text, re.IGNORECASE) for mark in MARKS
    )


def _missing_answers(subject: Subject, rows: Sequence[Row]) -> list[Finding]:
    if not subject.answer_key:
        return []
    generated = any(map(package_of, subject.train))  # whose answer may be an empty text
    missing = [
        row for row in rows if row.answer is None or not (generated or row.answer.strip())
    ]
    if not missing or len(missing) == len(rows):
        return []
    return [
        Finding(
            "data.answer_missing",
            Level.CERTAIN,
            f"{len(missing):,} of {len(rows):,} records have no answer in {subject.answer_key!r}.",
            _places(missing),
            "Write the answers, or remove the records.",
        )
    ]


def _missing_columns(subject: Subject, rows: Sequence[Row]) -> list[Finding]:
    first = rows[0].record
    taken = sorted(
        {name for function in subject.functions for name in function.columns} & set(first)
    )
    findings = []
    for name in taken:
        without = [row for row in rows if name not in row.record]
        if without:
            findings.append(
                Finding(
                    "data.column_missing",
                    Level.CERTAIN,
                    f"{len(without):,} records lack the column {name!r}, which the reward takes.",
                    _places(without),
                    "Write it in every record: the run refuses the data.",
                )
            )
            continue
        findings += _types(name, rows)
    return findings


def _types(name: str, rows: Sequence[Row]) -> list[Finding]:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        value: Any = row.record[name]
        if value is not None:
            kinds.setdefault(type(value).__name__, []).append(row)
    if len(kinds) < 2 or set(kinds) == {"int", "float"}:
        return []
    usual, *others = sorted(kinds, key=lambda kind: len(kinds[kind]), reverse=True)
    return [
        Finding(
            "data.mixed_types",
            Level.LIKELY,
            f"The column {name!r} is a {usual} in most records, "
            f"and a {others[0]} in {len(kinds[others[0]]):,}.",
            _places(kinds[others[0]]),
            "Write one type: a reward that compares texts pays no number.",
        )
    ]
