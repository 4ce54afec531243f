"""Draw small faults of a file: one changes one operator, bound, constant, mask or name."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OPPOSITES = (
    ("low", "high"),
    ("min", "max"),
    ("lowest", "highest"),
    ("any", "all"),
    ("sum", "mean"),
    ("start", "stop"),
)
NO_CODE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """A replaced span of a file, in bytes."""

    file: Path
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def mutants_of(file: Path) -> list[Mutant]:
    """Return every small fault of the file's code. Messages, annotations and defaults of messages are left
    alone.
    """
    source = file.read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    names = set(re.findall(r"\w+", source.decode()))
    mutants = []
    for node in _code_nodes(ast.parse(source)):
        for changed in _changes(node, names):
            start = offsets[node.lineno - 1] + node.col_offset
            end = offsets[node.end_lineno - 1] + node.end_col_offset
            before = source[start:end].decode()
            lines = "\n" * before.count("\n")  # the statements after it stay on their lines
            mutants.append(
                Mutant(
                    file,
                    node.lineno,
                    start,
                    end,
                    before,
                    f"({ast.unparse(changed)}{lines})",
                )
            )
    return mutants


def _code_nodes(node: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that run. A decorator, an annotation or a message is none of them."""
    for field, value in ast.iter_fields(node):
        if field in (
            "annotation",
            "returns",
            "decorator_list",
            "bases",
            "keywords",
        ) and not isinstance(node, ast.Call):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, NO_CODE) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr) and hasattr(child, "lineno"):
                yield child
            yield from _code_nodes(child)


def _changes(node: ast.expr, names: set[str]) -> Iterator[ast.expr]:
    if (
        isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and type(node.ops[0]) in COMPARISONS
    ):
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp):
        for dropped, kept in ((node.left, node.right), (node.right, node.left)):
            if isinstance(node.op, ast.Mult) and "mask" in ast.unparse(dropped):
                yield kept
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if type(node.op) in OPERATORS and not is_text:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(
            ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif (
        isinstance(node, ast.Constant)
        and type(node.value) is int
        and node.value in (0, 1, 2)
    ):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Attribute):
        yield from (
            ast.Attribute(node.value, name, node.ctx)
            for name in _opposites(node.attr, names)
        )
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from (ast.Name(name, node.ctx) for name in _opposites(node.id, names))


def _opposites(name: str, names: set[str]) -> Iterator[str]:
    """Yield the name with `low` for `high` and the like, if the file has that name, or it is a builtin's."""
    parts = name.split("_")
    for pair in OPPOSITES:
        for one, other in (pair, pair[::-1]):
            if one in parts:
                opposite = "_".join(other if part == one else part for part in parts)
                if opposite in names or name in ("min", "max", "any", "all"):
                    yield opposite
