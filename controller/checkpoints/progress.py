"""Checkpoints of a run: the driver's state, the folders, and how a run resumes.

    runs/NAME/checkpoints/policy/step-30     the policy's state, with the driver's Progress in its manifest
    runs/NAME/checkpoints/critic/step-30     the critic's, if any
    runs/NAME/checkpoints/samples/step-30.npz    untrained samples that were made ahead
    runs/NAME/checkpoints/replay/step-30.npz     trained samples that may be replayed
    run.resume --checkpoints_at--> newest first --the first that loads--> Progress

`workers.model.checkpoint` is the workers' half. A run can resume from a step whose folders are all complete.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from controller.config import TrainingConfig
from controller.data.identity import differences
from workers.errors import ConfigError
from workers.model.checkpoint.checkpoint_folder import MANIFEST, complete, read_manifest

FOLDER = Path("checkpoints") / "policy"


@dataclass
class Progress:
    """The driver's state after a step. The rest follows from configuration and seed."""

    step: int = 0
    position: int = 0  # place of the next prompt in the stream
    # Earlier positions whose samples are untrained.
    active: list[int] = field(default_factory=list)
    samples: str = ""  # file with these samples
    replay: str = ""  # file with samples that later steps may replay
    weight_version: int = 0
    best: float | None = None  # highest validation.keep_best
    # Validation before the first step.
    before: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    kl_coefficient: float | None = None  # adapted KL weight in the reward
    score_scales: dict[str, list[float]] = field(default_factory=dict)  # see `ScoreScales`
    sampler: dict[str, Any] | None = None  # see `SampledPrompts.kept`
    trackers: dict[str, str] = field(default_factory=dict)  # the run's id in each tracker
    refit: dict[str, Any] | None = None  # see `CostModelFitter.state`
    data: dict[str, Any] = field(default_factory=dict)  # see `controller.data.identity`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def checkpoint_path(run_folder: Path, step: int) -> Path:
    return run_folder / FOLDER / f"step-{step}"


def role_path(policy_checkpoint: Path, role: str) -> Path:
    """Path of a role's checkpoint of the same step."""
    return policy_checkpoint.parent.parent / role / policy_checkpoint.name


def samples_path(policy_checkpoint: Path) -> Path:
    return role_path(policy_checkpoint, "samples").with_suffix(".npz")


def replay_path(policy_checkpoint: Path) -> Path:
    return role_path(policy_checkpoint, "replay").with_suffix(".npz")


def remove_old_samples(run_folder: Path) -> None:
    """Remove sample files of checkpoints that are gone. Those newer than all complete checkpoints are being
    saved.
    """
    saved_steps = {manifest.step for _, manifest in complete(run_folder / FOLDER)}
    for path in (run_folder / FOLDER.parent).glob("*/step-*.npz"):
        step = int(path.stem.removeprefix("step-"))
        if step not in saved_steps and step < max(saved_steps, default=0):
            path.unlink()


def checkpoints_at(path: Path) -> list[Path]:
    """List complete checkpoints, newest first: `path` itself, or a run's. Raises CheckpointError for a torn
    `path`.
    """
    if (path / MANIFEST).exists():
        read_manifest(path)
        return [path]
    return [checkpoint for checkpoint, _ in reversed(complete(path / FOLDER))]


def check_same_data(config: TrainingConfig, data: dict[str, Any]) -> None:
    """Raise ConfigError if run.on_data_change does not allow resuming on data of this identity."""
    if config.run.resume == "never" or config.run.on_data_change != "refuse":
        return
    folder = config.run_folder if config.run.resume == "auto" else Path(config.run.resume)
    for path in checkpoints_at(folder)[:1]:
        refuse_other_data(path, data, read_manifest(path).extra.get("data") or {})


def refuse_other_data(path: Path, now: dict[str, Any], then: dict[str, Any]) -> None:
    changes = differences(now, then)
    if changes:
        raise ConfigError(
            f"run.resume: {path} was trained on other data: {'; '.join(changes)}. Set that back, or continue "
            "with the new data by run.on_data_change=restart (from its first prompt) or keep_place."
        )
