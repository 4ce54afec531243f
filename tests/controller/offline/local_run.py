"""Whole runs of `controller.sft` and `controller.preferences` in this process: engines are real, Ray has a stand-in."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from controller.config import load_as
from controller.config.offline import OfflineConfig, PreferencesConfig, SftConfig
from controller.offline.running import read_inputs, training
from controller.offline.steps import STEPS
from controller.preflight.offline_checks import check_offline
from controller.training_loop import Outcome, train
from examples.addition import data
from examples.addition.warm_start import create_model, pairs
from tests.controller.stand_ins.local_ray import LocalRay
from tests.controller.stand_ins.run import LocalReservation, NoMetrics
from tests.end_to_end.faults import Listening
from tests.workers.model.ranks import forget_meshes

SCHEMAS: dict[str, type[OfflineConfig]] = {"sft": SftConfig, "preferences": PreferencesConfig}
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
}


def write_offline_workspace(folder: Path) -> None:
    """A tiny model and pairs of right and wrong sums, of which the chosen ones are responses to learn."""
    create_model(folder / "model", seed=0, width=32, layers=2)
    data.write_records(folder / "pairs.jsonl", pairs(20, 0, held_out=False))
    data.write_records(folder / "held_out.jsonl", pairs(4, 1, held_out=True))


class LocalRuns:
    """Puts the stand-ins in their places, until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        LocalRay({}).install(monkeypatch)
        monkeypatch.setattr("controller.actors.launch.reserve", lambda pool, timeout_s: LocalReservation([[]]))
        monkeypatch.setattr("controller.observability.ray_metrics.RayMetrics", NoMetrics)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        start = torch.distributed.init_process_group  # policy and reference are of one process
        monkeypatch.setattr(
            torch.distributed,
            "init_process_group",
            lambda *given, **named: torch.distributed.is_initialized() or start(*given, **named),
        )

    def run(self, name: str, run: str, *overrides: str) -> Outcome:
        """See `run_offline`."""
        return run_offline(name, run, *overrides)


def run_offline(name: str, run: str, *overrides: str) -> Outcome:
    """One run in the working directory, from its configuration to its outcome, written to `runs/RUN`."""
    config = load_as(SCHEMAS[name], None, [*SETTINGS, *OF_COMMAND[name], f"run.name={run}", *overrides])
    check_offline(config)
    with training(config, read_inputs(config), Listening()) as started:
        return train(started, STEPS[SCHEMAS[name]])


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRuns]:
    """In a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    write_offline_workspace(tmp_path)
    yield LocalRuns(monkeypatch)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        forget_meshes()


def recorded(run: str) -> list[dict[str, float]]:
    """The metrics of every step of `runs/RUN`."""
    return [json.loads(line) for line in (Path("runs") / run / "metrics.jsonl").read_text().splitlines()]
