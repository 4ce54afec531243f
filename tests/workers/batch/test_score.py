import math
from typing import Any

import numpy as np
import pytest

from tests.refusals import refused
from workers.batch.score import (
    Score,
    add_environment,
    as_score,
    check_parts,
    weigh_scores,
    with_texts,
)
from workers.errors import DataError
from workers.roles.reward import last_turn, turns

SCORED = Score(0.5, "text", {"format": 0.5}, "42")


def test_an_environments_reward_is_the_samples_alone_or_beside_reward_functions() -> None:
    environment = Score(1.0, "", {"calls": 2.0})
    alone = add_environment(Score(0.0, "text"), environment, as_part=False)
    assert alone == Score(1.0, "text", {"calls": 2.0})
    both = add_environment(SCORED, environment, as_part=True)
    assert both == Score(
        1.5, "text", {"environment": 1.0, "calls": 2.0, "format": 0.5}, "42"
    )


def test_an_environments_opening_stands_before_what_was_written_after_it() -> None:
    opening = Score(0.0, "", turns=({"environment": "find"},))
    one_turn = add_environment(Score(0.0, "12"), opening, as_part=False)
    assert one_turn.turns == ({"environment": "find"}, {"policy": "12"})
    told = ({"policy": "1"}, {"environment": "more"}, {"policy": "2"})
    several = add_environment(Score(0.0, "12", turns=told), opening, as_part=True)
    assert several.turns == ({"environment": "find"}, *told)


@pytest.mark.parametrize(
    ("scored", "environment"),
    [
        (SCORED, Score(0.0, "", failure="it")),
        (Score(0.0, "text", failure="it"), Score(1.0, "", credit=((2, 1.0, 5),))),
    ],
)
def test_a_failure_of_either_is_the_samples(scored: Score, environment: Score) -> None:
    credit = tuple((tokens, 0.0, state) for tokens, _, state in environment.credit)
    assert add_environment(scored, environment, as_part=True) == Score(
        0.0, "text", failure="it", credit=credit
    )


METRICS = [
    "reward",
    "mean",
    "std",
    "failures",
    "kl",
    "kl_coefficient",
    "greedy",
    "pass@4",
    "maj@2",
    "tools/calls",
]
PARTS = ["environment", "shaping", "overlong_penalty", "model", "judge", "judge/clarity"]


@pytest.mark.parametrize("name", [*METRICS, *PARTS])
def test_a_part_with_a_name_of_ours_is_refused(name: str) -> None:
    for parts, environment in (
        ((name,), ()),
        ((), (name,)),
        (("format", name), ("moves",)),
    ):
        with pytest.raises(DataError, match=f"'{name}'"):
            check_parts(parts, environment)
    check_parts(("format",), (name, "moves"), ours=(name,))


@pytest.mark.parametrize("name", [name for name in METRICS + PARTS if name.isidentifier()])
def test_a_function_with_a_name_of_ours_replaces_no_number(name: str) -> None:
    scores = {name: Score(9.0, ""), "exact": Score(0.25, "", {"mean": 4.0})}
    score = weigh_scores(scores, {name: 0.0, "exact": 1.0}, "")
    assert (score.reward, score.parts) == (
        0.25,
        {f"{name}_function": 9.0, "exact": 0.25, "exact/mean": 4.0},
    )
    check_parts(score.parts)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, Score(1.0, "text")),
        ({"reward": 0.5, "exact": 1, "answer": 4}, Score(0.5, "text", {"exact": 1.0}, "4")),
        ({"reward": 0.5, "score": 2.0}, Score(0.5, "text", {"score": 2.0})),
        ({"score": 2.0, "acc": True, "pred": "4"}, Score(2.0, "text", {"acc": 1.0}, "4")),
        ({"score": 0.0, "pred": None}, Score(0.0, "text")),
        (
            {"score": 2.0, "pred": 3.0, "answer": "4"},
            Score(2.0, "text", {"pred": 3.0}, "4"),
        ),
    ],
)
def test_a_value_becomes_a_score_by_our_names_or_verls(value: Any, score: Score) -> None:
    assert as_score(value, "text") == score


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"exact": 1.0}, "without 'reward'"),
        ({"reward": 1.0, "exact": 3.5e38}, "where 'exact' is 3.5e+38"),
        ({"reward": 1.0, "exact": None}, "where 'exact' is None"),
        ({"reward": 1.0, "exact": [1]}, "where 'exact' is [1]"),
        ({"reward": None, "exact": 1.0}, "where 'reward' is None"),
        ({"score": math.nan, "acc": True}, "where 'score' is nan"),
        ({"score": 1.0, "note": "good"}, "where 'note' is 'good'"),
        ({"reward": math.inf}, "where 'reward' is inf"),
        ("many", "returned 'many' for 'text'"),
        (None, "returned None for 'text'"),
        (-math.inf, "returned -inf for 'text'"),
    ],
)
def test_a_value_without_a_finite_number_is_refused_by_its_name(
    value: Any, named: str
) -> None:
    with refused(named, DataError):
        as_score(value, "text")


