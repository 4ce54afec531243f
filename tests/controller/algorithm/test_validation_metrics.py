from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.algorithm.validation_metrics import (
    ScoredResponse,
    is_possible,
    majority_is_right,
    pass_at_k,
    possible_metrics,
    summarize,
)


def response(
    uid: str, reward: float, *, source: str = "sums", answer: str = "", **parts: float
) -> ScoredResponse:
    return ScoredResponse(uid, source, {"reward": reward, **parts}, answer)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(
    right: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(right)))
    draws = list(combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(
        sum(map(any, draws)) / len(draws)
    )


def test_the_most_frequent_answer_decides() -> None:
    assert majority_is_right(["4", "5", "4"], [True, False, True]) == 1.0
    assert majority_is_right(["4", "5", "5"], [True, False, False]) == 0.0
    # A tie counts by halves, whatever the order.
    assert majority_is_right(["4", "5"], [True, False]) == 0.5
    # No answer, no vote.
    assert majority_is_right(["", "", "4"], [False, False, True]) == 1.0
    assert majority_is_right(["", ""], [False, False]) == 0.0


@given(
    st.lists(st.tuples(st.sampled_from(["", "1", "2"]), st.booleans()), min_size=1),
    st.randoms(),
)
def test_equal_answers_judged_differently_vote_in_any_order(
    votes: list[tuple[str, bool]], random: Any
) -> None:
    shuffled = random.sample(votes, len(votes))
    assert majority_is_right(*zip(*votes, strict=True)) == majority_is_right(
        *zip(*shuffled, strict=True)
    )
    assert majority_is_right(["4", "4", "4", "5"], [True, False, True, False]) == 2 / 3


def test_one_response_a_prompt_gives_means_alone() -> None:
    metrics = summarize([response("a", 1.0, exact=1.0), response("b", 0.5)], "reward", 1.0)
    assert metrics == {"reward": 0.75, "exact": 1.0}


def test_several_responses_give_pass_and_majority() -> None:
    responses = [response("a", r, answer=x) for r, x in ((1, "4"), (0, "5"), (1, "4"))]
    responses += [response("b", r, answer=x) for r, x in ((0, "1"), (0, "1"), (1, "2"))]
    metrics = summarize(responses, "reward", 1.0)
    assert metrics["pass@1"] == pytest.approx(0.5)
    assert metrics["pass@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert metrics["pass@3"] == 1.0
    assert metrics["maj@3"] == 0.5


@pytest.mark.parametrize("samples", range(1, 10))
def test_the_possible_metrics_of_a_source_are_those_of_its_responses(samples: int) -> None:
    responses = [response("a", 1.0, answer="4", exact=1.0) for _ in range(samples)]
    names = possible_metrics(samples, ["exact"])
    assert names == list(summarize(responses, "reward", 1.0))
    assert all(is_possible(f"sums/{name}", samples, ["exact"]) for name in names)
    for name in (f"pass@{samples + 1}", f"maj@{samples + 1}", "exactly"):
        assert not is_possible(name, samples, ["exact"])


def test_prompts_with_fewer_responses_count_as_far_as_theirs_reach() -> None:
    responses = [response("a", reward, answer="4") for reward in (1, 0, 0)]
    responses += [response("b", 1, answer="4") for _ in range(3)]
    responses += [response("c", 0, answer="4") for _ in range(2)]
    metrics = summarize(responses, "reward", 1.0)
    assert metrics["reward"] == pytest.approx(4 / 8)
    assert metrics["pass@1"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert metrics["pass@2"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert metrics["pass@3"] == 1.0
    assert metrics["maj@3"] == pytest.approx((1 / 3 + 1 + 0) / 3)


def test_success_may_be_a_part_of_the_reward() -> None:
    responses = [response("a", 0.9, exact=e) for e in (1.0, 0.0)]
    assert summarize(responses, "exact", 1.0)["pass@1"] == 0.5
    assert summarize(responses, "reward", 1.0)["pass@1"] == 0.0


def test_sources_are_told_apart_where_there_are_several() -> None:
    metrics = summarize(
        [response("a", 1.0), response("b", 0.0, source="products")], "reward", 1.0
    )
    assert metrics == {"reward": 0.5, "products/reward": 0.0, "sums/reward": 1.0}
