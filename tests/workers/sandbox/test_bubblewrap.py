"""Every claim of docs/sandboxes.md about bubblewrap is broken here, and must hold."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from tests.end_to_end.processes import living
from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.errors import EpisodeError
from workers.sandbox.bubblewrap import BubblewrapSandbox, find_interpreter
from workers.sandbox.protocol import (
    CommandResult,
    SandboxError,
    SandboxFileError,
    SandboxLabel,
    SandboxLimits,
)

pytestmark = needs_bubblewrap
ROOT = Path(__file__).parents[3]
LIMITS = SandboxLimits(memory_mib=256, processes=8, disk_mib=64, command_s=20)
LABEL = SandboxLabel("tests", "0")


@pytest.fixture(scope="module")
def interpreter() -> str:
    return find_interpreter()


@contextmanager
def open_box(
    interpreter: str, limits: SandboxLimits = LIMITS
) -> Iterator[BubblewrapSandbox]:
    with BubblewrapSandbox(limits, LABEL, interpreter=interpreter) as sandbox:
        yield sandbox


@pytest.fixture
def box(interpreter: str) -> Iterator[BubblewrapSandbox]:
    with open_box(interpreter) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def shared_box(interpreter: str) -> Iterator[BubblewrapSandbox]:
    with open_box(interpreter) as sandbox:
        yield sandbox


def run_python(box: BubblewrapSandbox, code: str, **options: Any) -> CommandResult:
    return box.run([box.python, "-I", "-c", code], **options)


def marked(marker: str) -> list[int]:
    """Processes with that text among their arguments."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if marker in (process.info["cmdline"] or [])
    ]


def test_files_and_processes_stay_until_the_end(box: BubblewrapSandbox) -> None:
    assert box.run("cat > a; sleep 100 & echo $!", stdin=b"\0text").exit_code == 0
    result = box.run("cat a; pwd", folder="/box")
    assert (result.output, result.exit_code, result.cut, result.timed_out) == (
        b"\0text/box\n",
        0,
        False,
        False,
    )
    assert box.run("exit 3").exit_code == 3
    assert box.run("kill -9 $$").exit_code == 137
    assert box.run(["nowhere"]).exit_code == 127
    assert box.run("true", folder="/nowhere").exit_code == 126
    assert box.run("echo $A", variables={"A": "b c"}).text == "b c\n"


@pytest.mark.parametrize(
    "content", [b"", bytes(range(256)), os.urandom(2**20) * 20], ids=["no", "few", "many"]
)
def test_a_file_comes_back_as_it_was_written(
    shared_box: BubblewrapSandbox, content: bytes
) -> None:
    shared_box.write("deep/er/file", content)
    assert shared_box.read("/box/deep/er/file") == content
    shared_box.write("/tests/test.sh", content)
    assert shared_box.run("cat /tests/test.sh | wc -c").text == f"{len(content)}\n"


NO_FILES = {
    "missing": ("true", "/box/missing"),
    "folder": ("true", "/box"),
    "pipe": ("mkfifo pipe", "pipe"),
    "larger than the disk": ("truncate -s 1T sparse", "sparse"),
    "device": ("true", "/dev/zero"),
    "not readable": ("echo x > secret; chmod 0 secret", "secret"),
}


@pytest.mark.parametrize(("command", "path"), NO_FILES.values(), ids=list(NO_FILES))
def test_what_cannot_be_read_is_named_and_the_sandbox_goes_on(
    box: BubblewrapSandbox, command: str, path: str
) -> None:
    assert box.run(command).exit_code == 0
    with pytest.raises(SandboxFileError, match=Path(path).name):
        box.read(path)
    assert box.run("echo on").text == "on\n"


def test_a_full_disk_refuses_writes_and_the_sandbox_goes_on(box: BubblewrapSandbox) -> None:
    for path in ("/box/large", "/large", "/tmp/large", "/usr/large", "/dev/null/large"):
        with pytest.raises(SandboxFileError, match="large"):
            box.write(path, bytes(2**20 * 65))
        assert box.run("rm -f /box/large /large /tmp/large; echo on").text == "on\n"
    assert "No space" in box.run("head -c 70000000 /dev/zero > x").text


