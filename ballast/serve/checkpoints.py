"""Checkpoints of a run's models, as clients list and delete them.

    tinker://MODEL/weights/NAME            a state: the folder runs/NAME/states/MODEL.NAME, with `.` for `:`
    tinker://MODEL/sampler_weights/NAME    weights for samplers: a fact of the log

The log's fact `deleted` ends a checkpoint, and its name stays taken. The next start removes a folder that a
kill left.
"""

import re
from pathlib import Path
from typing import Any

from ballast.serve.wire import NAME, RefusedError, text
from controller.checkpoints.progress import checkpoints_at
from workers.model.checkpoint.checkpoint_folder import MANIFEST, clear_unfinished, remove

TYPES = {"weights": "training", "sampler_weights": "sampler"}
STATE_PATH = re.compile(f"tinker://[0-9a-f]{{32}}:train:[0-9]+/weights/{NAME.pattern}")


class Checkpoints:
    """states: the folder. samplers: model, weights and time of each path. Times are seconds since
    the epoch.
    """

    def __init__(self, states: Path) -> None:
        self.states = states
        self.samplers = dict[str, tuple[str, int, float]]()
        self.deleted = set[str]()

    def is_complete(self, state: str) -> bool:
        return (self.states / state / "policy" / MANIFEST).exists()

    def state(self, path: str) -> str:
        """Return the name of a saved state. Raises RefusedError for another path."""
        if (
            path in self.deleted
            or not (state := state_of(path))
            or not self.is_complete(state)
        ):
            raise RefusedError(
                f"path={path!r:.200}: this run has no such state. Use what save_state returned.",
                404,
            )
        return state

    def remove_deleted(self) -> None:
        for state in filter(None, map(state_of, self.deleted)):
            if (self.states / state).exists():
                remove(self.states / state)
        clear_unfinished(self.states)

    def all(self, model: str = "") -> list[dict[str, Any]]:
        """List checkpoints of a model, or of all, newest first."""
        checkpoints = [
            _describe(path, at, None) for path, (_, _, at) in self.samplers.items()
        ]
        for manifest in self.states.glob(f"[!.]*.train.*.*/policy/{MANIFEST}"):
            session, _, number, name = manifest.parents[1].name.split(".", 3)
            if (
                path := f"tinker://{session}:train:{number}/weights/{name}"
            ) not in self.deleted:
                # Bytes.
                size = sum(file.stat().st_size for file in manifest.parents[1].glob("*/*"))
                checkpoints.append(_describe(path, manifest.stat().st_mtime, size))
        checkpoints = [
            checkpoint
            for checkpoint in checkpoints
            if model in ("", checkpoint["tinker_path"].split("/")[2])
        ]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint["time"], reverse=True)


def state_of(path: str) -> str:
    """Return the name of a state's folder, or an empty text for another path."""
    name = path.removeprefix("tinker://").replace("/weights/", ".").replace(":", ".")
    return name if STATE_PATH.fullmatch(path) else ""


def path_of(request: dict[str, Any], kind: str) -> str:
    """Return the path of a model's checkpoint. Raises RefusedError for a name that is not one of a file."""
    model = text(request, "model_id")
    name = text(request, "path")
    if not NAME.fullmatch(name):
        raise RefusedError(
            f"name={name!r:.100}: letters, digits, `_`, `.` and `-` make a name. Change it."
        )
    return f"tinker://{model}/{kind}/{name}"


def oldest_step(run: Path) -> int:
    """Return the step of the oldest checkpoint that a restart may begin with, or 0. run: its folder."""
    return min(
        (int(path.name.removeprefix("step-")) for path in checkpoints_at(run)), default=0
    )


def _describe(path: str, at: float, size: int | None) -> dict[str, Any]:
    kind, name = path.rsplit("/", 2)[1:]
    description = {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": TYPES[kind],
        "tinker_path": path,
    }
    return description | {"time": at, "size_bytes": size, "public": False}
