"""Compile the planner's loops while the roles start: otherwise the first step waits half a minute for them.

no machine code on disk --> [balancing.precompile plans, a process] | launch --> wait for it --> first step
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from balancing.precompile import is_compiled
from workers.user_code.process import end_with_parent


@contextmanager
def compiling_planner() -> Iterator[Callable[[], object]]:
    """Compile what a run's plans need, if no run did before. Yields a function that waits for it.

    A process, because a thread would hold the interpreter's lock, and could not be ended if the start fails.
    If it fails, the first step compiles.
    """
    if is_compiled():
        yield lambda: None
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "balancing.precompile", "plans"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    try:
        yield process.wait
    finally:
        process.kill()
        process.wait()
