import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.addition import data
from examples.addition.reward import reward
from examples.addition.warm_start import BATCH, CLEAN_SHARE, STEPS, pairs, records


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_the_working_of_every_column_is_right(a: int, b: int) -> None:
    working = data.working(a, b)
    carry, total = 0, 0
    for place, (x, y, digit, mark) in enumerate(zip(*[iter(working)] * 4, strict=True)):
        carry, expected = divmod(int(x) + int(y) + carry, 10)
        assert (int(digit), mark) == (expected, "^" if carry else ".")
        total += expected * 10**place
    assert total + carry * 10 ** (len(working) // 4) == a + b
    assert data.solution(a, b) == f"{working}#{str(a + b)[::-1]}"


def test_the_example_in_the_readme() -> None:
    assert data.solution(58, 67) == "875^562^#521"


def test_responses_spread_from_7_to_63_tokens() -> None:
    lengths = [len(data.solution(10**n - 1, 10**n - 1)) + 1 for n in (1, 12)] + [
        len(data.solution(1, 1)) + 1
    ]
    assert (min(lengths), max(lengths)) == (7, 63)


def test_held_out_problems_are_never_trained_on() -> None:
    rng = random.Random(0)
    sets = [
        {data.problem(rng, held_out=held_out) for _ in range(500)}
        for held_out in (True, False)
    ]
    assert not sets[0] & sets[1]


def test_corruption_replaces_digits_alone_and_about_the_share_asked_for() -> None:
    text = data.solution(123456789012, 987654321098) * 200
    wrong = data.corrupted(text, 0.5, random.Random(0))
    changed = [(x, y) for x, y in zip(text, wrong, strict=True) if x != y]
    assert all(x.isdigit() and y.isdigit() for x, y in changed)
    digits = sum(c.isdigit() for c in text)
    # A tenth of the replacements hit the same digit.
    assert 0.42 < len(changed) / digits < 0.48


def test_records_have_what_the_reward_asks_for(tmp_path) -> None:
    data.write(tmp_path / "x.jsonl", 5, seed=0, held_out=False)
    records = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(records) == 5
    for record in records:
        assert reward(response=record["solution"], solution=record["solution"]) == {
            "reward": 1.0,
            "exact_match": 1.0,
        }


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("875^562^#521", 1.0),
        ("875^562^#421", 0.5),
        ("875^561^#", 0.5 * 7 / 8),
        ("", 0.0),
        ("#521", 1.0),
    ],
)
def test_reward_is_one_for_the_sum_and_half_the_share_of_working_otherwise(
    response: str, expected: float
) -> None:
    assert reward(response=response, solution="875^562^#521")["reward"] == pytest.approx(
        expected
    )


def test_the_warm_start_goes_from_right_responses_to_some_with_wrong_digits() -> None:
    given = list(records(seed=0))
    right = [solves(record) for record in given]
    clean = round(CLEAN_SHARE * len(given))
    assert len(given) == STEPS * BATCH
    assert all(right[:clean])
    assert 0.1 < sum(right[clean:]) / len(right[clean:]) < 0.7


def test_pairs_hold_the_right_response_and_a_wrong_one() -> None:
    for pair in pairs(50, 0, held_out=False):
        assert solves({"prompt": pair["prompt"], "response": pair["chosen"]})
        assert pair["rejected"] != pair["chosen"]
        assert len(pair["rejected"]) == len(pair["chosen"])


def solves(record: dict[str, str]) -> bool:
    """Whether working and sum are right."""
    a, b = (int(digits[::-1]) for digits in record["prompt"].rstrip("=").split("+"))
    return record["response"] == data.solution(a, b)
