"""No process of ours outlives a killed owner: neither SIGKILL nor a limit of time leaves one behind.

The first test reads every place of the packages that starts a process. The second kills owners.
"""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.processes import living

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("balancing", "workers", "controller", "ballast")
STARTS = ("Popen", "run", "call", "check_call", "check_output")
START_SECONDS = 120
OTHER_WAYS = {
    "workers/user_code/process.py": "a UserProcess calls end_with_parent before users' code",
    "workers/sandbox/bubblewrap.py": "bwrap has die-with-parent",
    "workers/sandbox/supervisor.py": "the kernel ends a sandbox's processes with its first one",
    "workers/model/memory/memory_trace.py": "the pool's first call is end_with_parent",
    "workers/sandbox/containers.py": "a client ends with its container, which the next run removes",
}
"""Files that start processes without `preexec_fn=end_with_parent`, and what ends these."""

STAND_IN = (
    "import os, time\n"
    "from pathlib import Path\n"
    "partial = Path({file!r}).with_suffix('.partial')\n"
    "partial.write_text(str(os.getpid()))\n"
    "partial.rename({file!r})\n"
    "time.sleep(600)\n"
)
OWNERS = {
    "balancing/precompile.py": (
        "from controller.lifecycle import planner_code\n"
        "planner_code.is_compiled = lambda: False\n"
        "with planner_code.compiling_planner() as wait:\n"
        "    wait()"
    ),
    "measure.py": (
        "from controller.config.cached_process import ask_module\n"
        "ask_module('measure', {}, 600)"
    ),
    "controller/fit.py": (
        "from pathlib import Path\n"
        "from ballast.certify.training import _fit\n"
        "_fit(Path(), {})"
    ),
    "job.py": (
        "import runpy\n"
        "from workers.config.roles import ParallelConfig\n"
        "from workers.model.memory import memory_trace\n"
        "with memory_trace._pools(1, ParallelConfig(), [0], 1) as (pool,):\n"
        "    pool.submit(runpy.run_path, 'job.py').result()"
    ),
}
"""A module that a process of ours runs: a script that starts this process and waits."""


def starts_of_processes() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of `subprocess` in the packages, with its file."""
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _starts_a_process(node):
                    yield str(path.relative_to(REPOSITORY)), node


def _starts_a_process(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="subprocess"), attr=name):
            return name in STARTS
        case ast.Attribute(value=ast.Name(id="os"), attr=name):
            return name in ("system", "popen") or "spawn" in name
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith("create_subprocess") or name == "ProcessPoolExecutor"
    return False


def _ends_with_its_parent(call: ast.Call) -> bool:
    return any(
        keyword.arg == "preexec_fn" and ast.unparse(keyword.value) == "end_with_parent"
        for keyword in call.keywords
    )


def test_every_place_that_starts_a_process_says_what_ends_it() -> None:
    others = {
        file for file, call in starts_of_processes() if not _ends_with_its_parent(call)
    }
    assert others == OTHER_WAYS.keys()


@pytest.mark.parametrize("module", OWNERS)
def test_a_process_ends_with_its_killed_owner(module: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stand_in = tmp_path / module
    if stand_in.parent != tmp_path:
        stand_in.parent.mkdir()
        (stand_in.parent / "__init__.py").touch()
    stand_in.write_text(STAND_IN.format(file=str(pid_file)))
    # Our packages are imported before the stand-in's folder comes first.
    script = "import sys, balancing.precompile, controller.fit\n"
    script += f"sys.path.insert(0, {str(tmp_path)!r})\n{OWNERS[module]}"
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not pid_file.exists() and time.monotonic() < deadline:
            assert owner.poll() is None
            time.sleep(0.1)
        pid = int(pid_file.read_text())
    finally:
        owner.kill()
        owner.wait()
    left_over = living([pid], seconds=5)
    for survivor in left_over:
        os.kill(survivor, signal.SIGKILL)
    assert left_over == []
