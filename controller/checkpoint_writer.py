"""CheckpointWriter: saves a run's checkpoints, and decides what a failed one means.

complete step --begin--> copied, training goes on --behind--> step-30 --prune--> the last run.keep_checkpoints
                                                        \\--full disk--> said, counted; the one before stays
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.checkpoint import FOLDER, Progress, checkpoint_path, checkpoints_at, role_path
from controller.roles import TrainingRoles
from controller.worker_group import GroupMethod
from workers.errors import CheckpointError, LostError, WorkerError, clause
from workers.model.checkpoint_folder import prune

SAVE_SECONDS = 1800.0  # an interrupt may have reached ranks unequally: then a save never begins


class CheckpointWriter:
    """Saves every role that learns. A save that fails, such as on a full disk, is said and counted, and the run goes
    on: the good checkpoints before it stay. `failures`: how many did."""

    def __init__(self, roles: TrainingRoles, run_folder: Path, keep: int, log: Callable[[str], None]) -> None:
        self.failures = 0
        self._roles, self._folder, self._keep, self._log = roles, run_folder.resolve(), keep, log
        self._begun = 0

    def begin(self, progress: Progress) -> None:
        """Begin to save the state after `progress.step`; files are written while training goes on."""
        path = checkpoint_path(self._folder, progress.step)
        for role, group in self._roles.trained.items():
            save = group.save_checkpoint
            arguments = str(role_path(path, role)), progress.step, progress.to_json()
            # What fails at first is the save before this one.
            if not self._tried(save, *arguments):
                self._tried(save, *arguments)
        self._begun = progress.step
        self._prune()

    def finish(self) -> None:
        """Wait for the save under way."""
        for group in self._roles.trained.values():
            self._tried(group.wait_for_checkpoint)
        self._prune()

    def at_stop(self, progress: Progress) -> None:
        """Save what is not saved yet, and wait for it. Never raises for a rank that cannot: the run ends anyway."""
        try:
            if progress.step > self._begun:
                self._log(f"saving a checkpoint of step {progress.step}")
                self.begin(progress)
            self.finish()
        except (WorkerError, LostError) as error:
            self._log(f"no checkpoint of step {progress.step}: {error}")

    def _tried(self, method: GroupMethod, *arguments: Any) -> bool:
        try:
            method.remote(*arguments).result(SAVE_SECONDS)
        except CheckpointError as error:
            self.failures += 1
            left = next(iter(checkpoints_at(self._folder)), None)
            resumed = f"it can be resumed from {left}" if left else "there is no checkpoint yet to resume it from"
            self._log(f"{clause(error)}. The run goes on; {resumed}.")
            return False
        return True

    def _prune(self) -> None:
        for role in self._roles.trained:
            prune(self._folder / FOLDER.parent / role, self._keep)
