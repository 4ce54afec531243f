"""CheckpointWriter: saves a run's checkpoints; a failed save is logged and counted.

complete step --begin--> copied, training goes on --behind--> step-30 --prune--> the last run.keep_checkpoints
                                                        \\--full disk--> logged, counted; the one before stays
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.actors.roles import TrainingRoles
from controller.actors.worker_group import GroupMethod
from controller.checkpoint import FOLDER, Progress, checkpoint_path, checkpoints_at, role_path
from workers.errors import CheckpointError, LostError, OutputError, RolloutError, WorkerError, clause
from workers.model.checkpoint_folder import prune

Beside = Callable[[Path, Progress], None]
SAVE_SECONDS = 1800.0  # an interrupt may have reached ranks unequally: then a save never begins


def nothing(path: Path, progress: Progress) -> None:
    """Write nothing beside the checkpoint at `path`."""


class CheckpointWriter:
    """Saves every role that learns. A save that fails, such as on a full disk, is logged and counted in `failures`; the
    run continues, and earlier checkpoints stay."""

    def __init__(self, roles: TrainingRoles, run_folder: Path, keep: int, log: Callable[[str], None]) -> None:
        self.failures = 0
        self._roles, self._folder, self._keep, self._log = roles, run_folder.resolve(), keep, log
        self._begun = 0

    def begin(self, progress: Progress, beside: Beside = nothing) -> None:
        """Begin to save the state after `progress.step`; files are written while training continues.

        beside: writes what else belongs to the checkpoint, at once. Its failure is counted too, and the rest is saved.
        """
        path = checkpoint_path(self._folder, progress.step)
        try:
            beside(path, progress)
        except OutputError as error:
            self.failures += 1
            self._log(f"{clause(error)}. The run goes on.")
        for role, group in self._roles.trained.items():
            save = group.save_checkpoint
            arguments = str(role_path(path, role)), progress.step, progress.to_json()
            # A failure of the first call is that of the previous save.
            if not self._tried(save, *arguments):
                self._tried(save, *arguments)
        self._begun = progress.step
        self._prune()

    def finish(self) -> None:
        """Wait for the running save."""
        for group in self._roles.trained.values():
            self._tried(group.wait_for_checkpoint)
        self._prune()

    def at_stop(self, progress: Progress, beside: Beside = nothing) -> None:
        """Save `progress`, and what is `beside`, if it is not saved yet, and wait. Does not raise if a rank cannot: the
        run ends anyway."""
        try:
            if progress.step > self._begun:
                self._log(f"saving a checkpoint of step {progress.step}")
                self.begin(progress, beside)
            self.finish()
        except (WorkerError, RolloutError, LostError) as error:
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
