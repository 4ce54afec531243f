"""Words of a shell script, with variables, defaults and arithmetic in place; nothing is run.

n=4; prompts=$((n * 8)); ... data.train_batch_size=${prompts} --script_words--> data.train_batch_size=32
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")


def script_words(text: str) -> Iterator[str]:
    """The words of all commands; `$` is left where a value would need a shell. ValueError for an open quote."""
    variables = {name: os.environ[name] for name in ("HOME", "PWD") if name in os.environ}
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    unfinished = ""
    for line in text.splitlines():
        unfinished += line
        try:
            words = shlex.split(_expanded(unfinished, variables), comments=True)
        except ValueError:  # a quote that goes on in the next line
            unfinished += "\n"
            continue
        unfinished = ""
        for word in (word.rstrip(";") for word in words):
            if found := ASSIGNMENT.fullmatch(word):
                variables[found[1]] = found[2]
            yield word
    if unfinished:
        raise ValueError(f"a quote is not closed: {unfinished.strip().splitlines()[0][:60]}")


def _expanded(text: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        default = found[0] if found[2] is None else found[2]
        return variables.get(found[1] or found[3], default)

    for _ in range(8):  # a default may hold another variable
        expanded = VARIABLE.sub(value, text)
        if expanded == text:
            break
        text = expanded
    return ARITHMETIC.sub(lambda found: _number(found, variables), text)


def _number(found: re.Match[str], variables: dict[str, str]) -> str:
    try:
        return str(_evaluated(ast.parse(found[1].strip(), mode="eval").body, variables))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        return found[0]


def _evaluated(node: ast.expr, variables: dict[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(variables.get(node.id, ""))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_evaluated(node.left, variables), _evaluated(node.right, variables)))
    raise ValueError(node)
