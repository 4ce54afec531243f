"""`python -m ballast serve --config FILE [--port N] [--api-key-file FILE] [key.sub=value ...]`: see
docs/serve.md.

settings --prepare_run--> OpenRun <--Service-- HTTP on 127.0.0.1 <--Tinker's SDK

Exit codes: see `controller.fit`. 1 after a lost worker: start again, and the run goes on where it was.
"""

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from controller.config import Config, load
from controller.config.sections import RewardConfig, ValidationConfig
from controller.lifecycle.session import exit_code
from workers.errors import ConfigError, clause
from workers.http_limits import uvicorn_config
from workers.network import LOOPBACK

if TYPE_CHECKING:
    from ballast.loop.open_run import OpenRun

PACKAGES = ("tinker", "fastapi", "uvicorn", "zstandard")
KEYS = ("BALLAST_API_KEY", "TINKER_API_KEY")
KEY_PREFIX = "tml-"  # which the SDK demands
GRACE_SECONDS = 2  # for open requests at the end


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_prepare, arguments))


def _prepare(arguments: Sequence[str] | None) -> Callable[[], None]:
    parser = argparse.ArgumentParser(
        "ballast serve", description="Serve Tinker's API over one policy."
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        help="file with settings, or several",
    )
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1 (8000)")
    parser.add_argument("--api-key-file", type=Path, help="file with the clients' key")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"serve: the package {missing[0]} is missing. Install ballast-rl[serve]."
        )
    config = server_settings(load(options.config, options.overrides))
    key = _given_key(options.api_key_file)
    port = _bind(options.port)
    from ballast.loop.start import prepare_run

    return partial(serve, prepare_run(config), port, key)


def server_settings(config: Config) -> Config:
    """Leave out prompts and rewards, which clients have, and resume. Raises ConfigError for what clients
    cannot set.
    """
    if config.policy.optimizer.name != "adamw":
        raise ConfigError(
            f"policy.optimizer.name={config.policy.optimizer.name}: clients set AdamW's. Choose adamw."
        )
    if config.rollout.plays_episodes:
        raise ConfigError(
            "rollout: clients play their episodes. Remove environment, tools and agent."
        )
    config.data.train, config.data.sources, config.data.validation = "", {}, ""
    config.validation, config.reward, config.run.resume = (
        ValidationConfig(),
        RewardConfig(),
        "auto",
    )
    return config


def _given_key(file: Path | None) -> str:
    try:
        key = (
            file.read_text().strip()
            if file
            else next((os.environ[name] for name in KEYS if name in os.environ), "")
        )
    except OSError as error:
        raise ConfigError(
            f"--api-key-file={file}: {error.strerror}. Name a file with the key."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"--api-key-file={file}: not a text. Name a file with the key."
        ) from None
    if (file or key) and not _is_key(key):
        raise ConfigError(
            f"API key: it must be {KEY_PREFIX} and ASCII characters, as the SDK demands. Change it."
        )
    return key


def _bind(port: int) -> socket.socket:
    """Take a port before minutes are spent on models. Raises ConfigError."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port={port}: {getattr(error, 'strerror', error)}. Choose another."
        ) from None
    return listener


def serve(
    start: Callable[[], AbstractContextManager["OpenRun"]], port: socket.socket, key: str
) -> None:
    """Serve until an interrupt. port: bound. Raises as the run, and what stopped the server."""
    import uvicorn

    from ballast.serve.app import make_app
    from ballast.serve.log import CallLog
    from ballast.serve.service import Service

    stopped = list[BaseException]()
    with start() as run:
        folder = run.folder / "serve"

        def stop(error: BaseException) -> None:
            stopped.append(error)
            server.should_exit = True

        service = Service(run, CallLog(folder), stop)
        app = make_app(service, key or _fresh_key(folder))
        settings = {
            "log_level": "warning",
            "access_log": False,
            "timeout_graceful_shutdown": GRACE_SECONDS,
        }
        server = uvicorn.Server(uvicorn_config(app, **settings))
        print(f"serving on http://{LOOPBACK}:{port.getsockname()[1]}", flush=True)
        server.run([port])
    if stopped:
        raise type(stopped[0])(
            f"{clause(stopped[0])}. Start the server again to go on"
        ) from stopped[0]


def _fresh_key(folder: Path) -> str:
    """Return the key of the run's folder, made once, which only this user can read. Raises ConfigError for
    another.
    """
    path = folder / "api-key"
    if not path.exists():
        # A kill between open and write left an empty key.
        unfinished = path.with_suffix(".tmp")
        unfinished.unlink(missing_ok=True)
        with open(
            os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w"
        ) as file:
            file.write(KEY_PREFIX + secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        key = ""
    if not _is_key(key):
        raise ConfigError(
            f"{path}: it holds no key that begins with {KEY_PREFIX}. Remove it, for a new one."
        )
    print(f"the clients' key is in {path}", flush=True)
    return key


def _is_key(key: str) -> bool:
    return (
        key.startswith(KEY_PREFIX)
        and len(key) > len(KEY_PREFIX)
        and key.isascii()
        and key.isprintable()
    )


if __name__ == "__main__":
    sys.exit(main())
