"""The sandbox of examples/code: every claim of docs/security.md about it is broken here, and must hold."""

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller import fit
from examples.tools.data import write
from examples.tools.warm_start import create

ROOT = Path(__file__).parents[2]
TRIAL = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "true"]


def starts() -> bool:
    try:
        return subprocess.run(TRIAL, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not starts(), reason="needs bubblewrap 0.8 and user namespaces")


@pytest.fixture(scope="module")
def tools() -> Any:
    return import_module("examples.code.tools")


def left(marker: str) -> list[int]:
    """Processes with that text among their arguments, after the kernel had a moment to end them."""
    time.sleep(0.3)
    return [each.pid for each in psutil.process_iter(["cmdline"]) if marker in (each.info["cmdline"] or [])]


def test_a_program_runs_and_its_end_is_told(tools: Any) -> None:
    assert tools.python("print(73+95)\nopen('x', 'w').write('kept')") == "168"
    assert tools.python("import os\nprint(os.listdir('.'), os.getcwd())") == "[] /box"
    assert tools.python("print('a')\nraise SystemExit(3)") == "a\n[exit code 3]"
    assert tools.python("1/0").splitlines()[-2:] == ["ZeroDivisionError: division by zero", "[exit code 1]"]
    assert tools.python("#" * 70_000).startswith("[not run")
    assert tools.python("print('\\ud800'.encode('utf8', 'surrogatepass'))") == r"b'\xed\xa0\x80'"


@pytest.fixture
def listeners() -> Iterator[list[tuple[int, Any]]]:
    """Servers of this machine: TCP on loopback, and a socket without a file."""
    name = f"\0ballast-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        yield [(socket.AF_INET, tcp.getsockname()), (socket.AF_UNIX, name)]


def test_the_network_is_not_reachable(tools: Any, listeners: list[tuple[int, Any]]) -> None:
    """Nor a service of the same machine, nor a virtual machine's host, nor names."""
    for family, address in listeners:
        with socket.socket(family) as reachable:
            reachable.connect(address)
        code = f"import socket\nsocket.socket({int(family)}).connect({address!r})"
        assert tools.python(code).splitlines()[-2].split(":")[0] in (
            "PermissionError",
            "ConnectionRefusedError",
        )
    for attempt in (
        "socket.socket(40, 1)",
        "socket.socket(16, 3)",
        "socket.create_connection(('example.com', 80))",
    ):
        assert tools.python(f"import socket\n{attempt}").endswith("[exit code 1]")


ATTEMPTS = {
    "reads a secret": "print(open({secret!r}).read())",
    "reads by a link": "import os; os.symlink({secret!r}, 'link'); print(open('link').read())",
    "reads by the way up": "print(open('../' * 9 + {secret!r}).read())",
    "lists the home": "import os; print(os.listdir({home!r}))",
    "reads the users": "print(open('/etc/passwd').read())",
    "reads this process": "print(open('/proc/{pid}/environ').read())",
    "reads its parent": "import os; print(open(f'/proc/{{os.getppid()}}/environ').read())",
    "signals this process": "import os; os.kill({pid}, 0)",
    "writes into /usr": "open('/usr/written', 'w')",
    "writes into Python": "open('/python/written', 'w')",
    "writes into the root": "open('/written', 'w')",
    "writes into /dev": "open('/dev/written', 'w')",
    "writes into /tmp": "open('/tmp/written', 'w')",
    "makes a link from /usr": "import os; os.link('/usr/bin/env', 'env')",
    "makes namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "mounts": "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/box', b'tmpfs', 0, None): raise OSError",
    "becomes root": "import os; os.setuid(0)",
    "raises a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "takes memory": "print(len(bytearray(2**28)))",
    "takes memory in files": "open('x', 'wb').write(bytes(2**20 * 65))",
    "takes many files": "held = [open('/dev/null') for _ in range(99)]",
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=list(ATTEMPTS))
def test_files_processes_and_memory_of_the_machine_are_out_of_reach(
    tools: Any, tmp_path: Path, attempt: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for folder in [tmp_path, *tmp_path.parents[:3]]:
        folder.chmod(0o755)  # it is not the modes that hide it
    said = tools.python(attempt.format(secret=str(secret), home=str(Path.home()), pid=os.getpid()))
    assert said.endswith("[exit code 1]") and "hunter2" not in said
    assert any(f"{kind}" in said for kind in ("Error", "MemoryError"))


def test_no_variable_of_the_environment_is_seen(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    assert tools.python("import os\nprint(*sorted(os.environ))") == "HOME LANG PATH PWD"


CALLS = {"memfd_create": (319, 279), "shmget": (29, 194), "ptrace": (101, 117), "keyctl": (250, 219)}
NEW_CALLS = {"io_uring_setup": 425, "memfd_secret": 447, "open_tree": 428}


def test_calls_that_hold_memory_or_reach_into_the_kernel_are_refused(tools: Any) -> None:
    column = ["x86_64", "aarch64"].index(platform.machine())
    for number, error in [
        *((each[column], 13) for each in CALLS.values()),
        *((each, 38) for each in NEW_CALLS.values()),
    ]:
        code = (
            f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall({number}, 0, 0, 0, 0, 0)"
        )
        assert tools.python(f"{code}\nprint(ctypes.get_errno())") == str(error)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another machine has no second table of calls")
def test_the_32_bit_table_of_calls_ends_the_program(tools: Any) -> None:
    """`int 0x80` would go by numbers that the filter does not know."""
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    assert tools.python(code) == f"[exit code {128 + signal.SIGSYS}]"


def test_time_output_and_processes_end(tools: Any) -> None:
    start = time.monotonic()
    assert tools.run("print(1)", seconds=0.0).endswith(
        "[stopped: took more than 0 s]"
    )  # perhaps before it started
    assert tools.run("while True: pass", seconds=0.5) == "[stopped: took more than 0.5 s]"
    assert tools.run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)", seconds=0.5).startswith(
        "[stopped"
    )
    said = tools.python("while True: print('x' * 10**6)")
    assert len(said) < 2**16 + 99 and said.endswith("[stopped: printed more than 65,536 bytes]")
    assert time.monotonic() - start < 20
    fork = "import os, time\nstarted = 1\ntry:\n    while True:\n        if not os.fork():\n            "
    count = f"{fork}time.sleep(60)\n        started += 1\nexcept OSError:\n    print(started)"
    assert tools.python(count) == str(tools.PROCESSES)
    assert "stopped" in tools.run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass", 1
    )


