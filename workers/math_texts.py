r"""Write answers with the signs that math-verify reads. It takes `√2` for 2, and `12\,345` for a sum.

text --plain_text--> LaTeX     text --choice_in--> letter of a choice, text behind it
"""

import re
from decimal import Decimal

SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–﹣－", "-"),
        **dict.fromkeys("°˚º", r"^\circ "),
        **dict.fromkeys("€£¥₹", ""),
        "×": r"\times ",
        "÷": r"\div ",
        "·": r"\cdot ",
        "±": r"\pm ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        **{sign: f"^{{{number}}}" for number, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    }
)
ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\((?P<inner>[^()]*)\))")
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!; ]|\{,\})(?=\d{3}(?!\d))")
MIXED = re.compile(r"(-?\d+)\s+(\d+)/(\d+)")
SCIENTIFIC = re.compile(r"-?\d+(?:\.\d+)?[eE][-+]?\d{1,2}")
EMPTY_SET = re.compile(r"\\varnothing|\\\{\s*\\\}")
EMPHASIS = re.compile(r"(\*\*|__)([^*_]+)\1")
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])[).:](?=\s|$)|([A-J])$)\s*(.*)", re.DOTALL)
OPERATOR = re.compile(r"[-+*/=<>^_&|(,]|\\(?:cup|cap|times|cdot|to|le|ge|in|setminus)\b")


def plain_text(text: str) -> str:
    """Return a text that is all mathematics, without emphasis, currency and a final full stop."""
    text = text.strip()
    emphasized = EMPHASIS.fullmatch(text.rstrip("."))
    text = emphasized[2] if emphasized else text
    if not text.endswith(".."):
        text = text.removesuffix(".").removesuffix("。")
    text = ROOT.sub(
        lambda root: f"\\sqrt{{{root['inner'] or root[1]}}}", text.translate(SIGNS)
    )
    text = EMPTY_SET.sub(r"\\emptyset", THOUSANDS.sub("", text)).strip()
    if mixed := MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return f"{Decimal(text):f}" if SCIENTIFIC.fullmatch(text) else text


def choice_in(text: str) -> tuple[str, str]:
    r"""Return a choice's letter and the text behind it, `C` and `5` of `\textbf{(C)}\ 5`, or empty texts."""
    match = CHOICE.fullmatch(unwrap_text(text).strip())
    if match is None:
        return "", ""
    behind = match[4].lstrip("\\ ") if match[4].startswith("\\ ") else match[4]
    if OPERATOR.match(behind):  # `(A) \cup (B)` names sets
        return "", ""
    return match[1] or match[2] or match[3], behind


def unwrap_text(text: str) -> str:
    r"""Return a text without `\text{}` around its words."""
    return WRAPPED.sub(r"\1", text)


def squeeze(text: str) -> str:
    r"""Return a text without white space, in LaTeX too, and without `\text{}`, to compare it as written."""
    return "".join(re.sub(r"\\[ ,;!]|~", "", unwrap_text(text)).split()).strip("$")
