"""Machine code on disk is that of the sources as they are now."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import balancing
from balancing.basics.compiled import COMPILED, PACKAGE, drop_stale_code

CALLER = """\
from pathlib import Path
from balancing.basics.compiled import compiled, drop_stale_code, telling_of_compilation
drop_stale_code(Path(__file__).parent)
from callee import value

@compiled
def twice():
    return 2 * value()

told = []
with telling_of_compilation(lambda: told.append("told")):
    print(twice(), sum(twice.stats.cache_hits.values()), *told)
"""
CALLEE = """\
from balancing.basics.compiled import compiled

@compiled
def value():
    return {}
"""


def run(folder: Path) -> str:
    environment = {"PYTHONPATH": f"{Path.cwd()}:{folder}"}
    command = [sys.executable, str(folder / "caller.py")]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(not COMPILED, reason="needs Numba")
def test_a_function_is_compiled_again_when_what_it_calls_has_changed_and_that_is_told_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(1))
    assert [run(tmp_path), run(tmp_path)] == ["2 0 told", "2 1"]
    (tmp_path / "callee.py").write_text(CALLEE.format(5))
    assert run(tmp_path) == "10 0 told"


def test_code_of_all_rooms_is_dropped_together() -> None:
    """Of `basics` alone, a change of a loop in `search` would leave the old code of its callers."""
    assert Path(balancing.__file__).parent == PACKAGE
    source = {path for path in PACKAGE.rglob("*.py") if "@compiled" in path.read_text()}
    assert {path.parent.name for path in source} > {"basics", "search"}


def test_code_is_kept_until_a_source_with_compiled_functions_changes_comes_or_goes(
    tmp_path: Path,
) -> None:
    source, code = tmp_path / "source.py", tmp_path / "__pycache__" / "source.nbi"
    source.write_text("@compiled\n1")
    drop_stale_code(tmp_path)
    code.write_text("machine code")
    (tmp_path / "errors.py").write_text("# a comment")
    drop_stale_code(tmp_path)
    assert code.exists()
    changes = (
        lambda: source.write_text("@compiled\n2"),
        lambda: (tmp_path / "more.py").write_text("@compiled\n3"),
        source.unlink,
    )
    for change in changes:
        code.write_text("machine code")
        drop_stale_code(tmp_path)
        assert code.exists()
        change()
        drop_stale_code(tmp_path)
        assert not code.exists()


LOOPS = """
import importlib, pkgutil
import balancing
from balancing import precompile
from numba.core.dispatcher import Dispatcher

precompile.main()
packages = pkgutil.walk_packages(balancing.__path__, "balancing.")
modules = [importlib.import_module(package.name) for package in packages if package.name != "balancing.__main__"]
loops = {loop for module in modules for loop in vars(module).values() if isinstance(loop, Dispatcher)}
"""


@pytest.mark.skipif(not COMPILED, reason="needs Numba")
def test_plans_and_what_is_said_of_them_take_no_other_code_than_precompile_makes() -> None:
    """An array that is not contiguous would be of another type, for which a loop is compiled again."""
    script = f"""{LOOPS}
from balancing.analysis.explain import explain
from balancing.analysis.statistics import plan_statistics
from tests.balancing.analysis.test_explain import BATCHES

made = {{loop: set(loop.signatures) for loop in loops}}
for make in BATCHES.values():
    plan = make()
    plan_statistics(plan)
    explain(plan)
print(*(f"{{loop.__name__}}{{later}}" for loop in loops for later in set(loop.signatures) - made[loop]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == []


# a minute, without the machine code on disk: what is loaded from there tells nothing of inner loops
@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="needs Numba")
def test_precompile_compiles_every_loop_of_plans(tmp_path: Path) -> None:
    script = f"""{LOOPS}
print(len(loops), sorted(loop.__name__ for loop in loops if not loop.signatures))
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    loops, missing = run.stdout.split(maxsplit=1)
    assert int(loops) > 30
    assert missing == "[]\n"
