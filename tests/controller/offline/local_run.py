"""Whole runs of `controller.sft`, `controller.preferences` and `controller.reward_model` in this process."""

from pathlib import Path

from controller.config import load_as
from controller.config.offline import (
    OfflineConfig,
    PreferencesConfig,
    RewardTrainingConfig,
    SftConfig,
)
from controller.observability.metric_table import spec_of
from controller.offline.offline_training import read_inputs, training
from controller.offline.steps import STEPS
from controller.preflight.offline_checks import check_offline
from controller.training_loop import Outcome, train
from examples.addition import data
from examples.addition.warm_start import create_model, pairs
from tests.end_to_end.faults import Listening
from tests.json_lines import read_lines

SCHEMAS: dict[str, type[OfflineConfig]] = {
    "sft": SftConfig,
    "preferences": PreferencesConfig,
    "reward_model": RewardTrainingConfig,
}
SETTINGS = (
    "run.steps=3",
    "model.path=model",
    "data.train=pairs.jsonl",
    "data.max_tokens=96",
    "policy.max_tokens_per_micro_batch=160",
    "policy.optimizer.learning_rate=1e-3",
    "resources.device=cpu",
    "tracking.tensorboard=false",
    "tracking.timeline=false",
)
OF_COMMAND = {
    "sft": ("data.response_key=chosen", "batch.sequences_per_step=6"),
    "preferences": ("batch.pairs_per_step=5", "loss.beta=1.0"),
    "reward_model": ("batch.records_per_step=5", "policy.optimizer.learning_rate=1e-2"),
}


def write_offline_workspace(folder: Path) -> None:
    """A tiny model and pairs of right and wrong sums, of which the chosen ones are responses to learn."""
    create_model(folder / "model", seed=0, width=32, layers=2)
    data.write_records(folder / "pairs.jsonl", pairs(20, 0, held_out=False))
    data.write_records(folder / "held_out.jsonl", pairs(4, 1, held_out=True))


def run_offline(name: str, run: str, *overrides: str) -> Outcome:
    """One run in the working directory, from its configuration to its outcome, written to `runs/RUN`."""
    config = load_as(
        SCHEMAS[name], None, [*SETTINGS, *OF_COMMAND[name], f"run.name={run}", *overrides]
    )
    check_offline(config)
    with training(config, read_inputs(config), Listening()) as started:
        return train(started, STEPS[SCHEMAS[name]])


def recorded(run: str) -> list[dict[str, float]]:
    """The metrics of every step of `runs/RUN`."""
    return read_lines(Path("runs") / run / "metrics.jsonl")


def undeclared_metrics(run: str) -> set[str]:
    names = {name for step in recorded(run) for name in step} - {"step"}
    return {name for name in names if spec_of(name) is None}
