import pytest

from workers.reward_functions import exact_match, format_tags, length, math


def test_equal_answers_vote_together() -> None:
    assert (
        math(r"\boxed{\frac{1}{2}}", "1")["answer"]
        == math(r"it is $\frac{1}{2}$", "1")["answer"]
    )
    assert math("no idea", "1")["answer"] != math("7", "1")["answer"]


def test_an_exact_match_ignores_white_space_around_it_and_length_costs_by_the_character() -> (
    None
):
    assert exact_match(" 42\n", "42") == {"reward": 1.0, "answer": "42"}
    assert exact_match("42.0", "42")["reward"] == 0.0
    assert length("ab") == pytest.approx(2 * length("a"))
    assert length("a") < length("") == 0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1),
        ("<think>a</think><answer>4</answer> so", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("4", 0),
    ],
)
def test_the_format_is_all_or_nothing(response: str, reward: float) -> None:
    assert format_tags(response) == reward
