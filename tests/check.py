"""Run the tests that a change needs: those of what changed, and of what imports it directly.

    python -m tests.check [FILE ...]        by default, what git says has changed since the last commit

files --> modules --grimp: what imports them--> test files, the mirrored ones first --> pytest, and one small whole run
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grimp

from tests.mutate import PACKAGES, QUICK

MOST_FILES = 24
WHOLE_RUN = "tests/controller/test_runs_that_compute.py"
ONE_RUN = (
    f"{WHOLE_RUN}::test_the_learning_rate_falls_over_the_optimiser_steps_of_all_epochs"
)
"""A run of three steps on stand-ins of Ray, with models that compute."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="files that changed (what git says)"
    )
    options = parser.parse_args(arguments)
    changed = options.files or changed_files()
    files = files_to_run(changed)
    print(f"{len(changed)} changed files, {len(files)} test files", flush=True)
    if len(files) > MOST_FILES:
        print(f"{len(files) - MOST_FILES} of them are left to `make test`", flush=True)
    return _run([*files[:MOST_FILES], *_whole_run(changed)])


def changed_files() -> list[Path]:
    """Return what differs from the last commit, and what git does not know yet."""
    lists = (
        ["git", "diff", "--name-only", "HEAD"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names = [
        subprocess.run(words, check=True, capture_output=True, text=True).stdout
        for words in lists
    ]
    return [
        Path(name) for text in names for name in text.splitlines() if Path(name).is_file()
    ]


def files_to_run(changed: Sequence[Path]) -> list[str]:
    """Return test files: changed ones, mirrored ones, and those of the nearest importers that have any."""
    graph = grimp.build_graph(*PACKAGES, "tests", include_external_packages=False)
    modules = [
        _module_of(path)
        for path in changed
        if path.suffix == ".py" and path.parts[0] in (*PACKAGES, "tests")
    ]
    modules = [module for module in modules if module in graph.modules]
    tests = [module for module in modules if _is_test(module)]
    for module in modules:
        tests += _tests_of(module, graph)
    return [
        f"{module.replace('.', '/')}.py"
        for module in dict.fromkeys(tests)
        if "end_to_end" not in module
    ]


def _tests_of(module: str, graph: grimp.ImportGraph) -> list[str]:
    """Return the tests of a module and its importers. Without one, those of the importers' importers, and so
    on.
    """
    seen = {module}
    level = [module]
    tests: list[str] = []
    while level and not tests:
        direct = {
            importer
            for name in level
            for importer in graph.find_modules_that_directly_import(name)
        } - seen
        importers = sorted(name for name in direct if not name.startswith("tests."))
        mirrors = [_mirror_of(name) for name in level]
        tests = [name for name in mirrors if name in graph.modules]
        tests += sorted(name for name in direct if _is_test(name))
        tests += [name for name in map(_mirror_of, importers) if name in graph.modules]
        seen |= direct
        level = importers
    return tests


def _whole_run(changed: Sequence[Path]) -> list[str]:
    touches_code = any(path.parts[0] in PACKAGES for path in changed)
    return [ONE_RUN] if touches_code else []


def _module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _mirror_of(module: str) -> str:
    package, _, name = module.rpartition(".")
    return f"tests.{package}.test_{name}"


def _is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")


def _run(files: Sequence[str]) -> int:
    if not files:
        print("nothing to run")
        return 0
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", QUICK, "-n", "2", *files], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
