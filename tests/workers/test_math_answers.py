"""Verdicts of the math reward."""

from collections.abc import Callable

import pytest

from workers.errors import DataError
from workers.math_answers import examine_answers, read_expected
from workers.reward_functions import math

# fmt: off
RIGHT = [
    ("4", r"<think>\boxed{3}</think> \boxed{4}"),
    ("4", r"I get \boxed{3}, so the answer is \boxed{4}"),
    ("3,4", r"\boxed{3}, \boxed{4}"),
    ("3,4", r"$\boxed{3}$ and $\boxed{4}$"),
    ("1, 2", r"\boxed{1, 2}"),
    ("1, 2", r"\boxed{2,1}"),
    ("1, 2", "1, 2"),
    ("y = 2x + 3", r"\boxed{y=2x+3}"),
    ("y = 2x + 3", "y = 2x+3"),
    ("y = 2x + 3", r"\boxed{2x + 3}"),
    ("3:2", r"\boxed{3:2}"),
    ("3:2", r"\boxed{3 : 2}"),
    ("3:2", "3:2"),
    ("3:2", "The ratio is $3:2$."),
    ("3:2", r"\boxed{\frac{3}{2}}"),
    ("n=3k", r"\boxed{n=3k}"),
    ("n=3k", r"\boxed{3k}"),
    ("1,000", r"\boxed{1000}"),
    ("1000", r"\boxed{1,000}"),
    ("72", "72"),
    ("72 apples", r"\boxed{72}"),
    ("72", r"\boxed{72 apples}"),
    ("72", r"\boxed{72\text{ apples}}"),
    ("50%", r"\boxed{0.5}"),
    (r"50\%", r"\boxed{50}"),
    ("50 percent", r"\boxed{50\%}"),
    ("#### 72", "72"),
    ("so 3\n#### 72", r"\boxed{72}"),
    ("72", "it is 3\n#### 72"),
    ("blue", r"\boxed{blue}"),
    ("blue", r"\boxed{\text{blue}}"),
    ("blue", "blue"),
    ("A", r"\boxed{A}"),
    ("A", "The answer is A"),
    ("(A)", r"\boxed{A}"),
    ("Monday", r"\boxed{\text{Monday}}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    ("(1,2)", r"\boxed{(1,2)}"),
    ("[1,2)", r"\boxed{[1,2)}"),
    (r"\{1,2\}", r"\boxed{1,2}"),
    ("x>3", r"\boxed{(3,\infty)}"),
    (r"(3,\infty)", r"\boxed{x>3}"),
    (r"5\text{ cm}", r"\boxed{5}"),
    ("5 cm", r"\boxed{5}"),
    ("$5", r"\boxed{5}"),
    (r"\$5", r"\boxed{5}"),
    ("5", r"\boxed{\$5}"),
    (r"90^\circ", r"\boxed{90}"),
    ("90°", r"\boxed{90}"),
    ("2π", r"\boxed{2\pi}"),
    ("2*x", r"\boxed{2x}"),
    ("sqrt(2)", r"\boxed{\sqrt{2}}"),
    ("1/2", r"\boxed{\frac{1}{2}}"),
    ("2^10", r"\boxed{1024}"),
    ("10!", r"\boxed{3628800}"),
    ("1e3", r"\boxed{1000}"),
    ("x=3", r"\boxed{3}"),
    ("3", r"\boxed{x=3}"),
    ("no solution", r"\boxed{\text{no solution}}"),
    (r"\text{Yes}", r"\boxed{Yes}"),
    ("12:30", r"\boxed{12:30}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    (r"\pm 2", r"\boxed{2,-2}"),
    ("120_3", r"\boxed{120_3}"),
    (r"x \in \{1,2\}", r"\boxed{1,2}"),
    ("1 1/2", r"\boxed{1.5}"),
    (r"1\frac12", r"\boxed{1.5}"),
    ("3", "Answer: 3"),
    ("3", "**Answer:** 3"),
    ("AB", r"\boxed{AB}"),
    ("1,2,3", r"\boxed{1, 2, 3}"),
    ("1,2,3", r"\boxed{3,2,1}"),
    ("i", r"\boxed{i}"),
    ("1+2i", r"\boxed{2i+1}"),
    ("12 and 15", r"\boxed{12, 15}"),
    ("2m", r"\boxed{2}"),
    ("4", r"so \boxed{3}. Then \boxed{4}"),
    ("7", r"\(\boxed{7}\)"),
    ("10455", r"first \boxed{200}. Final Answer: The final answer is $10455$. I hope it is correct."),
    ("ABCD", r"\boxed{ABCD}"),
    ("7,425,000", r"\boxed{7425000}"),
    (r"\text{east}", r"\boxed{\text{East}}"),
    (r"\frac{3}{4}", r"\boxed{75\%}"),
    (r"11\frac{1}{4}", r"\boxed{11.25}"),
    ("-5", r"\boxed{–5}"),
    ("€45", r"\boxed{45}"),
    ("½", r"\boxed{\frac12}"),
    ("x²", r"\boxed{x^2}"),
    ("√2", r"\boxed{\sqrt{2}}"),
    ("3√(10)", r"\boxed{3\sqrt{10}}"),
    ("60˚", r"\boxed{60}"),
    ("12345", r"\boxed{12\,345}"),
    ("12345", r"\boxed{12\ 345}"),
    ("1000000", r"\boxed{1{,}000{,}000}"),
    ("2 1/2", r"\boxed{2\frac{1}{2}}"),
    ("1.5e-3", r"\boxed{0.0015}"),
    ("12.5", r"\boxed{12.5\%}"),
    ("7", r"\boxed{7.}"),
    ("**7**", r"\boxed{7}"),
    ("7.", r"\boxed{7}"),
    ("7", "<think>a</think><answer>7</answer>"),
    ("7", "答案：7"),
    ("10 cm^2", r"\boxed{10\text{ cm}^2}"),
    ("June 5", r"\boxed{\text{June }5}"),
    ("Yes", "Yes."),
    (r"(-\infty, 3]", r"\boxed{x \le 3}"),
    ("(1,3)", r"\boxed{1<x<3}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    ("C", r"\boxed{C. 5}"),
    ("(C) 5", r"\boxed{C}"),
    (r"\textbf{(D)}\ 12", r"\boxed{12}"),
    ("D", "The answer is (D)."),
    ("D", "**D**"),
    ("D", "D."),
    (r"$\frac{1}{2}$", r"so it is \boxed{\frac{2}{4}}"),
    ("0.5", r"so it is $\frac{1}{2}$"),
    ("72", "first 3, then the answer is 72"),
    ("$(x+1)^2$", "$x^2 + 2x + 1$"),
]
WRONG = [
    ("4", r"\boxed{3}, \boxed{4}"),
    ("1, 2", r"\boxed{2}"),
    ("1, 2", r"\boxed{1}"),
    ("y=2x+3", r"\boxed{3}"),
    ("3:2", r"\boxed{2:3}"),
    ("3:2", r"\boxed{2}"),
    ("3:2", r"\boxed{3}"),
    ("n=3k", r"\boxed{3}"),
    ("n=3k", "3"),
    ("blue", r"\boxed{red}"),
    ("A", r"\boxed{B}"),
    (r"\frac{1}{3}", r"\boxed{0.333}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("-3", r"\boxed{3}"),
    ("12:30", r"\boxed{1:30}"),
    ("3", r"<think> maybe \boxed{3}"),
    ("3", r"\boxed{3"),
    ("3", ""),
    ("2", "So $x=1$ or $x=2$."),
    (r"\pm 2", r"\boxed{2}"),
    ("ABCD", r"\boxed{ABDC}"),
    ("12 or 15", r"\boxed{15}"),
    ("2x", r"\boxed{2}"),
    ("x+2", r"\boxed{2}"),
    (r"1-\frac{1}{e}", r"\boxed{1+\frac{1}{e}}"),
    ("C", r"\boxed{D. 5}"),
    ("(C) 5", r"\boxed{(D) 5}"),
    ("A", "The answer is B. A is wrong."),
    (r"(A) \cup (B)", r"\boxed{(A) \cup (C)}"),
    ("½", r"\boxed{2}"),
    ("√2", r"\boxed{2}"),
    ("12345", r"\boxed{12,\,345}"),
    ("1.5e-3", r"\boxed{1.5}"),
    (r"(-\infty, 3]", r"\boxed{x < 3}"),
    ("June 5", r"\boxed{\text{July }5}"),
    ("7", "<answer>8</answer>"),
    ("72", r"\boxed{3}"),
    ("72", "no idea"),
]
# fmt: on
UNREAD = [
    ("3:2", "The ratio is 3:2."),
    ("n=3k", "so n = 3k"),
    ("2 pi", r"\boxed{2\pi}"),
    ("3 million", r"\boxed{3000000}"),
    (r"0.\overline{3}", r"\boxed{\frac{1}{3}}"),
]
"""Right answers without a reward: sentences without a box, and forms that math-verify does not read."""


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        *((*pair, 1) for pair in RIGHT),
        *((*pair, 0) for pair in WRONG + UNREAD),
    ],
)
def test_an_answer_is_compared_as_mathematics(
    answer: str, response: str, reward: int
) -> None:
    assert math(response, answer)["reward"] == reward


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (0.5, "0.5"),
        (72.0, "72.0"),
        (1e-7, "0.0000001"),
        (10**20, str(10**20)),
        (["3"], "3"),
        ((4,), "4"),
    ],
)
def test_numbers_and_lists_of_one_are_read_as_texts(answer: object, text: str) -> None:
    assert math(rf"\boxed{{{text}}}", answer)["reward"] == 1
    assert math(r"\boxed{-77}", answer)["reward"] == 0


