"""Score: the reward of one sample and its other numbers.

values of each function --as_score--> Score of each --weigh_scores--> Score of the sample
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workers.errors import DataError, quote

LARGEST = 3.4e38  # the largest float32
OWN_PARTS = {"environment", "agent", "judge", "model", "overlong_penalty", "shaping"}
OWN_METRICS = {"reward", "mean", "std", "failures", "kl", "kl_coefficient", "greedy"}
TOOL_PARTS = ("tools/calls", "tools/failed", "tools/seconds")
"""Parts of an episode's score, which are metrics."""
RAW = "response_raw"  # column of reward functions: the response with its special tokens
LONGEST_SENT = 1_000  # tokens of a response, above which its text stays with its worker
OWN_NAMES = re.compile(r"(?:pass|maj)@\d+|(?:judge|tools)/.*")


@dataclass(frozen=True)
class Score:
    """The reward of one sample.

    response: the text, with all its turns, "" if `RewardWorker` left it out. parts: further numbers to log.
    answer: equal ones vote together in validation. failure: why there is no score, with a reward of 0. turns:
    of an episode, the texts after the record's prompt, as {"policy": text}, {"environment": text} or
    {"inserted": text}. credit: of each turn of an episode (sampled tokens, reward, hash of what the
    environment said before it). session: of an agent, `Session.describe_turns`. judgement: the judge's last
    answer. scored: when it was known, in seconds since 1970, or 0.
    """

    reward: float
    response: str
    parts: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    failure: str = ""
    turns: tuple[dict[str, str], ...] = ()
    credit: tuple[tuple[int, float, int], ...] = ()
    session: tuple[dict[str, Any], ...] = ()
    judgement: str = ""
    scored: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))  # JSON has only lists
        object.__setattr__(self, "credit", tuple(map(tuple, self.credit)))
        object.__setattr__(self, "session", tuple(self.session))
        numbers = {"reward": self.reward, **self.parts}
        bad = next(
            (
                f"{name} is {number}"
                for name, number in numbers.items()
                if not is_finite(number)
            ),
            "",
        )
        if bad:
            failed = {
                "reward": 0.0,
                "parts": {},
                "failure": self.failure or f"{bad}, not a finite float32 number",
            }
            for name, value in failed.items():
                object.__setattr__(self, name, value)

    @property
    def turn_rewards(self) -> list[float]:
        return [reward for _, reward, _ in self.credit]


def is_finite(number: float) -> bool:
    return -LARGEST < number < LARGEST


def is_reserved(part: str) -> bool:
    """Whether a part of a reward with this name would replace a number of Ballast's own."""
    return part in OWN_PARTS | OWN_METRICS or OWN_NAMES.fullmatch(part) is not None


def part_named(function: str) -> str:
    """Return the name of a function's reward among the parts, if several are weighted. Many are called
    `reward`.
    """
    return f"{function}_function" if is_reserved(function) else function


def check_parts(
    parts: Iterable[str], environment: Iterable[str] = (), *, ours: Iterable[str] = ()
) -> None:
    """Raise DataError for a part that has a name of ours, or that reward functions and the environment both
    give.

    environment: parts of the environment or agent, among which are `ours`.
    """
    environment_parts = set(environment) - set(ours)
    if names := sorted(filter(is_reserved, {*parts, *environment_parts})):
        raise DataError(
            f"reward part {names[0]!r}: Ballast has a number of this name. Rename the part."
        )
    if names := sorted(environment_parts & set(parts)):
        raise DataError(
            f"reward part {names[0]!r}: reward functions and the environment both give it. Rename one."
        )


def as_score(value: Any, response: str, *, source: str = "the reward function") -> Score:
    """Convert a finite number, or a mapping with `reward` (verl: `score`), others and perhaps `answer`
    (`pred`).

    Raises DataError, which names a part that is not a number. source: what returned it.
    """
    parts = _with_our_names(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise DataError(
            f"{source} returned a mapping without 'reward': {quote(list(parts))}."
        )
    answer = parts.pop("answer", None)
    numbers = {str(name): _number(part) for name, part in parts.items()}
    bad = [name for name, number in numbers.items() if not is_finite(number)]
    if bad:
        description = f"it returned {quote(value)} for {quote(response)}"
        place = (
            f", where {_describe_part(value, bad[0])}" if isinstance(value, Mapping) else ""
        )
        raise DataError(
            f"{source} must return finite float32 numbers, {description}{place}."
        )
    return Score(
        numbers.pop("reward"), response, numbers, "" if answer is None else str(answer)
    )


def _with_our_names(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Rename verl's `score` and `pred`, where the mapping has no `reward`."""
    if "reward" in value or "score" not in value:
        return dict(value)
    names = (
        {"score": "reward"} if "answer" in value else {"score": "reward", "pred": "answer"}
    )
    return {names.get(name, name): part for name, part in value.items()}


def _describe_part(value: Mapping[Any, Any], name: str) -> str:
    name = "score" if name == "reward" and "reward" not in value else name
    return f"{name!r} is {quote(value.get(name))}"


def _number(part: Any) -> float:
    try:
        return float(part)
    except Exception:  # converting a value may raise anything
        return float("nan")


def add_environment(score: Score, environment: Score, *, as_part: bool) -> Score:
    """Add the environment's reward. as_part: also as a part, beside reward functions.

    A failure of either fails the sample. The environment's `turns` are its opening and come first.
    """
    turns = score.turns
    session = environment.session
    if environment.turns:
        turns = (*environment.turns, *(score.turns or ({"policy": score.response},)))
    if failure := environment.failure or score.failure:
        unearned = tuple((tokens, 0.0, state) for tokens, _, state in environment.credit)
        return Score(
            0.0,
            score.response,
            failure=failure,
            turns=turns,
            credit=unearned,
            session=session,
        )
    environment_part = {"environment": environment.reward} if as_part else {}
    parts = environment_part | environment.parts | score.parts
    reward = environment.reward + score.reward
    return Score(
        reward,
        score.response,
        parts,
        score.answer or environment.answer,
        turns=turns,
        credit=environment.credit,
        session=session,
    )


def with_texts(
    score: Score, response: str = "", turns: tuple[dict[str, str], ...] = ()
) -> Score:
    """Add the texts that `RewardWorker` left out. An empty turn of the policy follows an environment's
    opening.
    """
    full_turns = (
        (*score.turns[:-1], *(turns or ({"policy": response},))) if score.turns else turns
    )
    return replace(score, response=response, turns=full_turns)


def weigh_scores(
    scores: Mapping[str, Score], weights: Mapping[str, float], response: str
) -> Score:
    """Return the weighted sum of rewards, the parts under functions' names if several, and the
    first answer.
    """
    if len(scores) == 1:
        ((name, score),) = scores.items()
        return Score(weights[name] * score.reward, response, score.parts, score.answer)
    parts = {part_named(name): score.reward for name, score in scores.items()}
    for name, score in scores.items():
        parts |= {
            f"{part_named(name)}/{part}": value for part, value in score.parts.items()
        }
    answer = next((score.answer for score in scores.values() if score.answer), "")
    return Score(
        sum(weights[name] * score.reward for name, score in scores.items()),
        response,
        parts,
        answer,
    )