@pytest.fixture
def listeners() -> Iterator[list[tuple[int, Any]]]:
    """Servers of this machine: TCP on loopback, and a socket without a file."""
    name = f"\0ballast-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        local.bind(name)
        local.listen()
        yield [(socket.AF_INET, tcp.getsockname()), (socket.AF_UNIX, name)]


def test_the_network_is_not_reachable(
    shared_box: BubblewrapSandbox, listeners: list[tuple[int, Any]]
) -> None:
    """Nor a service of the same machine, nor a virtual machine's host, nor names."""
    for family, address in listeners:
        with socket.socket(family) as reachable:
            reachable.connect(address)
        result = run_python(
            shared_box, f"import socket\nsocket.socket({int(family)}).connect({address!r})"
        )
        assert result.text.splitlines()[-1].split(":")[0] in (
            "PermissionError",
            "ConnectionRefusedError",
        )
    for attempt in (
        "socket.socket(40, 1)",
        "socket.socket(16, 3)",
        "socket.create_connection(('example.com', 80))",
    ):
        assert run_python(shared_box, f"import socket\n{attempt}").exit_code == 1


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
    "makes a link from /usr": "import os; os.link('/usr/bin/env', 'env')",
    "makes namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "mounts": "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/box', b'tmpfs', 0, None): raise OSError",
    "becomes root": "import os; os.setuid(0)",
    "raises a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "takes cores": "import os; os.sched_setaffinity(0, range(os.cpu_count()))",
    "takes memory": "print(len(bytearray(2**28)))",
    "takes memory in files": "open('x', 'wb').write(bytes(2**20 * 65))",
    "takes memory in /tmp": "open('/tmp/x', 'wb').write(bytes(2**20 * 65))",
    "takes memory in the root": "open('/x', 'wb').write(bytes(2**20 * 65))",
    "takes many files": "files = [open('/dev/null') for _ in range(1100)]",
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=list(ATTEMPTS))
def test_files_processes_and_memory_of_the_machine_are_out_of_reach(
    box: BubblewrapSandbox, tmp_path: Path, attempt: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for folder in [tmp_path, *tmp_path.parents[:3]]:
        folder.chmod(0o755)  # it is not the modes that hide it
    code = attempt.format(secret=str(secret), home=str(Path.home()), pid=os.getpid())
    result = run_python(box, code)
    assert result.exit_code == 1 and "hunter2" not in result.text and "Error" in result.text


def test_the_sandboxes_of_two_samples_do_not_see_each_other(interpreter: str) -> None:
    def live(number: int) -> tuple[str, str]:
        with open_box(interpreter) as sandbox:
            sandbox.run(
                f"sleep 100 & echo {number} > /tmp/mine; mkdir folder-{number}; sleep 0.2"
            )
            killed = sandbox.run("kill -9 -1; kill -0 1 && echo alive").text
            return sandbox.run("cat /tmp/mine; ls").text, killed

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(live, range(4)))
    assert [text for text, _ in outcomes] == [
        f"{number}\nfolder-{number}\n" for number in range(4)
    ]


def test_no_variable_of_the_environment_is_seen(
    shared_box: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    assert (
        run_python(shared_box, "import os\nprint(*sorted(os.environ))").text
        == "HOME LANG PATH PWD\n"
    )


CALLS = {
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "ptrace": (101, 117),
    "keyctl": (250, 219),
}
NEW_CALLS = {"io_uring_setup": 425, "memfd_secret": 447, "open_tree": 428}


def test_calls_that_hold_memory_or_reach_into_the_kernel_are_refused(
    shared_box: BubblewrapSandbox,
) -> None:
    column = ["x86_64", "aarch64"].index(platform.machine())
    errors = {numbers[column]: 13 for numbers in CALLS.values()}
    errors |= dict.fromkeys(NEW_CALLS.values(), 38)
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for number in errors:
        code += f"libc.syscall({number}, 0, 0, 0, 0, 0)\nprint(ctypes.get_errno())\n"
    assert run_python(shared_box, code).text.split() == list(map(str, errors.values()))


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="another machine has no second table of calls"
)
def test_the_32_bit_table_of_calls_ends_the_program(shared_box: BubblewrapSandbox) -> None:
    """`int 0x80` would go by numbers that the filter does not know."""
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    assert run_python(shared_box, code).exit_code == 128 + signal.SIGSYS


