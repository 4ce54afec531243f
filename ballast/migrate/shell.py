"""Read the words of a shell script's commands, with its variables, defaults, arithmetic and conditions.
Nothing is run.

run.sh --ShellScript--> words, by line; notes: what could not be decided without a shell
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
COMMAND = re.compile(r"\$\((?!\()(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
OPTION = re.compile(r"--[A-Za-z]|[+~]{0,2}[A-Za-z_]\w*(?:[./@]\w+)+=")
# In $(...), which stays one word.
HIDDEN = {" ": "\x1c", '"': "\x1d", "'": "\x1e", "#": "\x1f"}
SHOWN = {hidden: letter for letter, hidden in HIDDEN.items()}
COMPARISONS = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
MOST_NESTED = 8  # defaults inside of defaults


@dataclass
class Branch:
    """An `if` that has begun.

    is_read: the words of its present part. was_taken: a part before was; None: unknown. note: for the user,
    where the words of a part have flags and only a shell knows whether it is taken.
    """

    is_read: bool
    was_taken: bool | None
    note: str = ""


class ShellScript:
    """notes: lines for the user about what only a shell can decide."""

    def __init__(self, text: str) -> None:
        self.text = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ")
        self.variables = {
            name: os.environ[name] for name in ("HOME", "PWD") if name in os.environ
        }
        self.branches: list[Branch] = []
        self.notes: list[str] = []

    def words(self) -> Iterator[str]:
        """Yield the words of all commands that are reached, and a line break behind each. ValueError: an open
        quote.
        """
        unfinished = ""
        for line in self.text.splitlines():
            unfinished += line
            try:
                words = shlex.split(self._expand(unfinished), comments=True)
            except ValueError:  # a quote that continues on the next line
                unfinished += "\n"
                continue
            unfinished = ""
            for word in self._reached([_show(word) for word in words]):
                if assignment := ASSIGNMENT.fullmatch(word):
                    self.variables[assignment[1]] = assignment[2]
                yield word
            yield "\n"
        if unfinished:
            raise ValueError(
                f"a quote is not closed: {unfinished.strip().splitlines()[0][:60]}"
            )

    def _reached(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the words outside of branches that are not taken."""
        words = [part for word in words for part in _without_semicolon(word)]
        position = 0
        while position < len(words):
            word = words[position]
            is_first = position == 0 or words[position - 1] in (";", "then", "else", "do")
            if is_first and word in ("if", "elif"):
                end = (
                    words.index("then", position)
                    if "then" in words[position:]
                    else len(words)
                )
                self._begin_part(
                    word, [part for part in words[position + 1 : end] if part != ";"]
                )
                position = end
            elif is_first and word == "else" and self.branches:
                self._begin_part(word, [])
            elif is_first and word == "fi" and self.branches:
                self.branches.pop()
            elif word not in (";", "then") and all(
                branch.is_read for branch in self.branches
            ):
                if OPTION.match(word):
                    self._note_branches()
                yield word
            position += 1

    def _begin_part(self, keyword: str, condition: Sequence[str]) -> None:
        is_met = True if keyword == "else" else _is_met(condition)
        if keyword == "if":
            note = (
                f"if {' '.join(condition)[:60]}: only a shell knows it, so that its parts were read in their "
                "order."
            )
            self.branches.append(
                Branch(is_met is not False, is_met, note if is_met is None else "")
            )
        elif self.branches:
            branch = self.branches[-1]
            branch.is_read = branch.was_taken is not True and is_met is not False
            branch.was_taken = (
                True if branch.was_taken or is_met else (branch.was_taken and is_met)
            )

    def _note_branches(self) -> None:
        for branch in self.branches:
            if branch.note and branch.note not in self.notes:
                self.notes.append(branch.note)

    def _expand(self, text: str) -> str:
        for _ in range(MOST_NESTED):  # a default may hold another variable
            expanded = VARIABLE.sub(self._value, text)
            if expanded == text:
                break
            text = expanded
        text = ARITHMETIC.sub(self._number, text)
        return COMMAND.sub(_hide, text)

    def _value(self, match: re.Match[str]) -> str:
        name = match[1] or match[4]
        default = match[3]
        if default is None:
            return self.variables.get(name, match[0])
        if match[2].endswith("=") and not self.variables.get(name):
            self.variables[name] = default
        return self.variables.get(name) or default

    def _number(self, match: re.Match[str]) -> str:
        try:
            return str(self._evaluate(ast.parse(match[1].strip(), mode="eval").body))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError):
            return match[0]

    def _evaluate(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(self.variables.get(node.id, ""))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(
                OPERATORS[type(node.op)](
                    self._evaluate(node.left), self._evaluate(node.right)
                )
            )
        raise ValueError(node)


def _is_met(condition: Sequence[str]) -> bool | None:
    """Return whether a test in brackets holds, None where only a shell knows it."""
    if (
        len(condition) < 3
        or condition[0] not in ("[", "[[")
        or condition[-1] not in ("]", "]]")
    ):
        return None
    words = condition[1:-1]
    if any("$" in word for word in words):
        return None
    for joint, decides in (("||", True), ("&&", False)):
        if joint in words:
            split = words.index(joint)
            parts = [
                _is_met(["[", *words[:split], "]"]),
                _is_met(["[", *words[split + 1 :], "]"]),
            ]
            return decides if decides in parts else None if None in parts else not decides
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3 or words[1] not in COMPARISONS:
        return None
    left, _, right = words
    if not words[1].startswith("-"):
        return bool(COMPARISONS[words[1]](left, right))
    if not (left.lstrip("-").isdigit() and right.lstrip("-").isdigit()):
        return None
    return bool(COMPARISONS[words[1]](int(left), int(right)))


def _without_semicolon(word: str) -> list[str]:
    if word.endswith(";") and word != ";":
        return [word.rstrip(";"), ";"]
    return [word]


def _hide(match: re.Match[str]) -> str:
    return "".join(HIDDEN.get(letter, letter) for letter in match[0])


def _show(word: str) -> str:
    return "".join(SHOWN.get(letter, letter) for letter in word)
