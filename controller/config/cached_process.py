"""Ask a module in a process of its own, and keep its answers in the user's cache.

The answer depends on the request, the versions of torch and transformers, and source files. The process
imports what this one must not.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workers.user_code.process import end_with_parent

WORKERS = Path(__file__).parents[2] / "workers"


def cache_file(kind: str, request: Mapping[str, Any], sources: Iterable[Path]) -> Path:
    """Name an answer by the request and all code that it depends on."""
    libraries = map(version, ("torch", "transformers"))
    key = hashlib.sha256(json.dumps([request, *libraries], sort_keys=True).encode())
    for source in sources:
        key.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "ballast" / kind / f"{key.hexdigest()[:32]}.json"


def keep_answer(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary_file = file.with_suffix(f".{os.getpid()}")
        temporary_file.write_text(text)
        temporary_file.replace(file)
    except OSError:
        pass  # without a writable home, every run asks again


def ask_module(module: str, request: Mapping[str, Any], timeout_s: int) -> tuple[Any, str]:
    """Return the module's answer, the last line that it prints, as JSON. Else None and why."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"},
            text=True,
            capture_output=True,
            timeout=timeout_s,
            preexec_fn=end_with_parent,
        )
    except subprocess.TimeoutExpired:
        return None, f"the measuring process took more than {timeout_s} s"
    if process.returncode or not process.stdout.strip():
        words = (process.stderr.strip().splitlines() or ["no word"])[-1]
        return None, f"the measuring process ended with {process.returncode}: {words}"
    return json.loads(process.stdout.splitlines()[-1]), ""