@pytest.mark.parametrize(
    "answer",
    [None, "", " ", [], ["1", "2"], {"a": 1}, True, float("nan"), float("inf"), [None]],
)
def test_another_type_of_answer_is_refused_by_name(answer: object) -> None:
    with pytest.raises(DataError, match="answer="):
        math(r"\boxed{1}", answer)


@pytest.mark.parametrize(
    "answer",
    ["1, 2", "y = 2x + 3", "3:2", "n=3k", r"\frac{1}{2}", "no solution", "(1, 2]", "x>3"],
)
@pytest.mark.parametrize(
    "write", [str, r"\boxed{{{}}}".format, "${}$".format, "<think>7</think>\n{}".format]
)
@pytest.mark.parametrize(
    "space",
    [lambda text: text, lambda text: text.replace(" ", "  "), lambda text: f" {text} "],
)
def test_an_answer_equals_itself(
    answer: str, write: Callable[[str], str], space: Callable[[str], str]
) -> None:
    assert math(write(space(answer)), answer)["reward"] == 1


@pytest.mark.parametrize(
    ("opens", "closes"),
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("", "</think>")],
)
def test_boxes_in_thoughts_do_not_answer(opens: str, closes: str) -> None:
    thought = rf"{opens} maybe \boxed{{3}} {closes}"
    assert math(rf"{thought} \boxed{{4}}", "4")["reward"] == 1
    assert math(thought, "3")["reward"] == 0
    assert math(rf"{thought} the answer is 5", "5")["reward"] == 1


@pytest.mark.parametrize(
    "between", ["answer is ", "<answer>", " ", "$", ", ", ",\\quad ", "{", "a "]
)
def test_long_texts_between_boxes_are_read_in_linear_time(between: str) -> None:
    # above a minute where it is tried anew at each place
    response = rf"\boxed{{3}},{between * 30_000}. \boxed{{4}}"
    assert math(response, "4")["reward"] == 1


def test_answers_are_examined_by_kind() -> None:
    examined = examine_answers(["72", None, "{{", r"\frac{1}{2}", ["1", "2"]])
    assert [place for place, _ in examined["refused"]] == [1, 4]
    assert examined["texts"] == [2]
    assert not read_expected("{{").is_mathematics
