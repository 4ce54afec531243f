"""Shared by all tests: a local Ray session, a folder that the documentation works in, and what runs one at a
time.
"""

import functools
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import cpu_seconds, long_tests

if TYPE_CHECKING:
    from tests.controller.stand_ins.run import StandIns
    from tests.workers.model.ranks import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
# At Ray's own, 15, a run hardly goes on beside anything else.
os.environ.setdefault("RAY_worker_niceness", "0")
# How long an example takes is the machine's affair. The same examples everywhere: what passes here passes in
# CI, and `make test-slow` draws others.
hypothesis.settings.register_profile("repeated", deadline=None, derandomize=True)
hypothesis.settings.register_profile("drawn", deadline=None)
hypothesis.settings.load_profile("repeated")
# Begun first: of two processes that take a file at a time, one would wait for the other at the end.
LONG = (
    "tests/end_to_end/",
    "tests/workers/model/test_exactness.py",
    "tests/workers/rollout/test_transfers.py",
    "tests/workers/rollout/test_engine_actor.py",
)

REAL_TRIALS = ("tests/workers/user_code/test_process.py", "tests/end_to_end/")
"""Where trials of users' code are new interpreters, as users have them; and so of fixtures of modules."""

RUNS_ALWAYS = ("test_whole_loop", "test_first_hour")
RUNS_DRAWN = 1
"""Files of whole runs, each a minute or two of both cores."""

gc.disable()  # until all tests are collected: it took a fifth of the time of their imports
WRITES_NO_BYTECODE = sys.dont_write_bytecode
# Until then, whatever the environment says: to rewrite the asserts of tests takes a quarter of the collection,
# and each interpreter that a test starts would compile our modules.
sys.dont_write_bytecode = False
# At Python's own thresholds, collections took a fourteenth of the time of runs in a process.
gc.set_threshold(10_000, 20, 10)

RAY_FIXTURES = {"ray_session", "ray_of_new_interpreters"}
RAY_FILES: set[Path] = set()
"""Files with a test that uses this process's Ray session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    long_tests.add_options(parser)
    parser.addoption(
        "--whole",
        action="store_true",
        help="run every case of tests that draw some of theirs",
    )
    parser.addoption(
        "--draw", default=None, help="seed of the drawn cases (the commit's hash)"
    )
    parser.addoption(
        "--shuffle", default=None, help="seed of a random order of files, and inside files"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu_seconds)
    if hasattr(config, "workerinput"):
        from tests.shared_server import use_server

        use_server()
        return
    config.pluginmanager.register(long_tests)
    if config.getoption("numprocesses", None):
        from tests.shared_server import start_server

        start_server()


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases of matrices: {'all' if config.getoption('--whole') else f'drawn, --draw {draw_seed(config)}'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what was left out: the header, which names the draw, is not shown with -q."""
    if terminalreporter.config.getoption("--draw-long"):
        seed = draw_seed(terminalreporter.config)
        terminalreporter.write_line(
            f"of {len(long_tests.read_list())} long tests a sixth, drawn by --draw {seed}; "
            "`make test LONG=` runs them all"
        )


def draw_seed(config: pytest.Config) -> str:
    """The same commit draws the same cases, and the next one others."""
    return config.getoption("--draw") or commit()


