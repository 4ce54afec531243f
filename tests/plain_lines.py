"""Measure how plainly the packages read. `tests/plain_lines.toml` holds a ceiling for each figure.

    python -m tests.plain_lines            print the figures, and those above their ceiling
    python -m tests.plain_lines --write    make today's figures the ceilings

texts of the packages --count_file--> counts of each file --measure--> figures --rises--> figures above their ceiling,
with the files that grew since the commit that last wrote the table

Tokens are counted without docstrings and comments. Vague names are participles and pronouns among the names that
assignments and arguments bind. The closure is what `import controller.step` brings, in lines of these packages.
"""

import argparse
import ast
import functools
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
PACKAGES = ("ballast", "balancing", "workers", "controller")
CLOSURE_OF = "controller.step"
VAGUE_WORDS = (
    "found given told asked each own there begun said made kept left taken shown known tried before after "
    "other others whole what which where of more"
)
VAGUE_NAMES = frozenset(VAGUE_WORDS.split())
WIDTH = 110
LINES_OF_A_FUNCTION = 70
LINES_OF_A_FILE = 500
SHOWN_FILES = 6

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = frozenset((tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT))

Texts = Mapping[str, str]
"""Python files: path below the repository's root, text."""


@dataclass(frozen=True)
class Counts:
    """Counts of one file."""

    lines: int
    code_lines: int
    tokens: int
    statements: int
    tuple_assignments: int
    nested_comprehensions: int
    bound_names: int
    vague_names: int
    lines_above_110: int
    functions_above_70: int
    files_above_500: int


SHARES = {
    "vague_names_percent": ("vague_names", "bound_names", 100, 2),
    "tuple_assignments_per_1000": ("tuple_assignments", "statements", 1000, 1),
    "nested_comprehensions_per_1000": ("nested_comprehensions", "statements", 1000, 1),
}
"""Figure: its count, what the count is divided by, the factor, and decimal places."""
SUMS = ("lines_above_110", "functions_above_70", "files_above_500")
CLOSURE = "step_closure_lines"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.plain_lines", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--write", action="store_true", help="make today's figures the ceilings"
    )
    options = parser.parse_args(arguments)
    texts = read_texts(REPOSITORY)
    figures = measure(texts)
    if options.write:
        TABLE.write_text(render_table(figures))
        return 0
    counts = [count_file(text) for text in texts.values()]
    tokens = sum(count.tokens for count in counts)
    print(
        f"{len(texts)} files, {sum(count.lines for count in counts):,} lines, {tokens:,} tokens"
    )
    print(f"{tokens / sum(count.code_lines for count in counts):.2f} tokens per line\n")
    print(render_table(figures))
    messages = rises(texts, read_table(), texts_of_the_table())
    print("\n".join(messages))
    return int(bool(messages))


def read_texts(repository: Path) -> Texts:
    paths = [path for package in PACKAGES for path in (repository / package).rglob("*.py")]
    return {
        path.relative_to(repository).as_posix(): path.read_text() for path in sorted(paths)
    }


def texts_of_the_table() -> Texts:
    """Return the files of the commit that last wrote the table, or none where git does not know it."""
    log = ["git", "log", "-1", "--format=%H", "--", str(TABLE)]
    commit = subprocess.run(
        log, cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    if not commit:
        return {}
    command = ["git", "archive", "--format=tar", commit, *PACKAGES]
    archive = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, check=True
    ).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.isfile() and member.name.endswith(".py"):
                file = files.extractfile(member)
                assert file is not None
                texts[member.name] = file.read().decode()
    return texts


def read_table() -> dict[str, float]:
    tables = tomllib.loads(TABLE.read_text())
    rooms = {f"tokens in {room}": value for room, value in tables["tokens"].items()}
    return tables["packages"] | rooms


def render_table(figures: Mapping[str, float]) -> str:
    lines = ["# Ceilings, written by `python -m tests.plain_lines --write`.", "[packages]"]
    lines += [f"{name} = {figures[name]}" for name in (*SHARES, *SUMS, CLOSURE)]
    lines += ["", "[tokens]"]
    for name, value in figures.items():
        prefix, _, room = name.partition("tokens in ")
        if room and not prefix:
            lines.append(f'"{room}" = {value}')
    return "\n".join(lines) + "\n"


def rises(texts: Texts, ceilings: Mapping[str, float], earlier: Texts) -> list[str]:
    """Return a line for each figure above its ceiling, with the files that grew since `earlier`."""
    messages = []
    for name, value in measure(texts).items():
        ceiling = ceilings.get(name, 0)
        if value > ceiling:
            growth = file_counts(name, texts)
            growth.subtract(file_counts(name, earlier) if earlier else growth)
            places = [
                f"{path} +{count}"
                for path, count in growth.most_common(SHOWN_FILES)
                if count > 0
            ]
            where = f" ({', '.join(places)})" if places else ""
            messages.append(
                f"{name}: {value:g}, {value - ceiling:.6g} above {ceiling:g}{where}"
            )
    return messages


