"""Packages of environments, each installed into a virtual environment of its own.

    openenv:PACKAGE --check_name--> what pip installs: a folder, a wheel, git+URL, a requirement
    PACKAGE --install_package--> ~/.cache/ballast/openenv/KEY/bin/python, once for each machine

An environment's package requires openenv, whose mcp is not vLLM's. So it is never installed beside Ballast.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from workers.errors import LONGEST_QUOTE, ConfigError, quote
from workers.openenv.server import check_url
from workers.user_code.process import end_with_parent

VERSION_CONTROL = ("git+", "hg+", "svn+", "bzr+")  # pip's
NOT_SOURCE = ("build", "__pycache__")  # an installation writes them into the folder
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
COMPLETE = "complete"  # a file in a virtual environment that is


def is_url(name: str) -> bool:
    return name.partition("://")[0] in ("http", "https")


def check_name(name: str) -> None:
    """Raise ConfigError unless it is the URL of a server, or what pip can install."""
    if is_url(name):
        return check_url(name)
    if name.startswith(VERSION_CONTROL) or (name and Path(name).expanduser().exists()):
        return None
    try:
        Requirement(name)
    except InvalidRequirement:
        raise ConfigError(
            f"{quote(name)} is not the URL of a server, a folder here, or a package. Name one, such as "
            "openenv:http://localhost:8000 or openenv:my/environment."
        ) from None


def absolute_name(name: str) -> str:
    """Return the name of a package for processes with other working folders: a path becomes absolute."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name and path.exists() else name


def install_package(name: str) -> Path:
    """Return the Python that has the package, and install it if it is new or changed. Raises ConfigError."""
    folder = _cache_folder() / _fingerprint(name)
    python = folder / "bin" / "python"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            # Freed by the kernel if this process is killed.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                _run([sys.executable, "-m", "venv", str(folder)], name)
                pip = [str(python), "-I", "-m", "pip", "install", "--quiet", "--no-input"]
                _run([*pip, "--disable-pip-version-check", name], name)
                (folder / COMPLETE).touch()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be installed into {folder}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "folder that can be written."
        ) from None
    return python


def foreign_environment() -> dict[str, str]:
    """Return this process's environment variables, without those that lead to our own packages."""
    return {key: value for key, value in os.environ.items() if key not in OURS}


def _cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "ballast" / "openenv"


def _fingerprint(name: str) -> str:
    """Return a key of the package, our Python, and the files of a local package."""
    key = hashlib.sha256(f"{name}\n{sys.version}\n{sys.prefix}".encode())
    path = Path(name)
    if path.is_absolute() and path.exists():
        for file in [path, *sorted(_source_files(path))]:
            facts = file.stat()
            key.update(f"{file}\n{facts.st_size * file.is_file()}\n".encode())
            key.update(str(facts.st_mtime_ns * file.is_file()).encode())
    return key.hexdigest()[:16]


def _source_files(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_SOURCE and not name.startswith(".") and ".egg" not in name
        ]
        yield from (Path(path) / name for name in files)


def _run(command: list[str], name: str) -> None:
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=foreign_environment(),
        text=True,
        errors="replace",
        preexec_fn=end_with_parent,
    )
    if process.returncode:
        raise ConfigError(
            f"{name} cannot be installed: {_root_cause(process.stdout)}. Correct the package, or start its "
            "server yourself and name its URL, openenv:http://HOST:PORT."
        )


def _root_cause(output: str) -> str:
    """Return pip's first error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error: ")]
    words = (errors[:1] or lines[-1:] or ["no output"])[0]
    return words.partition(": ")[2].rstrip(".")[:LONGEST_QUOTE] if errors else words