@functools.cache
def commit() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    folder = Path(__file__).parent
    return (
        subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
        or "none"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what lasts longest, then with the files that share a Ray session, so that each process
    starts one.
    """
    if not config.getoption("--whole"):
        leave_cases_to_slow(items, draw_seed(config))
        leave_runs_to_slow(items, draw_seed(config))
        if config.getoption("--draw-long"):
            long_tests.leave_long_to_slow(items, long_tests.read_list(), draw_seed(config))
    RAY_FILES.update(item.path for item in items if uses_ray_session(item))
    if config.getoption("--shuffle"):
        shuffle_items(items, config.getoption("--shuffle"))
        return
    items.sort(
        key=lambda item: (not item.nodeid.startswith(LONG), item.path not in RAY_FILES)
    )


def shuffle_items(items: list[pytest.Item], seed: str) -> None:
    """Put files in a random order, and the tests of each file, so that no test can depend on another."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = list(files.values())
    generator = random.Random(seed)
    generator.shuffle(shuffled)
    for tests in shuffled:
        generator.shuffle(tests)
    items[:] = [item for tests in shuffled for item in tests]


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections, and users' code without bytecode."""
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = WRITES_NO_BYTECODE


def uses_ray_session(item: pytest.Item) -> bool:
    return not RAY_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the shared Ray before a file that does not use it: many tests are about a process without one."""
    if item.path not in RAY_FILES:
        end_ray_session()


def pytest_sessionfinish() -> None:
    end_ray_session()


def end_ray_session() -> None:
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()


def leave_cases_to_slow(items: list[pytest.Item], seed: str) -> None:
    """Mark as slow all cases of a test with `drawn(count, always=ids)` but those, and `count` drawn for each
    commit. With covers=True, more if each value of each parameter needs them.
    """
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") and not item.get_closest_marker("slow"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in matrices.items():
        marker = cases[0].get_closest_marker("drawn")
        assert marker is not None
        fixed = {f"{name}[{case}]" for case in marker.kwargs.get("always", ())}
        others = [item for item in cases if item.nodeid not in fixed]
        generator = random.Random(f"{seed} {name}")
        count = min(marker.args[0], len(others))
        if marker.kwargs.get("covers"):
            kept = cover_values(others, count, generator)
        else:
            kept = generator.sample(others, count)
        for item in others:
            if item not in kept:
                item.add_marker("slow")


def cover_values(
    cases: list[pytest.Item], count: int, generator: random.Random
) -> list[pytest.Item]:
    """Draw at least `count` cases, so that each value of each parameter is in one of them."""
    shuffled = generator.sample(cases, len(cases))
    unseen = set().union(*map(parameter_values, shuffled))
    chosen: list[pytest.Item] = []
    while unseen:
        # The first of those with the most new values.
        case = max(shuffled, key=lambda item: len(parameter_values(item) & unseen))
        chosen.append(case)
        unseen -= parameter_values(case)
    others = [item for item in shuffled if item not in chosen]
    return chosen + others[: max(0, count - len(chosen))]


def parameter_values(item: pytest.Item) -> set[tuple[str, str]]:
    """Return parameters with their values. Texts of values are equal or not alike in all processes."""
    parameters = getattr(item, "callspec").params  # noqa: B009  of functions alone
    return {(name, repr(value)) for name, value in parameters.items()}


def leave_runs_to_slow(items: list[pytest.Item], seed: str) -> None:
    """Mark the files of whole runs as slow, but those that always run and a few that are drawn for each
    commit.
    """
    runs = [
        item
        for item in items
        if "end_to_end" in item.path.parts and not item.get_closest_marker("slow")
    ]
    files = sorted({item.path.stem for item in runs} - set(RUNS_ALWAYS))
    kept = random.Random(f"{seed} whole runs").sample(files, min(RUNS_DRAWN, len(files)))
    for item in runs:
        if item.path.stem not in (*RUNS_ALWAYS, *kept):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def one_torch_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a worker that runs inside the test's process at one thread: its ranks set the count for the whole
    process.

    Two threads per process on two cores made a case of tests/controller/offline take 29.5 CPU s, and 2.7 with
    one.
    """
    if "torch" in sys.modules:
        # A first test may have imported it and let a rank set the count.
        sys.modules["torch"].set_num_threads(1)
        monkeypatch.setattr(sys.modules["torch"], "set_num_threads", lambda count: None)


@pytest.fixture(autouse=True)
def trials_are_forks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork trials of users' code, except in tests of processes themselves and in whole runs.

    See tests/trial_processes.py.
    """
    if "workers.user_code.process" in sys.modules and not request.node.nodeid.startswith(
        REAL_TRIALS
    ):
        from tests.trial_processes import fork_trials

        fork_trials(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def fork_servers_stay() -> Iterator[None]:
    """Name the file whose tests end the servers of forks, which later files need."""
    from tests.fork_guard import find_ended, server_ids

    started = server_ids()
    yield
    assert find_ended(started) == [], "a test of this file ended a server of forks"


@pytest.fixture(scope="module", autouse=True)
def variables_end() -> Iterator[None]:
    """Give later files the environment that this one had: ranks and engines in this process set it for their own.

    Where a rank's variables are left, TRL's trainer waits for a group that is gone, for ever. Where an engine's are,
    torch.compile does nothing.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before:
        del os.environ[name]
    # Not all of them: a library that reads one while another thread sets one may crash the process.
    os.environ.update(before.items() - os.environ.items())


@pytest.fixture(scope="module", autouse=True)
def process_groups_end() -> Iterator[None]:
    """With their stores: a module's tests leave hundreds of threads otherwise, each waking a hundred
    times a second.
    """
    yield
    if "workers.roles.base" in sys.modules:
        sys.modules["workers.roles.base"]._meeting_point.cache_clear()
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        from tests.workers.model.ranks import end_process_groups

        end_process_groups()
        gc.collect()  # engines in cycles keep their groups


@pytest.fixture(scope="module")
def ray_session() -> None:
    """A local Ray for all files in a row whose tests need actors, which are forks: see tests/fork_server.py."""
    import ray

    from tests.fork_server import fork_workers

    if ray.is_initialized():
        return
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        start_ray()


@pytest.fixture(scope="module")
def ray_of_new_interpreters() -> Iterator[None]:
    """A local Ray of one file, with actors as users have them."""
    end_ray_session()
    start_ray()
    yield
    end_ray_session()


def start_ray() -> None:
    """Start a Ray of 8 logical CPUs, without its processes for dashboards, logs and autoscaling: 4 CPU seconds."""
    import ray
    from ray._private.node import Node

    reports = {"metrics_report_interval_ms": 1000}  # the shortest; tests wait for reports
    # The first fork waits for the server's imports.
    patience = {"worker_register_timeout_seconds": 300}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "start_monitor", lambda node: None)
        patch.setattr(Node, "start_log_monitor", lambda node: None)
        patch.setattr(Node, "start_api_server", lambda node, **_: None)
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=2 * 2**30,
            _system_config=reports | patience,
        )


@pytest.fixture
def documentation_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which the commands of the documentation and of examples/launch can be
    dry-run.
    """
    from tests.documentation.workspace import write_documentation_workspace

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    # The hub's models are zeros here.
    monkeypatch.setattr("controller.lifecycle.model_checks.MOST_BYTES", 2**28)
    write_documentation_workspace(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def stand_in_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the configurations of runs on stand-ins name; shared, so that no test changes it."""
    from tests.controller.stand_ins.run import write_stand_in_workspace

    path = tmp_path_factory.mktemp("stand-ins")
    write_stand_in_workspace(path)
    return path


@pytest.fixture
def stand_ins(stand_in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> "StandIns":
    """In their places until the test ends."""
    from tests.controller.stand_ins.run import StandIns

    monkeypatch.chdir(stand_in_folder)
    return StandIns(monkeypatch)


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family of tests/workers/vision_families.py: its folder, built once, for all tests."""
    from tests.workers.vision_families import save_tiny_vision_model

    return functools.cache(
        lambda family: save_tiny_vision_model(family, tmp_path_factory.mktemp(family))
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankPool"]:
    """Up to four gloo ranks that run functions: `ranks.run(function, 2, *arguments)`."""
    from tests.workers.model.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.stop()
