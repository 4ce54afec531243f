"""Tools of a sample's sandbox: `rollout.tools=workers.sandbox.tools` with `rollout.sandbox.kind`.

`SandboxToolPool` answers the calls. A file of tools that imports some, and lists them in `__all__`, adds its
own.
"""

from typing import NoReturn

from workers.errors import EpisodeError

__all__ = ["read_file", "shell", "write_file"]


def shell(command: str) -> str:
    """Run a shell command and return what it prints. Files and background processes stay for later commands.

    Args:
        command: The command line.
    """
    _refuse()


def read_file(path: str) -> str:
    """Return the content of a text file.

    Args:
        path: The path of the file.
    """
    _refuse()


def write_file(path: str, content: str) -> str:
    """Write a text file, and the folders above it.

    Args:
        path: The path of the file.
        content: All of its new content.
    """
    _refuse()


def _refuse() -> NoReturn:
    raise EpisodeError("there is no sandbox. Set rollout.sandbox.kind")
