"""The folder of a checkpoint: a manifest of its files, renamed into place when complete.

    .step-30.unfinished-9c1f --files, fsync--> manifest.json, fsync --rename--> step-30 --prune--> last n

A crash leaves a hidden folder, which is never read, or a complete checkpoint. A torn folder under a
checkpoint's name (a failing disk, an interrupted copy) is refused by name.

Imports neither torch nor the engine: the driver looks for a checkpoint to resume before it starts anything.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.errors import CheckpointError, DataError, why_not_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = "ballast checkpoint 1"


@dataclass(frozen=True)
class StoredFile:
    size: int  # bytes
    sha256: str  # hex

    @classmethod
    def of(cls, path: Path) -> "StoredFile":
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class Manifest:
    step: int  # orders checkpoints
    world_size: int  # ranks that wrote it
    engine: dict[str, Any]  # JSON of the engine
    extra: dict[str, Any]  # JSON of the caller
    files: dict[str, StoredFile]  # by name


def check_json(extra: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `extra` after a JSON round trip. Raises DataError if the copy differs."""
    try:
        copy = json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the caller's part of a checkpoint must be JSON: {error}."
        ) from None
    if copy != extra:
        raise DataError(
            "the caller's part of a checkpoint changes in JSON: use lists and text keys, and no NaN."
        )
    return dict(copy)


def unfinished_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished-{secrets.token_hex(4)}")


def clear_unfinished(folder: Path) -> None:
    """Remove the remains of interrupted saves in `folder`. Do not call during a save."""
    for path in folder.glob(".*.unfinished-*"):
        shutil.rmtree(path, ignore_errors=True)


def check_free(path: Path) -> None:
    """Raise CheckpointError if `path` holds a complete checkpoint. A torn one may be replaced."""
    try:
        read_manifest(path)
    except CheckpointError:
        return
    raise CheckpointError(
        f"{path} holds a complete checkpoint already. Save under another name or remove it."
    )


def commit(unfinished: Path, path: Path, manifest: Manifest) -> None:
    """Write the manifest of `unfinished`, and rename the folder. Raises CheckpointError if ranks do not share
    it.
    """
    for name, stored in manifest.files.items():
        if (
            not (unfinished / name).is_file()
            or (unfinished / name).stat().st_size != stored.size
        ):
            raise CheckpointError(
                f"{unfinished / name} was written and is not seen here. Use a folder all nodes share."
            )
    with (unfinished / MANIFEST).open("w", encoding="utf-8") as file:
        content = asdict(manifest)
        json.dump({"format": FORMAT, "sha256": _digest(content), **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    if path.exists():  # torn, by check_free
        remove(path)
    unfinished.rename(path)
    _sync_folder(path.parent)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest. Raises CheckpointError unless `path` holds its files in full size. See
    `verify_files`.
    """
    file = path / MANIFEST
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is not a checkpoint: its {MANIFEST} is not a file.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not a checkpoint of this version: {MANIFEST} does not say {FORMAT!r}."
            )
        digest = content.pop("sha256", None)
        if digest != _digest(content) and digest is not None:  # earlier versions wrote none
            raise CheckpointError(
                f"{path} is torn: its {MANIFEST} is not what was written."
            )
        files = {
            name: StoredFile(**stored) for name, stored in content.pop("files").items()
        }
        content.pop("score", None)  # in checkpoints of earlier versions
        manifest = Manifest(**content, files=files)
        if not isinstance(manifest.step, int) or not isinstance(manifest.world_size, int):
            raise TypeError("step and world_size must be whole numbers")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has no {MANIFEST}."
        ) from None
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: its {MANIFEST} is not readable ({why_not_json(error)})."
        ) from None
    _check_listing(path, manifest)
    return manifest


def _check_listing(path: Path, manifest: Manifest) -> None:
    # Refuse any other file, so that no foreign one is opened.
    sizes = {
        entry.name: entry.stat().st_size
        for entry in path.iterdir()
        if entry.name != MANIFEST
    }
    wanted = {name: stored.size for name, stored in manifest.files.items()}
    for name in sorted(sizes.keys() | wanted.keys()):
        if sizes.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path} is torn: {name} has {sizes.get(name, 'no')} bytes and should have "
                f"{wanted.get(name, 'none')}."
            )


def verify_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare checksums. Raises CheckpointError, naming the first torn file."""
    for name in names:
        if StoredFile.of(path / name) != manifest.files[name]:
            raise CheckpointError(
                f"{path} is torn: the contents of {name} are not what was written."
            )


def complete(folder: str | Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints in `folder` by ascending step, and log others as warnings."""
    checkpoints = []
    for path in Path(folder).glob("[!.]*/"):
        try:
            checkpoints.append((path, read_manifest(path)))
        except CheckpointError as error:
            log.warning("not resumable: %s", error)
    return sorted(checkpoints, key=lambda entry: (entry[1].step, entry[0].name))


def prune(folder: str | Path, keep_last: int) -> None:
    """Remove all but the last `keep_last` complete checkpoints. Torn and foreign folders stay for
    inspection.
    """
    for path, _ in complete(folder)[:-keep_last]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder. It is renamed first, so that a crash leaves no torn checkpoint."""
    doomed = unfinished_folder(path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
