"""Which faults would the tests of a room miss: draw small faults, and run the tests that should see them.

    python -m tests.mutate balancing/search/packing.py workers/model/losses --mutants 60 --seed 0

mirrored tests, once --which statements each runs--> per mutant, those that run it --> died
                                                     the other mirrored ones       --> died
                                                     with --wider, others that import the file --> died, or survived

Mirrored tests stand where the file stands (tests/balancing/ for balancing/). A mutant changes one operator,
bound, constant, mask or name. It lives in a process forked after the tests were collected, in a copy of the
tree. The tree itself is never written.
"""

import argparse
import ast
import builtins
import gc
import inspect
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import TextIO

import pytest

from tests.mutants import Mutant, mutants_of

PACKAGES = ("balancing", "workers", "controller", "ballast")
QUICK = "not slow and not gpu and not soak"
ANEW_LIMIT_S = 180.0
PYTEST_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", QUICK)
ROOTS = (*PACKAGES, "workers/model")
"""Folders of files with different jobs: the tests of all of them are too many for a mutant of one."""


@cache
def names_imported_by_tests(tree: Path) -> dict[str, set[str]]:
    """Return the dotted names that each test file imports."""
    imported: dict[str, set[str]] = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        names = imported.setdefault(str(path.relative_to(tree)), set())
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return imported


def files_that_test(file: Path, tree: Path) -> tuple[list[str], list[str]]:
    """Return the mirrored test files, in the file's room or above it, and the others that import the file's
    module, or its names from its package.
    """
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    package = module.rpartition(".")[0]
    statements = ast.parse((tree / file).read_bytes()).body
    defined = {
        statement.name
        for statement in statements
        if isinstance(statement, ast.FunctionDef | ast.ClassDef)
    }
    subjects = {module, *(f"{package}.{name}" for name in defined)}
    imported = names_imported_by_tests(tree)
    importing = [
        path
        for path, names in imported.items()
        if names & subjects and "end_to_end" not in path
    ]
    above = [str(folder) for folder in (Path("tests") / file).parents]
    room = [path for path in imported if os.path.dirname(path) == above[0]]
    mirrored = {path for path in importing if os.path.dirname(path) in above}
    if str(file.parent) not in ROOTS or not mirrored:
        mirrored.update(room)
    return sorted(mirrored), [path for path in importing if path not in mirrored]


def new_code(
    file: Path, source: bytes, changed: ast.Module | bytes
) -> dict[CodeType, CodeType] | None:
    """Return the new code of each of the file's functions, or None if the change is in what an import runs: a
    default or a constant.
    """
    original = compile(source, str(file), "exec", dont_inherit=True)
    replacements = {}
    for before, after in _pairs_of_code(
        original, compile(changed, str(file), "exec", dont_inherit=True)
    ):
        if after is None or before.co_freevars != after.co_freevars:
            return None
        if (
            before.co_flags & inspect.CO_NEWLOCALS
            and before.co_flags & inspect.CO_OPTIMIZED
        ):
            replacements[before] = after
        elif isinstance(changed, bytes) and _instructions(before) != _instructions(after):
            return None
    return replacements


def _pairs_of_code(
    before: CodeType, after: CodeType
) -> Iterator[tuple[CodeType, CodeType | None]]:
    inner_before = [value for value in before.co_consts if isinstance(value, CodeType)]
    inner_after = [value for value in after.co_consts if isinstance(value, CodeType)]
    yield before, after if len(inner_before) == len(inner_after) else None
    for first, second in zip(inner_before, inner_after, strict=False):
        yield from _pairs_of_code(first, second)


def _instructions(code: CodeType) -> tuple[object, ...]:
    constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
    return code.co_code, repr(constants), code.co_names


def replace_code(file: Path, replacements: dict[CodeType, CodeType]) -> None:
    gc.unfreeze()  # conftest freezes what was imported, and `get_objects` returns nothing frozen
    objects = gc.get_objects()
    gc.freeze()
    for function in objects:
        if type(function) is FunctionType and function.__code__.co_filename == str(file):
            function.__code__ = replacements.get(function.__code__, function.__code__)


def with_recorder(source: bytes, name: str) -> ast.Module:
    """Return the file with a call of the builtin `__ran__` before every statement."""
    module = ast.parse(source)
    for node in list(ast.walk(module)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and not isinstance(
                node, ast.Module | ast.ClassDef
            ):
                recorded = []
                for statement in statements:
                    call = ast.parse(f"__ran__({name!r}, {statement.lineno})").body[0]
                    for part in ast.walk(call):
                        ast.copy_location(part, statement)
                    recorded += [call, statement]
                setattr(node, field, recorded)
    return module


def statement_line(source: bytes, line: int) -> int:
    """Return the first line of the innermost statement at the line."""
    statements = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)
    ]
    return max(
        (
            node.lineno
            for node in statements
            if node.lineno <= line <= (node.end_lineno or 0)
        ),
        default=line,
    )


class Trial:
    """A pytest plugin: note which statements each collected test runs, then fork a process for each mutant."""

    def __init__(
        self, mutants: Sequence[Mutant], output: TextIO, wider: bool, most_s: float
    ) -> None:
        self.mutants = mutants
        self.output = output
        self.wider = wider
        self.most_s = most_s
        self.tree = Path.cwd()
        self.ran: dict[
            str, set[tuple[str, int]]
        ] = {}  # by test: file and line of its statements
        self.seconds: dict[str, float] = {}
        self.slow: set[str] = set()
        self.failures: dict[str, str] = {}
        self.of_processes: set[str] = set()
        self.test = ""
        self.in_test = False
        self.fork_ended = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session = session
        self._say(f"{len(session.items)} mirrored tests")
        self._note_statements()
        slow = [
            item.nodeid
            for item in session.items
            if item.nodeid not in {**self.seconds, **self.failures}
        ]
        for test, error in self.failures.items():
            self._say(f"left out, fails without a mutant: {test}: {error}")
        self._say(
            f"pass in {sum(self.seconds.values()):.0f} s without a mutant. "
            f"Left out, slower than {self.most_s} s: {', '.join(slow) or 'none'}"
        )
        verdicts: Counter[str] = Counter()
        for mutant in self.mutants:
            start = time.monotonic()
            verdict = self._verdict(mutant)
            verdicts[verdict] += 1
            self._say(f"{verdict:9} {mutant} ({time.monotonic() - start:.1f} s)")
        share = verdicts["mirrored"] / max(1, len(self.mutants))
        self._say(
            f"died in mirrored tests: {verdicts['mirrored']} of {len(self.mutants)} ({share:.0%}), "
            f"in wider ones {verdicts['wider']}, survived {verdicts['survived']}"
        )
        return True

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._interruptible():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._interruptible():
            return (yield)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let `leave_out` raise. Elsewhere, as while pytest writes a report, that would end all tests."""
        self.in_test = True
        try:
            yield
        finally:
            self.in_test = False

    def leave_out(self, *_: object) -> None:
        """Skip the test that runs, as the handler of a signal."""
        self.slow.add(self.test)
        if self.in_test:
            self.in_test = False
            pytest.skip("too slow for a mutant")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = report.longreprtext.rpartition("\n")[2]

    def _say(self, line: str) -> None:
        print(line, file=self.output, flush=True)

    def _note_statements(self) -> None:
        notes = self.tree / "notes.json"

        def run_and_note() -> bool:
            ran, seconds = self._record()
            notes.write_text(
                json.dumps(
                    [list(ran.items()), seconds, sorted(self.of_processes), self.failures]
                )
            )
            return True

        if not self._in_fork(run_and_note, 900.0):
            error = self.tree / "fork.txt"
            trace = error.read_text() if error.exists() else ""
            pytest.exit(
                f"without a mutant, the process of the tests {self.fork_ended}\n{trace}", 2
            )
        ran, self.seconds, of_processes, self.failures = json.loads(notes.read_text())
        self.of_processes = set(of_processes)
        self.ran = {
            test: {(file, line) for file, line in statements} for test, statements in ran
        }

    def _record(self) -> tuple[dict[str, list[tuple[str, int]]], dict[str, float]]:
        statements: set[tuple[str, int]] = set()
        builtins.__ran__ = lambda file, line: statements.add((file, line))  # type: ignore[attr-defined]
        for file in {self.tree / mutant.file for mutant in self.mutants}:
            source = file.read_bytes()
            recorded = with_recorder(source, str(file.relative_to(self.tree)))
            replace_code(file, new_code(file, source, recorded) or {})
        ran = {}
        seconds = {}

        def note_process(event: str, _: object) -> None:
            if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
                self.of_processes.add(
                    os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
                )

        sys.addaudithook(note_process)
        for item in self.session.items:
            if {"ranks", "ray_session"} & set(getattr(item, "fixturenames", ())):
                self.of_processes.add(item.nodeid)
        signal.signal(signal.SIGPROF, self.leave_out)
        for item, following in zip(
            self.session.items, [*self.session.items[1:], None], strict=True
        ):
            start = time.monotonic()
            self.test = item.nodeid
            signal.setitimer(signal.ITIMER_PROF, self.most_s)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if item.nodeid not in self.slow and item.nodeid not in self.failures:
                seconds[item.nodeid] = time.monotonic() - start
                ran[item.nodeid] = sorted(statements)
            statements.clear()
        return ran, seconds

    def _verdict(self, mutant: Mutant) -> str:
        path = self.tree / mutant.file
        source = path.read_bytes()
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
        mirrored, others = files_that_test(mutant.file, self.tree)
        path.write_bytes(changed)  # for processes that a test starts
        try:
            replacements = new_code(path, source, changed)
            if replacements is None:
                if mirrored and not self._pass_anew(mirrored):
                    return "mirrored"
            else:
                for tests in self._tests_of(mutant, source, mirrored):
                    if not self._pass_with(path, replacements, tests):
                        return "mirrored"
            if self.wider and others and not self._pass_anew(others):
                return "wider"
            return "survived"
        finally:
            path.write_bytes(source)

    def _tests_of(
        self, mutant: Mutant, source: bytes, mirrored: list[str]
    ) -> list[list[pytest.Item]]:
        """Return the tests that run the statement, the quickest file first, and the others of their files and
        those with processes: a fixture or a process may have run it for them.
        """
        items = [
            item
            for item in self.session.items
            if item.nodeid in self.ran and item.nodeid.partition("::")[0] in mirrored
        ]
        statement = (str(mutant.file), statement_line(source, mutant.line))
        running = [item for item in items if statement in self.ran[item.nodeid]]
        total_s: Counter[Path] = Counter()
        for item in running:
            total_s[item.path] += self.seconds[item.nodeid]
        running.sort(key=lambda item: total_s[item.path])
        others = [
            item
            for item in items
            if item not in running
            and (
                (item.path in total_s and self.seconds[item.nodeid] < 1)
                or item.nodeid in self.of_processes
            )
        ]
        return [tests for tests in (running, others) if tests]

    def _pass_with(
        self, path: Path, replacements: dict[CodeType, CodeType], tests: list[pytest.Item]
    ) -> bool:
        def run() -> bool:
            replace_code(path, replacements)
            for item, following in zip(tests, [*tests[1:], None], strict=True):
                seconds = self.seconds[item.nodeid]
                # Of CPU, in an endless loop.
                signal.setitimer(signal.ITIMER_PROF, 5.0 + 5 * seconds)
                # In an endless wait.
                signal.setitimer(signal.ITIMER_REAL, 60.0 + 10 * seconds)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.session.testsfailed:
                    return False
            return True

        return self._in_fork(run, 600.0)

    def _in_fork(self, run: Callable[[], bool], limit_s: float) -> bool:
        """Call `run` in a process of its own. One that takes longer than `limit_s` has failed."""
        process = os.fork()
        if process == 0:
            passed = False
            try:
                os.setsid()
                passed = run()
            except BaseException:
                # pytest captures what is printed.
                (self.tree / "fork.txt").write_text(traceback.format_exc())
            finally:
                os._exit(0 if passed else 1)
        end = time.monotonic() + limit_s
        passed = False
        self.fork_ended = f"took more than {limit_s:.0f} s"
        while time.monotonic() < end:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self.fork_ended = f"ended with code {code}"
                passed = code == 0
                break
            time.sleep(0.02)
        try:
            os.killpg(process, signal.SIGKILL)  # and what its tests started
        except ProcessLookupError:
            return passed
        if time.monotonic() >= end:
            os.waitpid(process, 0)
        return passed

    def _pass_anew(self, files: list[str]) -> bool:
        command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *files]
        with (self.tree / "anew.txt").open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
            try:
                return process.wait(ANEW_LIMIT_S) in (0, 5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False


def copy_tree(folder: Path) -> None:
    """Copy the tree's files with their times: Numba compiles anew what is newer than its machine code."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, folder / name, follow_symlinks=False)
    for code in Path("balancing").rglob("__pycache__/*"):  # what Numba compiled
        (folder / code).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(code, folder / code)


