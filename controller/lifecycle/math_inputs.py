"""Examine the answers that the built-in math reward expects, before a run."""

from collections.abc import Sequence

from controller.config import Config
from controller.config.training import count_noun
from controller.data.records import Record
from controller.lifecycle.user_functions import Records, waiting
from controller.observability.slow_work import Log
from workers.errors import ConfigError, quote
from workers.user_code.functions import TIMEOUT_SETTING
from workers.user_code.process import NoAnswerError, ask

MATH = "workers.reward_functions:math"
COLUMN = "answer"
MOST_EXAMINED = 200  # records of a data set, because SymPy takes milliseconds an answer


def answer_warnings(config: Config, data: Records, log: Log = print) -> tuple[str, ...]:
    """Return a line for each data set of which the math reward cannot read all answers. Raises
    ConfigError.
    """
    if MATH not in config.reward.weights:
        return ()
    lines = list[str]()
    for path, records in data.items():
        with waiting(log, f"math-verify, which reads answers of {path}", config):
            lines += _examine(config, path, records)
    return tuple(lines)


def _examine(config: Config, path: str, records: Sequence[Record]) -> list[str]:
    places = range(0, len(records), -(-len(records) // MOST_EXAMINED))
    answers = [records[place].get(COLUMN) for place in places]
    limit_s = config.resources.user_code_timeout_s
    try:
        examined = ask(
            "workers.math_answers:examine_answers",
            answers,
            timeout_s=limit_s,
            setting=TIMEOUT_SETTING,
        )
    except NoAnswerError as error:
        raise ConfigError(
            f"reward.function={MATH}: reading the answers of {path} {error}."
        ) from None
    share = f"of {count_noun(len(answers), 'examined answer')}"
    lines = list[str]()
    if examined["refused"]:
        place, reason = examined["refused"][0]
        refused = len(examined["refused"])
        lines.append(
            f"{path}: {refused} {share} cannot be scored, such as record {places[place] + 1}: {reason}"
        )
    if examined["texts"]:
        place = examined["texts"][0]
        example = f"record {places[place] + 1}: {quote(answers[place])}"
        lines.append(
            f"{path}: {len(examined['texts'])} {share} are compared as texts, such as {example}"
        )
    return lines