@pytest.mark.parametrize("numbers", [{"reward": math.nan}, {"reward": 1.0, "f": 3.5e38}])
def test_a_sum_that_is_not_finite_fails_unless_something_else_did(
    numbers: dict[str, float],
) -> None:
    reward = numbers.pop("reward")
    score = Score(reward, "text", numbers)
    assert (score.reward, score.parts) == (0.0, {})
    assert ("f" if numbers else "reward") in score.failure
    assert Score(reward, "text", numbers, failure="it").failure == "it"


def test_a_single_function_is_weighted_too_and_keeps_the_names_of_its_parts() -> None:
    """As several are, whose names stand before their parts."""
    score = weigh_scores({"exact": SCORED}, {"exact": 0.25}, "response")
    assert score == Score(0.125, "response", {"format": 0.5}, "42")
    scores = {"exact": SCORED, "style": Score(-1.0, "", {}, "7")}
    score = weigh_scores(scores, {"exact": 0.25, "style": 3.0}, "response")
    parts = {"exact": 0.5, "style": -1.0, "exact/format": 0.5}
    assert score == Score(0.125 - 3.0, "response", parts, "42")


def test_a_part_of_both_reward_function_and_environment_is_refused() -> None:
    with pytest.raises(DataError, match="'format'"):
        check_parts(("exact", "format"), ("format",))
    check_parts(("means", "f/mean", "kl_term", "model_calls"), ("format",))


@pytest.mark.parametrize(
    ("versions", "turn"),
    [
        ([-1, 3, 4], (1, 3)),
        ([-1, 3, -1, -1, 3, 3], (4, 6)),
        ([-1, 0, -1, 0, -1], (3, 4)),
        ([-1, 0, -2, 5], (1, 4)),
    ],
)
def test_the_last_turn_is_what_follows_the_last_observation(
    versions: list[int], turn: tuple[int, int]
) -> None:
    assert last_turn(np.array(versions)) == slice(*turn)


def test_turns_observations_and_inserted_tokens_are_told_apart_by_their_versions() -> None:
    assert turns(np.array([3, 4, -1, 4, -2, -2, 4, -1])) == [
        ("policy", slice(0, 2)),
        ("environment", slice(2, 3)),
        ("policy", slice(3, 4)),
        ("inserted", slice(4, 6)),
        ("policy", slice(6, 7)),
        ("environment", slice(7, 8)),
    ]


def test_a_response_of_one_turn_has_no_turns_to_tell_apart() -> None:
    assert turns(np.array([0, 0, 1])) == []


@pytest.mark.parametrize(
    "turns", [(), ({"policy": "a"}, {"environment": "b"}, {"policy": "c"})]
)
@pytest.mark.parametrize("opening", [(), ({"environment": "o"},)])
def test_texts_that_were_left_out_can_be_added_later(
    turns: tuple[dict[str, str], ...], opening: tuple[dict[str, str], ...]
) -> None:
    whole, left_out = Score(0.5, "abc", turns=turns), Score(0.5, "")
    environment = Score(0.25, "", turns=opening)
    expected = add_environment(whole, environment, as_part=False)
    assert (
        with_texts(add_environment(left_out, environment, as_part=False), "abc", turns)
        == expected
    )