def measure(texts: Texts) -> dict[str, float]:
    """Return each figure by its name: shares and sums over all files, the closure, and tokens in each room."""
    counts = {path: count_file(text) for path, text in texts.items()}
    figures: dict[str, float] = {}
    for name, (part, whole, factor, digits) in SHARES.items():
        denominator = sum(getattr(count, whole) for count in counts.values())
        numerator = sum(getattr(count, part) for count in counts.values())
        figures[name] = round(factor * numerator / max(denominator, 1), digits)
    for name in SUMS:
        figures[name] = sum(getattr(count, name) for count in counts.values())
    figures[CLOSURE] = sum(counts[path].lines for path in closure(texts))
    for path in sorted(counts, key=room_of):
        name = f"tokens in {room_of(path)}"
        figures[name] = figures.get(name, 0) + counts[path].tokens
    return figures


def file_counts(figure: str, texts: Texts) -> Counter[str]:
    """Return what each file adds to a figure, for shares to its numerator."""
    counts = {path: count_file(text) for path, text in texts.items()}
    if figure == CLOSURE:
        return Counter({path: counts[path].lines for path in closure(texts)})
    room = figure.removeprefix("tokens in ")
    if room != figure:
        return Counter(
            {path: count.tokens for path, count in counts.items() if room_of(path) == room}
        )
    attribute = SHARES[figure][0] if figure in SHARES else figure
    return Counter({path: getattr(count, attribute) for path, count in counts.items()})


def room_of(path: str) -> str:
    """Return the folder of a file, at most two deep: `workers/model` holds `workers/model/losses`."""
    return "/".join(PurePosixPath(path).parent.parts[:2])


def closure(texts: Texts) -> set[str]:
    """Return the files that `import controller.step` brings, by imports at module level."""
    paths = {module_of(path): path for path in texts}
    modules: set[str] = set()
    waiting = [CLOSURE_OF]
    while waiting:
        module = waiting.pop()
        if module in modules or module not in paths:
            continue
        modules.add(module)
        waiting.append(module.rpartition(".")[0])
        waiting += imported_names(texts[paths[module]])
    return {paths[module] for module in modules}


def module_of(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported_names(text: str) -> tuple[str, ...]:
    """Return modules, and what may be modules, that are imported at module level outside of any `if`."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


@functools.cache
def count_file(text: str) -> Counts:
    tokens, code_lines = count_tokens(text)
    nodes = list(ast.walk(ast.parse(text)))
    statements = [
        node for node in nodes if isinstance(node, ast.stmt) and not is_constant(node)
    ]
    comprehensions = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    names = [name for node in nodes for name in bound_names(node)]
    functions = [
        node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = text.count("\n")
    return Counts(
        lines=lines,
        code_lines=code_lines,
        tokens=tokens,
        statements=len(statements),
        tuple_assignments=sum(map(is_tuple_assignment, statements)),
        nested_comprehensions=sum(map(holds_comprehension, comprehensions)),
        bound_names=len(names),
        vague_names=sum(name in VAGUE_NAMES for name in names),
        lines_above_110=sum(len(line) > WIDTH for line in text.splitlines()),
        functions_above_70=sum(map(is_long_function, functions)),
        files_above_500=int(lines > LINES_OF_A_FILE),
    )


def count_tokens(text: str) -> tuple[int, int]:
    """Return tokens and lines that hold any. A string that begins a line counts as a docstring."""
    tokens = 0
    lines: set[int] = set()
    begins_line = True
    for token in read_tokens(text):
        if token.type in (tokenize.COMMENT, tokenize.ENDMARKER):
            continue
        if token.type in LAYOUT:
            begins_line = True
            continue
        if token.type != tokenize.STRING or not begins_line:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
        begins_line = False
    return tokens, len(lines)


def read_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield tokens as Python 3.11 reads them: later versions read an f-string as several."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            if depth == 0:
                start = token.start
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
            if depth == 0:
                yield tokenize.TokenInfo(tokenize.STRING, "", start, token.end, token.line)
        elif depth == 0:
            yield token


def is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_tuple_assignment(statement: ast.stmt) -> bool:
    """Tell whether several names are assigned several values: `a, b = c, d`."""
    if not isinstance(statement, ast.Assign):
        return False
    return isinstance(statement.targets[0], ast.Tuple) and isinstance(
        statement.value, ast.Tuple
    )


def holds_comprehension(comprehension: ast.AST) -> bool:
    inner = (node for node in ast.walk(comprehension) if node is not comprehension)
    return any(isinstance(node, COMPREHENSIONS) for node in inner)


def bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
        return [node.arg]
    return []


def is_long_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return (function.end_lineno or 0) - function.lineno > LINES_OF_A_FUNCTION


if __name__ == "__main__":
    sys.exit(main())