def test_time_output_and_processes_are_limited(box: BubblewrapSandbox) -> None:
    hidden = "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)"
    for code in ("while True: pass", hidden, "while True: print('x' * 10**6)"):
        result = run_python(box, code, timeout_s=0.5)
        assert result.timed_out and result.exit_code == 137
    assert len(result.output) == LIMITS.output_bytes and result.cut
    fork = "import os, time\nstarted = 1\ntry:\n    while True:\n        if not os.fork():\n            "
    count = (
        f"{fork}time.sleep(60)\n        started += 1\nexcept OSError:\n    print(started)"
    )
    assert run_python(box, count).text == f"{LIMITS.processes}\n"
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass"
    assert run_python(box, bomb, timeout_s=0.5).timed_out
    assert box.run("echo on").text == "on\n", (
        "a command that took too long takes all processes with it"
    )


@pytest.mark.parametrize(
    ("cpus", "cores"), [(0.3, 1), (1.0, 1), (1000.0, len(os.sched_getaffinity(0)))]
)
def test_commands_have_whole_cores(interpreter: str, cpus: float, cores: int) -> None:
    before = os.sched_getaffinity(0)
    with open_box(interpreter, replace(LIMITS, cpus=cpus)) as sandbox:
        code = "import os\nprint(len(os.sched_getaffinity(0)))"
        assert run_python(sandbox, code).text == f"{cores}\n"
    assert os.sched_getaffinity(0) == before


def test_the_memory_of_all_processes_together_is_limited(box: BubblewrapSandbox) -> None:
    grow = "import os, time\nfor _ in range(3): os.fork()\nheld = bytearray(os.urandom(2**20) * 100)\ntime.sleep(9)"
    result = run_python(box, grow)
    assert result.exit_code == 137 and not result.timed_out
    assert box.run("echo on").text == "on\n"


def test_a_sandbox_can_be_stopped_at_any_moment_of_its_start(interpreter: str) -> None:
    """Killed alone, bubblewrap's outer process left an inner one that held the output open for ever."""
    for delay in range(12):
        sandbox = BubblewrapSandbox(LIMITS, LABEL, interpreter=interpreter)
        stopper = Thread(target=lambda s=sandbox, d=delay: (time.sleep(d / 600), s.stop()))
        stopper.start()
        with suppress(SandboxError):
            sandbox.start()
        stopper.join()
        sandbox.stop()
    children = psutil.Process().children(recursive=True)
    assert not [
        child
        for child in children
        if child.name() == "bwrap" and str(LIMITS.disk_mib) in child.cmdline()
    ]


DETACHED = "setsid env sleep {mark} > /dev/null 2>&1 < /dev/null & setsid env sleep {mark} & sleep 0.1"


def test_no_process_outlives_its_sandbox(interpreter: str) -> None:
    mark = f"98765.{os.getpid()}"
    with open_box(interpreter) as sandbox:
        assert sandbox.run(DETACHED.format(mark=mark)).exit_code == 0
        pids = marked(mark)
        assert len(pids) == 2
    assert living(pids, seconds=10) == []
    with pytest.raises(SandboxError, match="stopped"):
        sandbox.run("true")


def test_a_lost_sandbox_fails_its_sample(interpreter: str) -> None:
    """As an environment's failure, which reward.on_failure scores."""
    with open_box(interpreter) as sandbox:
        assert sandbox._process is not None
        killer = Thread(target=lambda: (time.sleep(0.2), sandbox._process.kill()))  # type: ignore[union-attr]
        killer.start()
        with pytest.raises(EpisodeError, match="the sandbox ended"):
            sandbox.run("sleep 10")
        killer.join()
        with pytest.raises(SandboxError):
            sandbox.read("/box/a")


