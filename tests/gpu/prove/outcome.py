"""Run a part in a process of its own, and judge how it ends."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from tests.gpu.prove.parts import Part, seconds_of

PASSED = "passed"
FAILED = "failed"
LEFT_OUT = "left out"
OUT_OF_TIME = "out of time"

FACTS_FILE = "BALLAST_PROOF_FACTS"
SECONDS = "BALLAST_PROOF_SECONDS"
NOTHING_RAN = 3
"""Exit code of a part that could not try anything. Its last line says why."""
LINE_WIDTH = 300
GRACE_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """reason: why a part did not pass. facts: whatever it measured, also if it failed later."""

    part: str
    title: str
    verdict: str
    seconds: float = 0.0
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def write_facts(**facts: Any) -> None:
    """Save what a part has measured so far. Later calls replace facts of the same name."""
    path = Path(os.environ[FACTS_FILE])
    saved = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(saved | facts))


def missing_of(part: Part, gpus: int) -> str:
    packages = [name for name in part.packages if importlib.util.find_spec(name) is None]
    if packages:
        return f"not installed: {', '.join(packages)}"
    if gpus < part.gpus:
        return f"needs {part.gpus} GPU{'s' if part.gpus > 1 else ''}, {gpus} here"
    return ""


def prove(
    parts: Sequence[Part],
    index: int,
    *,
    seconds_left: float,
    device: str,
    gpus: int,
    folder: Path,
) -> Outcome:
    """Run `parts[index]`, whatever the earlier ones gave."""
    part = parts[index]
    if missing := missing_of(part, gpus):
        return Outcome(part.name, part.title, LEFT_OUT, reason=missing)
    if seconds_left < part.least_s:
        reason = f"{max(0.0, seconds_left):.0f} s are left, and it needs {part.least_s:.0f}"
        return Outcome(part.name, part.title, OUT_OF_TIME, reason=reason)
    later = [candidate for candidate in parts[index:] if not missing_of(candidate, gpus)]
    return run_part(part, seconds_of(later, seconds_left), device, folder)


def run_part(part: Part, seconds: float, device: str, folder: Path) -> Outcome:
    """Run a part for at most `seconds`, and end every process that it started."""
    facts_path = folder / f"{part.name}.json"
    log_path = folder / f"{part.name}.log"
    facts_path.unlink(missing_ok=True)
    environment = os.environ | {
        FACTS_FILE: str(facts_path),
        SECONDS: f"{seconds - GRACE_S:.0f}",
    }
    environment |= {
        "BALLAST_PROOF_DEVICE": device,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    start = monotonic()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", part.module, *part.arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_tree(process.pid)
            process.wait()
    facts = json.loads(facts_path.read_text()) if facts_path.exists() else {}
    verdict, reason = judge(code, last_line(log_path), seconds)
    if verdict == PASSED and "text" not in facts and part.module.endswith("benchmark"):
        facts["text"] = log_path.read_text()
    return Outcome(
        part.name, part.title, verdict, round(monotonic() - start, 1), reason, facts
    )


def judge(code: int | None, line: str, seconds: float) -> tuple[str, str]:
    """Return verdict and reason. code: of the process, None if it did not end in time."""
    if code is None:
        return OUT_OF_TIME, f"ended after {seconds:.0f} s, at: {line}"
    if code < 0:
        return FAILED, f"killed by {signal.Signals(-code).name}, at: {line}"
    if code == NOTHING_RAN:
        return LEFT_OUT, line
    return (FAILED, line or f"exit code {code}") if code else (PASSED, "")


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    texts = [line.strip() for line in lines if line.strip()]
    return texts[-1][:LINE_WIDTH] if texts else ""


def end_tree(pid: int) -> None:
    """Kill a process and its children. Ray's have sessions of their own, so the group is not enough."""
    try:
        process = psutil.Process(pid)
        processes = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
