r"""Forms of an answer: which of them does the reward pay?

42 --> 42 | \boxed{42} | The answer is 42. | #### 42 | <answer>42</answer> | ...
"""

import json
import re
from fractions import Fraction
from typing import Any

FORMS = {
    "plain": "{}",
    "boxed": r"The answer is \boxed{{{}}}.",
    "sentence": "The answer is {}",
    "hashes": "Working.\n#### {}",
    "answer tags": "<answer>{}</answer>",
    "thought, then plain": "<think>\nWorking.\n</think>\n\n{}",
    "thought, then answer tags": "<think>\nWorking.\n</think>\n<answer>\n{}\n</answer>",
    "thought, then boxed": "<think>\nWorking.\n</think>\n\n"
    + r"The answer is \boxed{{{}}}.",
    "tags around a box": r"<think>Working.</think><answer>\boxed{{{}}}</answer>",
    "final answer": r"The final answer is: $\boxed{{{}}}$. I hope it is correct.",
    "Answer:": "Answer: {}",
    "Final answer:": "Working.\nFinal answer: {}",
    "code": "```\n{}\n```",
    "code of Python": "```python\n{}\n```",
    "JSON": '{{"answer": "{}"}}',
    "bold": "**{}**",
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\d+/\d+")


def text_of(answer: Any) -> str:
    """Write a record's answer as a response would."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, (dict, list)):
        return json.dumps(answer)
    return str(answer)


def in_form(form: str, answer: Any) -> str:
    """Write an answer in a form, a text with `{}`."""
    return form.format(text_of(answer))


def notations(form: str, answer: str) -> dict[str, str]:
    """Write a number in other notations, and a boxed answer after an intermediate result."""
    texts = {}
    if NUMBER.fullmatch(answer.strip()):
        number = Fraction(answer.strip())
        numerator, denominator = number.numerator, number.denominator
        texts = {
            "LaTeX": rf"\frac{{{numerator}}}{{{denominator}}}"
            if denominator > 1
            else f"${numerator}$",
            "fraction": f"{numerator}/{denominator}",
            "decimal": f"{float(number):.6f}".rstrip("0")
            + ("0" if denominator == 1 else ""),
            "spaced": f" {answer.strip()} ",
        }
    written = {name: in_form(form, text) for name, text in texts.items()}
    if "\\boxed" in form:
        written["after a boxed intermediate result"] = r"First \boxed{1234567}. " + in_form(
            form, answer
        )
    return written


CYRILLIC = {
    "a": "\u0430",
    "c": "\u0441",
    "e": "\u0435",
    "o": "\u043e",
    "p": "\u0440",
    "x": "\u0445",
}
FULL_WIDTH = {digit: chr(0xFF10 + int(digit)) for digit in "0123456789"}
LOOK_ALIKES = str.maketrans(CYRILLIC | FULL_WIDTH)


def look_alike(text: str) -> str:
    """Replace digits by full-width ones, and letters by Cyrillic ones that look the same."""
    return text.translate(LOOK_ALIKES)


def forms_in(prompt: str) -> dict[str, str]:
    """Return forms that a prompt asks for with tags of its own, such as `<final>...</final>`."""
    tags = {tag for tag in re.findall(r"<([A-Za-z_]\w*)>", prompt) if f"</{tag}>" in prompt}
    return {
        f"{tag} tags": f"<{tag}>{{}}</{tag}>" for tag in sorted(tags - {"think", "answer"})
    }