OWNER = """
from workers.sandbox.bubblewrap import BubblewrapSandbox
from workers.sandbox.protocol import SandboxLabel, SandboxLimits
with BubblewrapSandbox(SandboxLimits(), SandboxLabel("tests", "0"), interpreter={interpreter!r}) as sandbox:
    sandbox.run({command!r})
"""


def test_a_killed_owner_leaves_nothing(interpreter: str) -> None:
    mark = f"98766.{os.getpid()}"
    code = OWNER.format(
        interpreter=interpreter, command=DETACHED.format(mark=mark) + "; sleep 60"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    until = time.monotonic() + 30
    while len(pids := marked(mark)) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)
    owner.kill()
    owner.wait()
    assert living(pids, seconds=10) == []


LESS_STRICT = """
for word; do
    shift
    if [ "$word" = OPTION ]; then skip=1; elif [ -n "$skip" ]; then skip=; else set -- "$@" "$word"; fi
done
exec BWRAP "$@"
"""
FAKES = {
    "no filter of calls": LESS_STRICT.replace("OPTION", "--seccomp"),
    "no limit of the disk": LESS_STRICT.replace("OPTION", "--size"),
    "refused by the kernel": "echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
}


@pytest.mark.parametrize("fake", FAKES.values(), ids=list(FAKES))
def test_a_sandbox_that_does_not_hold_is_refused(
    fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = Path(folder, "bwrap")
        program.write_text(
            f"#!/bin/sh\n{fake.replace('BWRAP', str(shutil.which('bwrap')))}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        with pytest.raises(SandboxError, match=r"the sandbox (lets programs out|ended)"):
            find_interpreter.__wrapped__()


def test_a_machine_without_a_sandbox_says_so(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = BubblewrapSandbox(LIMITS, LABEL, interpreter=interpreter)
    with monkeypatch.context() as node:
        node.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(SandboxError, match="riscv64"):
            sandbox.start()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="not installed"):
        sandbox.start()


def test_commands_reach_the_gateway_alone(
    interpreter: str, listeners: list[tuple[int, Any]]
) -> None:
    (_, other), _ = listeners
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]

        def serve() -> None:
            connection, _ = gateway.accept()
            connection.sendall(connection.recv(99).upper())
            connection.close()

        server = Thread(target=serve)
        server.start()
        options: Any = {"gateway": ("127.0.0.1", port), "interpreter": interpreter}
        with BubblewrapSandbox(LIMITS, LABEL, **options) as sandbox:
            ask = f"import socket\ns = socket.create_connection(('127.0.0.1', {port}))\ns.sendall(b'hello')\n"
            assert run_python(sandbox, ask + "print(s.recv(99))").text == "b'HELLO'\n"
            refused = run_python(
                sandbox, f"import socket\nsocket.create_connection({other!r})"
            )
            assert "ConnectionRefusedError" in refused.text
            assert run_python(sandbox, "import socket\nsocket.socket(40, 1)").exit_code == 1
        server.join()


USER = """
from workers.sandbox.bubblewrap import BubblewrapSandbox, find_interpreter
from workers.sandbox.protocol import SandboxLabel, SandboxLimits
with BubblewrapSandbox(SandboxLimits(), SandboxLabel("tests", "0")) as sandbox:
    print(sandbox.run("id -u").text, end="")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_holds_for_a_user_who_is_not_root() -> None:
    packages = Path(psutil.__file__).parents[1]
    user: dict[str, Any] = {"user": 12345, "group": 12345, "extra_groups": []}
    user["env"] = {"PYTHONPATH": f"{ROOT}:{packages}", "PATH": os.environ["PATH"]}
    said = subprocess.run(
        ["/usr/bin/python3", "-c", USER], cwd="/", capture_output=True, text=True, **user
    )
    assert (said.stdout, said.returncode) == ("1000\n", 0), said.stderr
