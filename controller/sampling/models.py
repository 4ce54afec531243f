"""The model of --model, as a folder of weights that an engine loads.

folder, hub name            unchanged
runs/NAME                   its model/, or else its last checkpoint
.../checkpoints/.../step-N  written once as a model to runs/NAME/model-N, as run.save_every does
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.checkpoints.progress import FOLDER, checkpoints_at
from controller.config import Config
from controller.config.recorded import load_recorded
from controller.config.sampler import SamplerConfig
from workers.errors import CheckpointError, ConfigError
from workers.model.checkpoint.checkpoint_folder import (
    MANIFEST,
    read_manifest,
    unfinished_folder,
)

if TYPE_CHECKING:
    from controller.observability.console import Console

OF_RUN = "config.yaml"


@dataclass(frozen=True)
class Model:
    """path: loaded by engines, empty for model.path of the settings. run: the folder of its run, if any.
    checkpoint: source of `path`, if any.
    """

    path: str = ""
    run: Path | None = None
    checkpoint: Path | None = None

    @property
    def name(self) -> str:
        return (self.checkpoint or Path(self.path)).name

    @property
    def is_missing(self) -> bool:
        return (
            self.checkpoint is not None and not (Path(self.path) / "config.json").exists()
        )

    def write(self, config: SamplerConfig, console: "Console") -> None:
        """Write the checkpoint as a model, if missing. Raises as `launch`, and CheckpointError."""
        if not self.is_missing or self.checkpoint is None or self.run is None:
            return
        from controller.actors.launch import launch

        trained = load_recorded(self.run / OF_RUN)
        settings: Any = trained
        settings = replace(settings, policy=config.policy, resources=config.resources)
        if isinstance(trained, Config):  # without its loss, which may be somebody's code
            settings = replace(settings, algorithm=config.algorithm)
        folder = Path(self.path)
        partial_folder = unfinished_folder(Path(self.path))
        console.log(f"writing {self.checkpoint} as a model to {folder}")
        try:
            with launch(settings, console, only=("policy",)) as roles:
                roles.policy.load_checkpoint(str(self.checkpoint.resolve()))
                roles.policy.save_pretrained(str(partial_folder.resolve()))
            partial_folder.rename(folder)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)


def choose_model(named: str) -> Model:
    """Find the model of --model, or model.path if empty. Raises ConfigError or CheckpointError."""
    path = Path(named)
    if not named or not path.is_dir():
        return Model(named)
    if (path / MANIFEST).exists():
        return _of_checkpoint(path)
    if (path / "config.json").exists():
        return Model(named, path.parent if (path.parent / OF_RUN).exists() else None)
    if not (path / OF_RUN).exists():
        raise ConfigError(
            f"--model={path}: not a model, a run or a checkpoint of a run. Name one of them."
        )
    if (path / "model" / "config.json").exists():
        return Model(str(path / "model"), path)
    if checkpoints := checkpoints_at(path):
        return _of_checkpoint(checkpoints[0])
    raise ConfigError(
        f"--model={path}: the run has no model and no complete checkpoint yet. Name another."
    )


def _of_checkpoint(path: Path) -> Model:
    run = path.resolve().parents[len(FOLDER.parts)]
    step = read_manifest(path).step
    if path.resolve().parent != run / FOLDER or not (run / OF_RUN).exists():
        raise CheckpointError(
            f"--model={path}: not a checkpoint of a policy. Name runs/NAME/{FOLDER}/step-{step}."
        )
    return Model(str(run / f"model-{step}"), run, path)
