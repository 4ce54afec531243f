"""Lock a run's folder for one process, from before anything starts until the run or its process ends.

    mkdir runs/NAME --> lock runs/NAME/.lock --> the run --> unlock
                                             --> another process has it, or it holds a run: ConfigError,
                                                 or runs/NAME-2, if NAME was not given

A POSIX record lock works on NFS, is not inherited by children, and is released by the kernel even after a
kill.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from controller.config import TrainingConfig
from controller.config.schema import free_name
from controller.observability.run_folder import LOG
from workers.errors import ConfigError

LOCK = ".lock"


def holds_run(folder: Path) -> bool:
    """Whether a run has written more into the folder than a lock and the log of a start that failed."""
    beside = (LOCK, LOG)
    return folder.exists() and (
        not folder.is_dir() or any(path.name not in beside for path in folder.iterdir())
    )


def check_folder_is_free(config: TrainingConfig) -> None:
    """Raise ConfigError if the run's folder holds a run and run.resume is not `auto`."""
    if config.run.resume != "auto" and holds_run(config.run_folder):
        raise ConfigError(
            f"run.name: {config.run_folder} holds a run already. Choose another name, remove it, or resume "
            "it by run.resume=auto."
        )


def lock_run(config: TrainingConfig, start: Callable[[], None]) -> Callable[[], None]:
    """Create and lock the run's folder, and return `start` followed by the release of the lock.

    An unnamed run takes the next free name, in `config`, if its folder was taken meanwhile. An unused folder
    is removed with the lock. Raises ConfigError if another process has the lock, or as
    `check_folder_is_free`.
    """
    lock = _lock_free(config)

    def run() -> None:
        try:
            start()
        finally:
            _release(config.run_folder, lock)

    return run


def _lock_free(config: TrainingConfig) -> TextIO:
    while True:
        lock = None
        try:
            lock = _lock(config.run_folder)
            check_folder_is_free(config)
            return lock
        except ConfigError:
            if lock is not None:
                _release(config.run_folder, lock)
            if not config.default_name:
                raise
            config.run.name = free_name(config.run.dir, config.default_name)


def _lock(folder: Path) -> TextIO:
    while True:
        # Prompts and samples may be confidential.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack, suppress(FileNotFoundError):
            file = stack.enter_context((folder / LOCK).open("a+"))
            _lock_file(file, folder)
            # The run that had the folder may have removed the file since it was opened: then there is another
            # to lock.
            if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                stack.pop_all()
                return file


def _lock_file(file: TextIO, folder: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(
                f"warning: {folder} cannot be locked ({error.strerror}). Start no other run with this "
                "run.name"
            )
            return
        file.seek(0)
        raise ConfigError(
            f"run.name: {folder} is in use by {file.read() or 'another process'}. Choose another name, or "
            "wait until it has ended."
        ) from None


def _release(folder: Path, lock: TextIO) -> None:
    with suppress(OSError):
        (
            folder / LOCK
        ).unlink()  # while it is locked: who opened it meanwhile notices, see `_lock`
    lock.close()
    with suppress(OSError):  # not empty: the run has written
        folder.rmdir()
