"""A Prometheus of its own that scrapes this session's Ray."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRAPE_SECONDS = 1
CONFIG = """\
global: {{scrape_interval: {seconds}s}}
scrape_configs: [{{job_name: ray, static_configs: [{{targets: ["{target}"]}}]}}]
"""


class Prometheus:
    """Answers queries. `url`: of a server that may not be up yet."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._moment: dict[str, float] = {}

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that the expression gives now, or of the moment: `metric` has the labels, `value` time
        and value.

        Raises urllib.error.HTTPError for an expression that is none.
        """
        arguments = urllib.parse.urlencode({"query": expression} | self._moment)
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{arguments}", timeout=30
        ) as response:
            return json.load(response)["data"]["result"]

    def hold(self, expression: str) -> None:
        """Answer from now on of a moment just after the expression first gave something."""
        assert self.wait_for(expression), expression
        time.sleep(2 * SCRAPE_SECONDS)  # the first scrape may have seen half of a report
        self._moment = {"time": time.time()}

    def wait_for(self, expression: str, seconds: float = 60) -> list[dict[str, Any]]:
        """The samples, as soon as there are any; none after so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if found := self.query(expression):
                    return found
            except urllib.error.URLError as error:
                # Else it is not up yet.
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or time.monotonic() + 0.5 > deadline:
                    raise
            time.sleep(0.5)
        return []


@contextmanager
def scraping_ray(folder: Path) -> Iterator[Prometheus | None]:
    """A Prometheus over this process's Ray; its data goes to `folder`. None where there is no binary."""
    import ray

    binary = shutil.which("prometheus")
    if binary is None:
        yield None
        return
    (node,) = ray.nodes()
    config = folder / "prometheus.yml"
    config.write_text(
        CONFIG.format(
            seconds=SCRAPE_SECONDS,
            target=f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}",
        )
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([binary, *options], stdout=log, stderr=log) as server,
    ):
        try:
            yield Prometheus(f"http://{address}")
        finally:
            server.terminate()
