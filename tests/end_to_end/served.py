"""`ballast serve` in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

KEY = "tml-of-a-test"
START_SECONDS = 300


class Served:
    """A server, which `kill` ends at once with its workers, and `start` starts again. It ends
    with its block.
    """

    def __init__(self, overrides: Sequence[str], folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self._port}", folder / "server.log"
        self._command = [
            sys.executable,
            "-m",
            "ballast.serve.__main__",
            "--port",
            str(self._port),
            *overrides,
        ]
        self.start()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.kill()

    def start(self) -> None:
        environment = os.environ | {"TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(self.log.read_text()[-4000:])
            time.sleep(0.5)

    def _answers(self) -> bool:
        request = urllib.request.Request(
            f"{self.url}/api/v1/healthz", headers={"X-API-Key": KEY}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """As a machine that fails: the driver, its Ray and all workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(timeout=120)
