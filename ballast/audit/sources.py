"""Find the steps at a path: a bundle, a folder of bundles, the run of a trainer, dumps of other systems.

path --the first of READERS that knows it--> a Source for each step, in order
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ballast.audit.ballast_run import is_ballast_run, read_recorded_step, recorded_steps
from ballast.audit.bundle import Bundle
from ballast.audit.bundle_files import bundles_of, read_bundle, read_step_number
from ballast.audit.readers import dump_steps, read_dump, step_number
from workers.errors import DataError


@dataclass(frozen=True)
class Source:
    """A step that is not yet read. number: of the step. load: raises DataError."""

    label: str
    number: int
    load: Callable[[], Bundle]


def _bundles(path: Path) -> list[Source]:
    sources = []
    for folder in bundles_of(path):
        sources.append(
            Source(str(folder), read_step_number(folder), partial(read_bundle, folder))
        )
    return sorted(sources, key=lambda source: source.number)


def _ballast_run(path: Path) -> list[Source]:
    if not is_ballast_run(path):
        return []
    steps = recorded_steps(path)
    if not steps:
        raise DataError(
            f"{path}: this run has no recorded samples. Train it with run.record_samples=true."
        )
    return [
        Source(str(path), step, partial(read_recorded_step, path, step)) for step in steps
    ]


def _dumps(path: Path) -> list[Source]:
    return [
        Source(str(step), step_number(step), partial(read_dump, step))
        for step in dump_steps(path)
    ]


READERS: list[Callable[[Path], list[Source]]] = [_bundles, _ballast_run, _dumps]
"""Each returns nothing for a path that it does not know."""


def steps_at(path: Path) -> list[Source]:
    """Raises DataError if there is nothing to audit."""
    if not path.exists():
        raise DataError(
            f"{path}: there is no such file or folder. Name a bundle, or the folder of a run."
        )
    for read in READERS:
        if steps := read(path):
            return steps
    raise DataError(
        f"{path}: neither a bundle nor a recorded run. docs/audit.md names what can be read."
    )
