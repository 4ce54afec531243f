"""Which faults would the tests of a room miss: draw small faults, and run the tests that should see them.

    python -m tests.mutate balancing/search/packing.py workers/model/losses --mutants 60 --seed 0

mutants of a file --mirrored tests--> died, or --other tests that import the file--> died, or survived

Mirrored tests stand where the file stands (tests/balancing/ for balancing/) and import it. A mutant changes
one operator, bound, constant, mask or name of a copy of the tree; the tree itself is never written.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("balancing", "workers", "controller", "ballast")
QUICK = "not slow and not gpu and not soak"
LOADED_ONCE = ("numpy", "torch", "pytest", "hypothesis", "tensordict", "omegaconf", "transformers", "ray")
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPPOSITES = (
    ("low", "high"),
    ("min", "max"),
    ("lowest", "highest"),
    ("any", "all"),
    ("sum", "mean"),
    ("start", "stop"),
)
NO_CODE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
FASTEST_LIMIT_S = 60.0
STARTED_IN = Path.cwd()


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
            mutants.append(Mutant(file, node.lineno, start, end, before, f"({ast.unparse(changed)})"))
    return mutants


def _code_nodes(node: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that run. A decorator, an annotation or a message is none of them."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(
            node, ast.Call
        ):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, NO_CODE) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr) and hasattr(child, "lineno"):
                yield child
            yield from _code_nodes(child)


def _changes(node: ast.expr, names: set[str]) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp):
        for dropped, kept in ((node.left, node.right), (node.right, node.left)):
            if isinstance(node.op, ast.Mult) and "mask" in ast.unparse(dropped):
                yield kept
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if type(node.op) in OPERATORS and not is_text:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Attribute):
        yield from (ast.Attribute(node.value, name, node.ctx) for name in _opposites(node.attr, names))
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


def files_that_test(file: Path, tree: Path) -> tuple[list[str], list[str]]:
    """Return the mirrored test files, and the others that import the file's module."""
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    importing = [
        str(path.relative_to(tree))
        for path in sorted((tree / "tests").rglob("test_*.py"))
        if "end_to_end" not in path.parts and imports.search(path.read_text(encoding="utf-8"))
    ]
    mirror = str(Path("tests") / file.parent)
    mirrored = [
        path for path in importing if os.path.dirname(path) == mirror or f"test_{file.stem}.py" in path
    ]
    return mirrored, [path for path in importing if path not in mirrored]


class Laboratory:
    """A copy of the tree in which one mutant lives at a time. Its processes are forked from one with the
    imports.
    """

    def __init__(self) -> None:
        self.tree = Path(tempfile.mkdtemp(prefix="mutants-"))
        listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, self.tree / name, follow_symlinks=False)
        for code in Path("balancing").rglob("__pycache__/*"):  # what Numba compiled
            (self.tree / code).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(code, self.tree / code)

    def verdict(self, mutant: Mutant, limit_s: float) -> str:
        """Return `mirrored`, `wider`, or `survived`."""
        path = self.tree / mutant.file
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        try:
            mirrored, others = files_that_test(mutant.file, self.tree)
            compiled = b"@compiled" in source
            if mirrored and not self.passes(mirrored, limit_s, compiled=compiled):
                return "mirrored"
            if others and not self.passes(others, 4 * limit_s, compiled=compiled):
                return "wider"
            return "survived"
        finally:
            path.write_bytes(source)

    def passes(self, files: Sequence[str], limit_s: float, *, compiled: bool = False) -> bool:
        """Run tests in a process of their own. One that takes longer than `limit_s` has failed."""
        process = os.fork()
        if process == 0:
            self._run_tests(files, compiled)
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) in (0, 5)
            time.sleep(0.05)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return False

    def _run_tests(self, files: Sequence[str], compiled: bool) -> None:
        os.setsid()
        output = os.open(self.tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if compiled:  # a change of a compiled file compiles all of them anew, 40 s
            os.environ["NUMBA_DISABLE_JIT"] = "1"
        os.chdir(self.tree)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", *PACKAGES)]:
            del sys.modules[name]  # of the tree itself, from where this was started
        sys.path[:] = [
            str(self.tree),
            *(path for path in sys.path if Path(path or ".").resolve() != STARTED_IN),
        ]
        os.environ["PYTHONPATH"] = str(self.tree)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", QUICK]
        code = pytest.main([*options, *files])
        os._exit(int(code))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("rooms", nargs="+", type=Path, help="files or folders of the packages")
    parser.add_argument("--mutants", type=int, default=60, help="to draw (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    options = parser.parse_args(arguments)
    files = [
        file for room in options.rooms for file in (sorted(room.rglob("*.py")) if room.is_dir() else [room])
    ]
    files = [file for file in files if file.parts[0] in PACKAGES]
    possible = [mutant for file in files for mutant in mutants_of(file)]
    drawn = random.Random(options.seed).sample(possible, min(options.mutants, len(possible)))
    for name in LOADED_ONCE:
        __import__(name)
    laboratory = Laboratory()
    print(f"{len(drawn)} of {len(possible)} mutants of {len(files)} files, seed {options.seed}", flush=True)
    limits: dict[Path, float] = {}
    verdicts: Counter[str] = Counter()
    try:
        for mutant in drawn:
            if mutant.file not in limits:
                limits[mutant.file] = _limit_of(mutant.file, laboratory)
            verdict = laboratory.verdict(mutant, limits[mutant.file])
            verdicts[verdict] += 1
            print(f"{verdict:9} {mutant}", flush=True)
    finally:
        shutil.rmtree(laboratory.tree, ignore_errors=True)
    died = verdicts["mirrored"]
    share = died / max(1, len(drawn))
    print(
        f"died in mirrored tests: {died} of {len(drawn)} ({share:.0%}), in wider ones {verdicts['wider']}, ",
        end="",
    )
    print(f"survived {verdicts['survived']}")
    return 0


def _limit_of(file: Path, laboratory: Laboratory) -> float:
    """Return the seconds that the mirrored tests may take, from the time they take without a mutant."""
    mirrored, _ = files_that_test(file, laboratory.tree)
    start = time.monotonic()
    compiled = b"@compiled" in (laboratory.tree / file).read_bytes()
    if mirrored and not laboratory.passes(mirrored, 600.0, compiled=compiled):
        output = (laboratory.tree / "output.txt").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{output}\nerror: {file}: its tests fail without a mutant: {' '.join(mirrored)}")
    return max(FASTEST_LIMIT_S, 4 * (time.monotonic() - start))


if __name__ == "__main__":
    sys.exit(main())
