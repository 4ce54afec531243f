r"""Read answers for the reward `math`: what a response answers, and what a record expects.

response --after its thoughts--> last \boxed{}, or text after ####, or all --math-verify--> expressions
answer   --by type-->            text                                      --math-verify--> expressions
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Any

from workers.errors import DataError, clause, quote
from workers.math_texts import choice_in, plain_text, squeeze

THOUGHT = r"(?:think|thinking|thought|seed:think)"
END_OF_THOUGHT = re.compile(rf"</{THOUGHT}>|\[/THINK\]|◁/think▷")
START_OF_THOUGHT = re.compile(rf"<{THOUGHT}>|\[THINK\]|◁think▷")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Possessive: long white space is tried once.
LAYOUT = r"(?:\s|\$|\\(?:q?quad|[()\[\],; ]))*+"
JOINED = r"(?:[,;]\s*+(?:and|or)?|and|or)"
# Such as `\) and \( y =`. A comma in a sentence joins nothing: "\boxed{3}, so the answer is \boxed{4}".
BETWEEN_BOXES = re.compile(
    rf"{LAYOUT}(?:{JOINED}|\\text\{{\s*+{JOINED}\s*+\}}){LAYOUT}(?:[A-Za-z]\w*\s*+=\s*+)?"
)
MARKED_MATHEMATICS = re.compile(r"\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)
WHOLE = re.compile(r"\$+([^$]+)\$+")
FACTORS = r"percent|pct|dozen|hundred|thousand|million|billion|trillion"
COUNTED_THINGS = re.compile(
    rf"(-?[\d.,]*\d)\s+(?!{FACTORS})[A-Za-z]{{3,}}(?:\s+[A-Za-z]+)*\.?"
)
WORDS = re.compile(r"(?:\\text\s*\{)?\s*([A-Za-z]{4,}|[A-Za-z]+(?: [A-Za-z]+)+)\s*\}?")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
ONLY_WORDS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*")
TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>\s*$", re.DOTALL)
SAYS = re.compile(
    r"(?:answer\s*(?:is|:)|答案\s*(?:是|：|:))[\s:*]*+([^\n:：]{1,80})$", re.IGNORECASE
)
"""A last sentence that names the answer. What stands there is read as an answer if it is a choice or one
word.
"""
FINAL = "####"  # of GSM8K
FINAL_SENTENCE = "final answer is"  # of Minerva's prompts, which boxes of intermediate results may precede


@dataclass(frozen=True)
class MathAnswer:
    """An answer. expressions: of math-verify, SymPy's and texts. text: without blanks. choice: its letter or
    empty.
    """

    expressions: Sequence[Any]
    text: str
    choice: str = ""

    @property
    def is_mathematics(self) -> bool:
        """Whether math-verify can compare it, not only its text."""
        return any(not isinstance(expression, str) for expression in self.expressions)

    def equals(self, other: "MathAnswer") -> bool:
        """Whether `other`, of a response, is this record's answer."""
        from math_verify import verify

        if self.choice and other.choice:
            return self.choice == other.choice
        same_text = bool(self.text) and self.text == other.text
        if same_text or verify(
            list(self.expressions), list(other.expressions), allow_set_relation_comp=True
        ):
            return True
        # math-verify lets 10% answer 10, and not 12.5% answer 12.5.
        return (
            other.text.endswith("%")
            and "%" not in self.text
            and self.text == other.text.rstrip("\\%")
        )

    def __str__(self) -> str:
        return self.choice or (str(self.expressions[0]) if self.expressions else "")


def read_expected(answer: Any) -> MathAnswer:
    """Read a record's answer: a text, a number, or a list with one of them. Raises DataError for another."""
    text = _text_of(answer)
    match = WHOLE.fullmatch(text)
    return _read_bare(match[1]) if match else _read_marked(text) or _read_bare(text)