def test_a_program_can_be_stopped_at_any_moment_of_its_start(tools: Any) -> None:
    """Killed alone, bubblewrap's outer process left an inner one that held the output open for ever."""
    for delay in range(30):
        tools.run("print(1)", seconds=delay / 1500)
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "bwrap"]


LEAVES = (
    "import os\nif not os.fork():\n    os.setsid()\n"
    "    {closed}os.execv('/usr/bin/env', ['env', 'sleep', '{mark}'])\n"
)


@pytest.mark.parametrize("closed", ["", "os.closerange(0, 3)\n    "], ids=["open", "closed"])
def test_no_process_outlives_its_program(tools: Any, closed: str) -> None:
    start, mark = time.monotonic(), f"98765.{os.getpid()}"
    assert (
        tools.python(LEAVES.format(closed=closed, mark=mark) + "import time; time.sleep(0.3); print('end')")
        == "end"
    )
    assert not left(mark) and time.monotonic() - start < 4


def test_a_program_ends_with_the_process_that_called_the_tool(tools: Any) -> None:
    """As when `reward.timeout_s` passes, or the run is stopped."""
    mark = f"98766.{os.getpid()}"
    code = LEAVES.format(closed="", mark=mark) + "import time; time.sleep(60)"
    caller = subprocess.Popen(
        [sys.executable, "-c", f"from examples.code import tools; tools.run({code!r}, 60)"], cwd=ROOT
    )
    until = time.monotonic() + 30
    while not left(mark):
        assert time.monotonic() < until
    caller.kill()
    caller.wait()
    assert not left(mark)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_holds_for_a_user_who_is_not_root(tools: Any) -> None:
    source = Path(tools.__file__).read_text() + "print(run('import os; print(os.getuid())'))"
    user: dict[str, Any] = {"user": 12345, "group": 12345, "extra_groups": []}
    said = subprocess.run(["/usr/bin/python3", "-c", source], cwd="/", capture_output=True, text=True, **user)
    assert (said.stdout, said.returncode) == ("1000\n", 0), said.stderr


LESS_STRICT = """
for word; do
    shift
    if [ "$word" = OPTION ]; then skip=1; elif [ -n "$skip" ]; then skip=; else set -- "$@" "$word"; fi
done
exec BWRAP "$@"
"""
FAKES = {
    "no sandbox": 'while [ "${1#/python/}" = "$1" ]; do shift; done; shift; exec /usr/bin/python3 "$@"',
    "no filter of calls": LESS_STRICT.replace("OPTION", "--seccomp"),
    "refused by the kernel": "echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
}


@pytest.mark.parametrize("fake", FAKES.values(), ids=list(FAKES))
def test_a_sandbox_that_does_not_hold_is_refused(fake: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = Path(folder, "bwrap")
        program.write_text(f"#!/bin/sh\n{fake.replace('BWRAP', str(shutil.which('bwrap')))}\n")
        program.chmod(0o755)
        environment = os.environ | {"PATH": f"{folder}:/usr/bin:/bin"}
        command = [sys.executable, "-c", "import examples.code.tools"]
        said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert said.returncode == 1 and "SandboxError: the sandbox" in said.stderr


def test_a_node_without_a_sandbox_fails_each_call(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run started elsewhere, and sent the tool there."""
    with monkeypatch.context() as node:
        node.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(tools.SandboxError):
            tools.python("print(1)")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(tools.SandboxError):
        tools.python("print(1)")


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    create(tmp_path / "model", import_module("examples.code.warm_start").conversation)
    for name, held_out in (("train", False), ("validation", True)):
        write(tmp_path / f"{name}.jsonl", 300, seed=0, held_out=held_out)
    files = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "validation")]
    return [
        "--config",
        "examples/code/config.yaml",
        f"run.dir={tmp_path}",
        f"model.path={tmp_path / 'model'}",
        *files,
    ]


def test_its_configuration_is_valid(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main([*settings, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "tools python" in told and '"name": "python"' in told


def test_without_bubblewrap_nothing_starts(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fit.main(settings) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollout.tools" in line and "bwrap is not installed" in line
    assert not (tmp_path / "runs").exists()
