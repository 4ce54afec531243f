"""A Ray that a run starts on its own machine: closed to other users and networks, out of reach of signals to
the run.

ray_folder() -> ray.init(_temp_dir=...), within started_apart()
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path


def ray_folder() -> Path:
    """Return a folder for Ray's sessions, in one that only this user can enter.

    Ray opens its folders to everybody (mode 0777), and again whenever a worker starts: closing them does not
    last.
    """
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray
    folder = Path(base, f"ray-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    # Another user took the name.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir=base))
    folder.chmod(0o700)
    return folder / "ray"


@contextmanager
def started_apart() -> Iterator[None]:
    """Let Ray's processes, started in the block, listen only on 127.0.0.1 and have a session of their own.

    ray.init would take the machine's address. In the run's process group they would get the SIGTERM that
    `timeout` and schedulers send to the whole group, and end before the run could write a checkpoint.
    """
    from ray._private import ray_constants, services

    enable_cluster = ray_constants.ENABLE_RAY_CLUSTER
    popen = services.ConsolePopen
    ray_constants.ENABLE_RAY_CLUSTER = False
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enable_cluster
        services.ConsolePopen = popen
