"""A Chromium without a window and without a network, driven over its DevTools protocol: one start for many
pages.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium or google-chrome on PATH: apt-get install chromium",
)
DESKTOP, TELEPHONE = 1400, 420
START_S = 60
SWITCHES = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--proxy-server=127.0.0.1:9",
    "--remote-debugging-port=0",
)  # fmt: skip

CONTRASTS = """(() => {
  const channels = colour => (colour.match(/[0-9.]+/g) || [0, 0, 0, 0]).map(Number);
  const opaque = colour => channels(colour).length < 4 || channels(colour)[3] > 0;
  const light = colour => {
    const linear = channels(colour).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = linear;
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = text => {
    const at = text.getBoundingClientRect(), x = at.x + at.width / 2, y = at.y + at.height / 2;
    const under = [...text.closest('svg').querySelectorAll('rect')].filter(rect => {
      const box = rect.getBoundingClientRect();
      return !rect.closest('defs') && opaque(getComputedStyle(rect).fill)
        && box.left < x && x < box.right && box.top < y && y < box.bottom;
    });
    if (under.length) return getComputedStyle(under.at(-1)).fill;
    for (let element = text.closest('svg'); element; element = element.parentElement)
      if (opaque(getComputedStyle(element).backgroundColor)) return getComputedStyle(element).backgroundColor;
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('main svg text')].map(text => {
    const [low, high] = [light(getComputedStyle(text).fill), light(ground(text))].sort((a, b) => a - b);
    return [text.textContent.trim(), (high + 0.05) / (low + 0.05)];
  });
})()"""
"""[text, contrast to what it stands on] of every text of the page's drawings, as WCAG 2 defines contrast."""
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which the page is wider than the screen."""


class Browser:
    """One page at a time."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers, self._session = socket, itertools.count(), {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._call("Page.enable")

    def open(self, address: str, *, width: int, dark: bool = False) -> None:
        """Load a page on a screen of that width, with the system's colours."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=address)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int) -> None:
        """The page as it stands on a screen of another width; a narrow one is a telephone's."""
        self._width, mobile = width, width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def value(self, expression: str) -> Any:
        """What JavaScript gives in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path, *, height: float) -> None:
        """Write the top of the page as a PNG."""
        clip = {"x": 0, "y": 0, "width": self._width, "height": height, "scale": 1}
        answer = self._call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(
            json.dumps(
                {"id": number, "method": method, "params": parameters} | self._session
            )
        )
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        return json.loads(self._socket.recv(timeout=START_S))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, a folder that may not be there yet."""
    assert CHROMIUM is not None
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    command = [CHROMIUM, *SWITCHES, *root, f"--user-data-dir={profile}"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            port, path = _address(profile / "DevToolsActivePort", process)
            with connect(
                f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None
            ) as socket:
                yield Browser(socket)
        finally:
            process.kill()


def _address(file: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """The port and the path that Chromium writes once it listens."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if file.is_file() and len(lines := file.read_text().split()) == 2:
            return lines
        time.sleep(0.02)
    raise RuntimeError(f"Chromium did not start: exit code {process.poll()}")