def draw(rooms: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    files = [
        file
        for room in rooms
        for file in (sorted(room.rglob("*.py")) if room.is_dir() else [room])
    ]
    possible = [
        mutant for file in files if file.parts[0] in PACKAGES for mutant in mutants_of(file)
    ]
    print(
        f"{min(count, len(possible))} of {len(possible)} mutants of {len(files)} files, seed {seed}",
        flush=True,
    )
    return random.Random(seed).sample(possible, min(count, len(possible)))


def try_mutants(mutants: Sequence[Mutant], wider: bool, most_s: float) -> int:
    """Run in the copy of the tree, in a process that has imported none of our modules but this one."""
    with os.fdopen(os.dup(1), "w") as output:
        written = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        files = sorted(
            {
                test
                for mutant in mutants
                for test in files_that_test(mutant.file, Path.cwd())[0]
            }
        )
        trial = Trial(mutants, output, wider, most_s)
        code = int(pytest.main([*PYTEST_OPTIONS, *files], plugins=[trial]))
        if code:
            print(Path("output.txt").read_text(errors="replace")[-3000:], file=output)
        return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument(
        "rooms", nargs="+", type=Path, help="files or folders of the packages"
    )
    parser.add_argument("--mutants", type=int, default=60, help="to draw (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=5.0,
        help="CPU time above which a test is left out (5)",
    )
    parser.add_argument(
        "--only", default="", help="only mutants with this in their line, as printed"
    )
    parser.add_argument(
        "--wider",
        action="store_true",
        help="for survivors, the other tests that import the file",
    )
    options = parser.parse_args(arguments)
    drawn = draw(options.rooms, options.mutants, options.seed)
    mutants = [mutant for mutant in drawn if options.only in str(mutant)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder}
        if any(b"@compiled" in mutant.file.read_bytes() for mutant in mutants):
            # A changed file compiles all of them anew, 40 s.
            environment["NUMBA_DISABLE_JIT"] = "1"
        run = "import pickle, sys; from tests.mutate import *; sys.exit(try_mutants(*pickle.load(sys.stdin.buffer)))"
        return subprocess.run(
            [sys.executable, "-c", run],
            input=pickle.dumps((mutants, options.wider, options.test_seconds)),
            cwd=folder,
            env=environment,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
