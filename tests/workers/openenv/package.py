"""A package of an environment, as pip installs it without a network: a wheel that borrows this Python's packages.

Its server ends at its start if the file COUNTING_CLOSED exists, or if it cannot import COUNTING_IMPORT: an
installation of four CPU seconds serves all tests.
"""

import sys
import zipfile
from pathlib import Path

PROGRAM = '''
"""Counts, by the protocol of OpenEnv's servers, without its package: that requires another mcp."""

import json
import os
import sys

if os.path.exists(os.environ.get("COUNTING_CLOSED", "")):
    raise SystemExit("it is closed")
__import__(os.environ.get("COUNTING_IMPORT", "os"))
ACTION = {"title": "CountAction", "properties": {"by": {"type": "integer"}}}
PAGES = {
    "/health": {"status": "healthy"},
    "/schema": {"action": ACTION},
    "/metadata": {"description": "Count above ten."},
}


async def app(scope, receive, send):
    if scope["type"] == "http":
        body = json.dumps(PAGES[scope["path"]]).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await play(receive, send)


async def play(receive, send):
    total = 0
    while (event := await receive())["type"] == "websocket.receive":
        message = json.loads(event["text"])
        data = message.get("data") or {}
        if message["type"] == "close":
            return
        if data.get("by") == 13:
            print("the 13th floor is missing", file=sys.stderr)
            os._exit(3)
        total += data.get("by", 0)
        observation = {"total": total, "pid": os.getpid()}
        answer = {"observation": observation, "reward": float(data.get("by", 0)), "done": total > 10}
        await send({"type": "websocket.send", "text": json.dumps({"type": "observation", "data": answer})})


def main():
    raise SystemExit("it serves on port 8000, whatever it is asked")
'''
SCRIPT = "[console_scripts]\nserver = counting_env.app:main\n"


def write_wheel(folder: Path, program: str = PROGRAM, scripts: str = SCRIPT) -> Path:
    """Write a wheel of the package counting_env, whose server is `program`."""
    facts = "counting_env-1.0.dist-info"
    files = {
        "counting_env/__init__.py": "",
        "counting_env/app.py": program,
        "borrowed.pth": "".join(
            f"{path}\n" for path in sys.path if "site-packages" in path
        ),
        f"{facts}/METADATA": "Metadata-Version: 2.1\nName: counting-env\nVersion: 1.0\n",
        f"{facts}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{facts}/entry_points.txt": scripts,
    }
    files[f"{facts}/RECORD"] = "".join(f"{name},,\n" for name in files)
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "counting_env-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel
