"""The oracle finds an answer in every form that tasks ask for, and nowhere else."""

import pytest

from ballast.certify.held_out import certified_answer


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("125", "125", 1.0),
        (" 125.\n", "125", 1.0),
        ("so \\boxed{7} and then \\boxed{125}", "125", 1.0),
        ("so \\boxed{125} and then \\boxed{7}", "125", 0.0),
        ("<answer>Yes</answer>", "yes", 1.0),
        ("12 + 3\n#### 15", "15", 1.0),
        ("The answer is 15.", "15", 1.0),
        ("875^562^#521", "875^562^#521", 1.0),
        ("875^562^#522", "875^562^#521", 0.0),
        ("125 or 126", "125", 0.0),
        ("", "125", 0.0),
        ("", "", 0.0),
    ],
)
def test_an_answer_is_read_in_its_last_form(
    response: str, answer: str, right: float
) -> None:
    assert certified_answer(response, answer) == right
