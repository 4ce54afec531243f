"""What sandboxes of every kind do: commands, files and limits, and the end of a killed owner's."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.config.sandbox import SandboxConfig
from workers.sandbox.kinds import remove_left_over_sandboxes
from workers.sandbox.protocol import Sandbox, SandboxError, SandboxFileError, SandboxLimits

ROOT = Path(__file__).parents[3]
LIMITS = SandboxLimits(
    cpus=1, memory_mib=2048, disk_mib=2048, command_s=5, output_bytes=1000
)
OWNER_CODE = """
import os, signal
from workers.config.sandbox import SandboxConfig
from workers.sandbox.kinds import open_sandbox
open_sandbox(SandboxConfig(kind={kind!r}), "0").start()
os.kill(os.getpid(), signal.SIGKILL)
"""


def check_commands_and_files(
    make_box: Callable[..., Sandbox], count: Callable[[], int]
) -> None:
    """count: of sandboxes that there are. They cut an output after 1000 bytes."""
    with make_box() as box:
        result = box.run("cat; echo error >&2; exit 3", stdin=b"\0in")
        assert (result.output, result.exit_code) == (b"\0inerror\n", 3)
        printed = box.run("pwd; echo $A", folder="/usr", variables={"A": "b c"})
        assert printed.text == "/usr\nb c\n"
        long = box.run("head -c 5000 /dev/zero")
        assert (long.output, long.cut, long.exit_code) == (bytes(1000), True, 0)
        late = box.run("sleep 30", timeout_s=0.3)
        assert late.timed_out and late.exit_code == 137
        assert not box.run("exit 137").timed_out
        content = bytes(range(256)) * 4096
        box.write("deep/er/it's", content)
        assert box.read("deep/er/it's") == content
        with pytest.raises(SandboxFileError, match="missing"):
            box.read("missing")
        with make_box() as other:
            assert other.run("ls").text == "" and count() == 2
    assert count() == 0
    with pytest.raises(SandboxError, match="stopped"):
        box.run("true")


def kill_owner(kind: str) -> None:
    """Start a sandbox in a process that is killed."""
    code = OWNER_CODE.format(kind=kind)
    owner = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ})
    assert owner.returncode == -signal.SIGKILL


def check_left_over(
    kind: str,
    make_box: Callable[..., Sandbox],
    count: Callable[[], int],
    add_foreign: Callable[[], object],
) -> None:
    """add_foreign: makes a sandbox of another machine."""
    with make_box():  # of a run that lives
        kill_owner(kind)
        assert count() == 2
        add_foreign()
        assert remove_left_over_sandboxes(SandboxConfig(kind=kind)) == 1
        assert count() == 2, "a living run's, and another machine's"
