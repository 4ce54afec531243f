"""The trial's steps in their order on roles that are stand-ins, among them an engine that keeps its old weights.

The real ones are in tests/end_to_end/test_doctor.py.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from balancing import Plan
from controller.config import Config, load
from controller.diagnosis.findings import Report, Status
from controller.diagnosis.tiny_model import save_tiny_model
from controller.diagnosis.trial import PROMPTS, Trial, trial_config
from controller.generation.rounds import RolloutRound
from controller.preflight.checks import check
from workers.config import LossConfig, SamplingConfig
from workers.metrics import Metric
from workers.remote_batch import RemoteBatch
from workers.rollout.requests import LENGTH, SampleRequest, SampleResult


class Stand:
    """Roles of which one number stands for the weights: sampler and trainer differ by that of theirs."""

    def __init__(self, log: list[str], *, takes_weights: bool = True) -> None:
        self.log, self.takes_weights = log, takes_weights
        self.trained = self.sampled = 0.0
        self.rollouts = self.policy = self

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> RolloutRound:
        self.log.append("generate")
        self.with_weights = self.sampled
        results = [
            SampleResult(request.uid, 0, len(request.prompt_ids), sampling.max_new_tokens, LENGTH, 0, row=row)
            for row, request in enumerate(requests)
        ]
        return RolloutRound(results, ["a block"] * len(results), [], 0)

    def log_probs(self, batch: RemoteBatch, plan: Plan) -> Any:
        self.log.append("log_probs")
        assert plan.ranks == 1
        gap = abs(self.trained - self.with_weights)
        found = {"rollout_mismatch_mean": Metric.mean(gap, 1), "rollout_mismatch_max": Metric.max(gap)}
        return SimpleNamespace(metrics=found)

    def update(self, batch: RemoteBatch, plan: Plan, loss: LossConfig) -> None:
        self.log.append("update")
        assert set(batch["advantages"].tolist()) == {-1.0, 1.0}
        self.trained += 1.0

    def send_weights(self, version: int) -> None:
        self.log.append(f"send {version}")
        if self.takes_weights:
            self.sampled = self.trained

    def facts(self) -> list[dict[str, int]]:
        return [{"resident_bytes": 1 << 30, "peak_device_bytes": 2 << 30}]

    def sleep_engines(self) -> None:
        self.log.append("sleep")

    def wake_engines(self) -> None:
        self.log.append("wake")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(folder)
    return folder


def config_on(device: str, model: Path, placement: str = "auto", dtype: str = "auto") -> Config:
    overrides = [f"resources.device={device}", f"rollout.placement={placement}", f"model.dtype={dtype}"]
    return trial_config(load(None, ["model.path=none", "run.name=r", *overrides]), str(model))


def told(config: Config, stand: Stand) -> dict[str, Any]:
    report = Report()
    trial = Trial(config, stand, report, gpu_gib=80.0)  # type: ignore[arg-type]
    trial.sent_checksums = lambda: {"norm": str(stand.trained)}
    trial.engine_checksums = lambda: {"0:norm": str(stand.sampled)}
    trial.run()
    return {finding.name: finding for finding in report.findings}


def test_an_engine_sleeps_while_its_gpu_trains_until_it_gets_weights(model: Path) -> None:
    log: list[str] = []
    findings = told(config_on("cuda", model), Stand(log))
    assert log == [
        *("wake", "generate", "sleep", "log_probs", "update", "log_probs"),
        *("send 1", "wake", "generate", "sleep", "log_probs"),
    ]
    assert {finding.status for finding in findings.values()} == {Status.OK, Status.WARN}
    assert "moved log-probs by 1.0e+00" in findings["new weights"].text
    # A tiny model's estimate is a fraction of a GiB, and the stand-in says two.
    assert findings["memory of a rank"].status is Status.WARN
    assert "2.00 GiB of the GPU at its peak" in findings["memory of a rank"].text


def test_an_engine_that_keeps_its_weights_is_found_out(model: Path) -> None:
    findings = told(config_on("cpu", model), Stand([], takes_weights=False))
    assert findings["log-probs before an update"].status is Status.OK
    assert findings["new weights"].status is Status.FAIL
    assert findings["log-probs after it"].status is Status.FAIL
    assert findings["checksums"].status is Status.FAIL


def test_samples_are_as_a_runs_and_have_room(model: Path) -> None:
    config = config_on("cpu", model)
    batch = Trial(config, Stand([]), Report(), gpu_gib=0.0).sample(version=0)  # type: ignore[arg-type]
    assert len(batch) == PROMPTS
    assert int(batch["length"].sum()) <= config.policy.max_tokens
    assert np.all(batch["length"] <= config.longest_sequence)


@pytest.mark.parametrize(
    ("device", "placement", "dtype", "expected"),
    [("cpu", "auto", "auto", "float32"), ("cuda", "apart", "auto", "bfloat16"), ("cuda", "auto", "float32", "float32")],
)
def test_the_trial_has_devices_placement_and_type_of_the_run_and_is_one_that_a_run_would_take(
    model: Path, device: str, placement: str, dtype: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_on(device, model, placement, dtype)
    assert (config.policy.ranks, config.rollout.replicas) == (1, 1)
    assert Trial(config, Stand([]), Report(), gpu_gib=80.0).dtype == expected  # type: ignore[arg-type]
    # What a run needs beside it: data and a reward, which the trial has no use for.
    (tmp_path / "train.jsonl").write_text('{"prompt": "t3"}\n')
    (tmp_path / "reward.py").write_text("def reward(response):\n    return 0.0\n")
    config.data.train, config.reward.function = str(tmp_path / "train.jsonl"), f"{tmp_path}/reward.py:reward"
    check(config)
