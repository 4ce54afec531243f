r"""Save a run's checkpoints and resume from them. A failed save is logged and counted.

complete step --begin--> copied, training continues -behind-> step-30 --prune--> the last run.keep_checkpoints
                                                      \--full disk--> logged, counted, the last one stays
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.actors.launch import WorkerGroups
from controller.actors.worker_group import GroupMethod
from controller.checkpoints.peer_copies import copies_of
from controller.checkpoints.progress import (
    FOLDER,
    Progress,
    checkpoint_path,
    checkpoints_at,
    refuse_other_data,
    replay_path,
    role_path,
    samples_path,
)
from controller.config import TrainingConfig
from controller.data.identity import differences
from workers.errors import (
    CheckpointError,
    LostError,
    OutputError,
    RolloutError,
    WorkerError,
    clause,
)
from workers.model.checkpoint.checkpoint_folder import complete, prune, remove

WriteMore = Callable[[Path, Progress], None]
"""Writes a checkpoint's other files."""
SAVE_SECONDS = 1800.0  # if an interrupt reached only some ranks, a save never begins


class CheckpointWriter:
    """Saves every role that learns. A failed save, as on a full disk, is logged and counted in `failures`."""

    def __init__(
        self, roles: WorkerGroups, run_folder: Path, keep: int, log: Callable[[str], None]
    ) -> None:
        self.failures = 0
        self._roles = roles
        self._folder = run_folder.resolve()
        self._keep = keep
        self._log = log
        self._begun = 0

    def begin(self, progress: Progress, write_more: WriteMore | None = None) -> None:
        """Start saving the state after `progress.step`. Training continues while files are written."""
        path = checkpoint_path(self._folder, progress.step)
        try:
            if write_more is not None:
                write_more(path, progress)
        except OutputError as error:
            self.failures += 1
            self._log(f"{clause(error)}. The run continues.")
        for role, group in self._roles.trained.items():
            save = group.save_checkpoint
            arguments = str(role_path(path, role)), progress.step, progress.to_json()
            # The first call reports a failure of the previous save.
            if not self._try_call(save, *arguments):
                self._try_call(save, *arguments)
        self._begun = progress.step
        self._prune()

    def finish(self) -> None:
        for group in self._roles.trained.values():
            self._try_call(group.wait_for_checkpoint)
        self._prune()

    def at_stop(self, progress: Progress, write_more: WriteMore | None = None) -> None:
        """Save if not saved yet, and wait. Never raises, because the run is ending."""
        try:
            if progress.step > self._begun:
                self._log(f"saving a checkpoint of step {progress.step}")
                self.begin(progress, write_more)
            self.finish()
        except (WorkerError, RolloutError, LostError) as error:
            self._log(f"no checkpoint of step {progress.step}: {error}")

    def _try_call(self, method: GroupMethod, *arguments: Any) -> bool:
        try:
            method.remote(*arguments).result(SAVE_SECONDS)
        except CheckpointError as error:
            self.failures += 1
            checkpoint = next(iter(checkpoints_at(self._folder)), None)
            resumed = (
                f"it can be resumed from {checkpoint}"
                if checkpoint
                else "there is no checkpoint yet to resume it from"
            )
            self._log(f"{clause(error)}. The run continues, and {resumed}.")
            return False
        return True

    def _prune(self) -> None:
        for role in self._roles.trained:
            prune(self._folder / FOLDER.parent / role, self._keep)


def resume(
    config: TrainingConfig,
    roles: WorkerGroups,
    log: Callable[[str], None],
    data: dict[str, Any],
) -> Progress:
    """Load the newest good checkpoint for run.resume. Returns a fresh Progress without one.

    data: identity of the training data, see run.on_data_change. Raises CheckpointError if there are
    checkpoints and none loads, because a fresh start would overwrite them.
    """
    if config.run.peer_copies and (progress := _resume_from_memory(config, roles, log)):
        return progress
    if config.run.resume == "never":
        return Progress(data=data)
    folder = config.run_folder if config.run.resume == "auto" else Path(config.run.resume)
    candidates = checkpoints_at(folder.resolve())
    for path in candidates:
        try:
            states = [
                group.load_checkpoint(str(role_path(path, role)))
                for role, group in roles.trained.items()
            ]
            samples, replay = (
                str(file) if file.exists() else ""
                for file in (samples_path(path), replay_path(path))
            )
            progress = replace(Progress(**states[0]), samples=samples, replay=replay)
        except (
            CheckpointError,
            WorkerError,
            TypeError,
        ) as error:  # TypeError: fields that no Progress has
            log(f"{path} cannot be loaded: {error}")
            continue
        # Checked before the start too, but of the newest one only.
        if config.run.on_data_change == "refuse":
            refuse_other_data(path, data, progress.data)
        log(f"going on from {path}")
        if config.run.resume == "auto":
            _remove_later(roles, path, progress.step)
            copies_of(folder).drop_after(progress.step)
        if config.run.on_data_change == "restart" and differences(data, progress.data):
            log(
                "the training data differ from the checkpoint's: they start again at their first prompt"
            )
            progress = replace(
                progress, position=0, active=[], samples="", replay="", sampler=None
            )
        return replace(progress, data=data)
    if candidates:
        raise CheckpointError(
            f"run.resume={config.run.resume}: none of {len(candidates)} checkpoints can be loaded."
        )
    return Progress(data=data)


def _resume_from_memory(
    config: TrainingConfig, roles: WorkerGroups, log: Callable[[str], None]
) -> Progress | None:
    """Continue after a loss from the copies in memory. Returns None if there are none."""
    folder = config.run_folder.resolve()
    saved_steps = [manifest.step for _, manifest in complete(folder / FOLDER)]
    copies = copies_of(folder)
    progress = copies.restore(roles, max(saved_steps, default=-1), log)
    if progress is not None:
        copies.drop_after(progress.step)
        _remove_later(roles, checkpoint_path(folder, progress.step), progress.step)
    return progress


def _remove_later(roles: WorkerGroups, path: Path, step: int) -> None:
    # They failed to load or lack a role, and new ones will have their names.
    for role in roles.trained:
        for checkpoint, manifest in complete(role_path(path, role).parent):
            if manifest.step > step:
                remove(checkpoint)
