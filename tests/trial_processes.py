"""Trials of users' code in forks of one process that has imported torch and transformers.

    UserProcess --fork_trials--> ForkedProcess --arguments, descriptors--> fork server --> a fork runs `main`
    ask_module  --fork_trials--> run_module ------request, descriptors--> fork server --> a fork runs the module

A new interpreter imports both for 1.5 to 3 CPU seconds, hundreds of times in the tests of runs. The fork server
imports none of our modules, since trials look at which of them users' code brings. `REAL_TRIALS` of conftest starts
real ones.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, forkserver
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest

from controller.config import cached_process
from workers.user_code import process

# Measuring memory starts processes of its own, which need a module that they can import.
MODULES = ("workers.model.memory.weight_counts",)
TRIALS = ("workers.trials:", "workers.math_answers:")
IMPORTED = [
    "numpy",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "jinja2.sandbox",
]
IMPORTED += [
    "transformers.utils.chat_template_utils",
    "transformers.modeling_utils",
    "peft",
    "math_verify",
]
SERVER = forkserver.ForkServer()
SERVER.set_forkserver_preload(IMPORTED)


def connect(descriptors: list[int]) -> tuple[int, int]:
    try:
        return SERVER.connect_to_new_process(descriptors)
    # A test ended the server, and waited for it: `fork_servers_stay` of conftest names its file.
    except ChildProcessError:
        SERVER._forkserver_alive_fd = None
        SERVER._forkserver_pid = None
        return SERVER.connect_to_new_process(descriptors)


class ForkedProcess:
    """What `UserProcess` uses of `subprocess.Popen`."""

    def __init__(
        self, command: list[str], pass_fds: list[int], env: dict[str, str], **_: Any
    ) -> None:
        outputs, output = os.pipe()
        errors, error = os.pipe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", env.get("PYTHONHASHSEED", "0"))
            self._status, request = connect([*pass_fds, output, error])
        os.close(output)
        os.close(error)
        self.stdout = os.fdopen(outputs, "rb")
        self.stderr = os.fdopen(errors, "rb")
        run = (
            partial(run_target, command[-2])
            if command[-2] != "-m"
            else partial(run_as_main, command[-1])
        )
        with os.fdopen(request, "wb") as file:
            file.write(
                ForkingPickler.dumps(
                    {"sys_path": ["", *env["PYTHONPATH"].split(os.pathsep)]}
                )
            )
            file.write(ForkingPickler.dumps(Trial(run, env, os.getcwd())))
        self.pid = forkserver.read_signed(self._status)
        self._exit_code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._exit_code is None:
            if not connection.wait([self._status], timeout):
                raise subprocess.TimeoutExpired("a trial", timeout or 0.0)
            self._exit_code = forkserver.read_signed(self._status)
            os.close(self._status)
        return self._exit_code


class Trial:
    """Call `run` in the fork with the descriptor that came with it, as `multiprocessing` runs a process there."""

    def __init__(
        self, run: Callable[[int], None], environment: dict[str, str], folder: str
    ) -> None:
        self._run = run
        self._environment = environment
        self._folder = folder

    def _bootstrap(self, parent_sentinel: int) -> int:
        descriptor, output, error = forkserver.get_inherited_fds()
        os.setsid()
        os.chdir(self._folder)
        os.environ.clear()
        os.environ.update(self._environment)
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.close(output)
        os.close(error)
        try:
            self._run(descriptor)
        except SystemExit as exit_:
            return (
                exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
            )
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return 0


def run_target(target: str, channel: int) -> None:
    sys.argv = ["-c", target, str(channel)]
    process.main()


def run_as_main(module: str, request: int) -> None:
    sys.stdin = os.fdopen(request)
    runpy.run_module(module, run_name="__main__")


def run_module(
    command: list[str], *, input: str, env: dict[str, str], timeout: float, **options: Any
) -> Any:
    """Do as `subprocess.run`, in a fork for one of MODULES."""
    if command[0] != sys.executable or command[-1] not in MODULES:
        return subprocess.run(command, input=input, env=env, timeout=timeout, **options)
    with tempfile.TemporaryFile("w+") as request:
        request.write(input)
        request.seek(0)
        forked = ForkedProcess(command, pass_fds=[request.fileno()], env=env)
        with forked.stdout, forked.stderr:
            returncode = forked.wait(timeout)
            texts = (stream.read().decode() for stream in (forked.stdout, forked.stderr))
            return subprocess.CompletedProcess(command, returncode, *texts)


def start_process(command: list[str], **options: Any) -> Any:
    is_trial = command[-2].startswith(TRIALS)
    return (ForkedProcess if is_trial else subprocess.Popen)(command, **options)


STARTING = SimpleNamespace(**(vars(subprocess) | {"Popen": start_process}))
ASKING = SimpleNamespace(**(vars(subprocess) | {"run": run_module}))


def fork_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trials be forks until the test ends. Other processes of users' code start as ever."""
    monkeypatch.setattr(process, "subprocess", STARTING)
    monkeypatch.setattr(cached_process, "subprocess", ASKING)