def examine_answers(answers: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the places of `refused` answers, with the reasons, and of those that are compared as `texts`."""
    refused = list[tuple[int, str]]()
    texts = list[int]()
    for place, answer in enumerate(answers):
        try:
            if not read_expected(answer).is_mathematics:
                texts.append(place)
        except DataError as error:
            refused.append((place, clause(error)))
    return {"refused": refused, "texts": texts}


def read_response(response: str) -> MathAnswer:
    """Read what a response answers outside of its thoughts."""
    text = without_thoughts(response)
    tagged = TAGGED.search(text)
    text = tagged[1].strip() if tagged else text
    if bare := _named_by_words(text):
        return _read_bare(bare)
    # A sentence is not one expression: math-verify looks for the last one in it.
    return _read_marked(text) or (
        _read_prose(text) if WORD.search(text) or "\n" in text else _read_bare(text)
    )


def _named_by_words(text: str) -> str:
    """Return a choice or words that are the whole text, or that its last sentence names as the
    answer, or "".
    """
    if BOX.search(text) or FINAL in text:
        return ""
    whole = plain_text(text)
    sentence = SAYS.search(text)
    named = plain_text(sentence[1].rstrip("*")) if sentence else ""
    if choice_in(named)[0] or re.fullmatch(r"[A-Za-z]+|-?[\d.,]+", named):
        return named
    return whole if choice_in(whole)[0] or ONLY_WORDS.fullmatch(whole) else ""


def without_thoughts(response: str) -> str:
    """Return the text after the last thought, and before one that does not end."""
    text = END_OF_THOUGHT.split(response)[-1]
    return START_OF_THOUGHT.split(text)[0].strip()


def _text_of(answer: Any) -> str:
    value = answer[0] if isinstance(answer, (list, tuple)) and len(answer) == 1 else answer
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, Number) and not isinstance(value, bool):
        try:
            number = Decimal(str(value))
        except InvalidOperation:
            number = Decimal("nan")
        if number.is_finite():
            return f"{number:f}"  # 1e-07 would be a product of e
    raise DataError(
        f"answer={quote(answer)}: not a text or a finite number. Write one of them in the record."
    )


def _read_marked(text: str) -> MathAnswer | None:
    from math_verify import parse

    if BOX.search(text):
        contents, rest = last_boxes(text)
        expressions = parse(rest) if FINAL_SENTENCE in rest.lower() else []
        return MathAnswer(expressions, "") if expressions else _read_bare(contents)
    if MARKED_MATHEMATICS.search(text):
        return MathAnswer(parse(text), squeeze(text))
    return _read_bare(text.rpartition(FINAL)[2]) if FINAL in text else None


def _read_prose(text: str) -> MathAnswer:
    from math_verify import parse

    return MathAnswer(parse(text), squeeze(text))


def _read_bare(text: str) -> MathAnswer:
    """Read a text that is all mathematics, as in a box, or words."""
    from math_verify import parse

    text = plain_text(text)
    letter, behind = choice_in(text)
    if letter:
        rest = (
            _read_bare(behind)
            if behind
            else MathAnswer(parse(f"\\boxed{{{letter}}}"), letter)
        )
        return MathAnswer(rest.expressions, rest.text, letter)
    if words := WORDS.fullmatch(text):  # as mathematics, ABCD is a product and equals ABDC
        return MathAnswer(
            parse(f"\\boxed{{\\text{{{words[1]}}}}}"), squeeze(words[1]).lower()
        )
    counted = COUNTED_THINGS.fullmatch(text)
    expression = counted[1] if counted else text
    return MathAnswer(
        parse(f"\\boxed{{{expression}}}") if expression else [], squeeze(text)
    )


def last_boxes(text: str) -> tuple[str, str]:
    r"""Return the content of the last `\boxed{}`, with those that a comma, "and" or "or" joins to it.

    Returns also the text after it. The content is "" if the last box does not end.
    """
    contents = list[str]()
    rest = ""
    next_start = len(text)
    for start, first, end in reversed(list(_boxes(text))):
        if contents and not BETWEEN_BOXES.fullmatch(text[end + 1 : next_start]):
            break
        if end == len(text):
            return "", ""
        rest = rest if contents else text[end + 1 :]
        contents.insert(0, text[first:end])
        next_start = start
    return ", ".join(contents), rest


def _boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield each box outside of others: its start, and the start and end of its content."""
    end = 0
    for match in BOX.finditer(text):
        if match.start() >= end:
            end = _closing_brace(text, match.end())
            yield match.start(), match.end(), end


def _closing_brace(text: str, start: int) -> int:
    """Return the place of the brace that closes one before `start`, or the text's length."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return start + brace.start()
    return len(text)
