"""A run that was recorded with run.record_samples is audited with all that its steps knew."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray

from balancing import CostModel
from ballast.audit.__main__ import main
from ballast.audit.ballast_run import read_recorded_step, recorded_steps
from ballast.audit.checks import check_step
from ballast.audit.finding import Finding, Verdict
from ballast.replay.__main__ import Start, open_recorded_run, replay_settings
from controller.config import Config, to_yaml
from controller.engines.engine_pool import EnginePool
from controller.observability.run_folder import log_probs_file, step_file, update_file
from controller.run import Run
from tests.ballast.replay.test___main__ import RECORDED, LocalReplay, Store
from tests.controller.stand_ins.roles import LocalRun
from workers.config.roles import RolloutConfig
from workers.errors import DataError

NewRun = Callable[..., LocalRun]


class RecordedReplay(LocalReplay):
    """A replay that is recorded in its folder."""

    def _run(self, config: Config) -> Run:
        config = replay_settings(config, Start(None, range(1, 2)), self.folder)
        session = self._session(
            config, EnginePool(lambda replica, attempt: None, RolloutConfig(replicas=0))
        )
        return open_recorded_run(config, session, self.folder, CostModel(1.0, 0.0))


@pytest.fixture
def recorded_run(local_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> NewRun:
    """Makes runs whose rewards differ within groups."""
    store = Store()
    monkeypatch.setattr(ray, "put", store.put)
    monkeypatch.setattr(ray, "get", store.get)

    def fit(*overrides: str) -> LocalRun:
        run = local_run(*RECORDED, *overrides)
        run.rewards.reward = lambda uid, sample, greedy: float(sample * (int(uid) % 3))
        run.fit()
        (run.folder / "config.yaml").write_text(to_yaml(run.config))
        return run

    return fit


def findings_of(folder: Path, step: int) -> dict[str, Finding]:
    return {
        finding.name: finding for finding in check_step(read_recorded_step(folder, step))
    }


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.advantage=dr_grpo",),
        ("algorithm.advantage=rloo", "batch.split_by=group"),
        ("algorithm.normalize_by_std=false",),
        ("algorithm.zero_variance_groups=drop",),
        ("batch.replay.share=0.5",),
        ("algorithm.loss.kl_coefficient=0.1",),
    ],
    ids=lambda overrides: overrides[0] if overrides else "plain",
)
def test_advantages_of_a_recorded_run_follow_from_its_rewards(
    recorded_run: NewRun, overrides: tuple[str, ...]
) -> None:
    run = recorded_run(*overrides)
    steps = recorded_steps(run.folder)
    assert steps
    for step in steps:
        findings = findings_of(run.folder, step)
        assert findings["advantages.estimator"].verdict is Verdict.PASSED
        assert findings["advantages.tokens"].verdict is Verdict.PASSED
        assert findings["selection.group_sizes"].verdict is Verdict.PASSED


def test_mini_batches_and_log_probs_are_those_of_the_update(recorded_run: NewRun) -> None:
    run = recorded_run("algorithm.loss.kl_coefficient=0.1")
    bundle = read_recorded_step(run.folder, 1)
    trained = bundle.rows["trained"].astype(bool)
    assert set(bundle.rows["mini_batch"][trained]) == {0, 1}
    for name in ("old_logprobs", "reference_logprobs"):
        np.testing.assert_array_equal(bundle.tokens[name] % 1, 0)
        assert bundle.tokens[name].any()
    assert bundle.has("new_logprobs")
    log_probs_file(run.folder, 1).unlink()
    assert "version" in read_recorded_step(run.folder, 1).missing["new_logprobs"]


def test_an_advantage_that_was_changed_on_disk_is_found(
    recorded_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run()
    path = update_file(run.folder, 2)
    with np.load(path) as arrays:
        changed = dict(arrays)
    changed["advantages"] = -changed["advantages"]
    np.savez(path, **changed)
    assert main([str(run.folder), "--json"]) == 1
    causes = {}
    for step in json.loads(capsys.readouterr().out)["steps"]:
        causes[step["step"]] = {
            finding["name"]: finding["cause"] for finding in step["findings"]
        }
    assert causes[2]["advantages.estimator"] == "sign_flipped"
    assert causes[1]["advantages.estimator"] == ""


def test_a_replay_equals_its_run_to_the_bit_and_parts_where_a_reward_was_changed(
    recorded_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run()
    replayed = RecordedReplay(tmp_path / "replay", *RECORDED)
    replayed.all_of(run)
    replayed.close()
    (replayed.folder / "config.yaml").write_text(to_yaml(run.config))
    assert main([str(run.folder), str(replayed.folder)]) == 0
    assert "advantages" in capsys.readouterr().out
    path = step_file(replayed.folder, 2)
    with np.load(path) as arrays:
        changed = dict(arrays)
    scores = json.loads(changed["scores"].tobytes())
    scores[3]["reward"] += 1
    changed["scores"] = np.frombuffer(json.dumps(scores).encode(), np.uint8)
    np.savez(path, **changed)
    assert main([str(run.folder), str(replayed.folder), "--json"]) == 1
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert (difference["step"], difference["stage"], difference["row"]) == (2, "rewards", 3)


def test_broken_files_of_a_run_are_one_line(
    recorded_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded_run().folder
    update = update_file(folder, 1)
    update.write_bytes(update_file(folder, 2).read_bytes()[:200])
    with pytest.raises(DataError, match="cannot be read"):
        read_recorded_step(folder, 1)
    path = step_file(folder, 2)
    np.savez(path, trained=np.array([object()], dtype=object))
    assert main([str(folder), "--step", "2"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "cannot be read" in error


def test_a_run_without_samples_says_what_records_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    assert main([str(tmp_path)]) == 2
    assert "run.record_samples=true" in capsys.readouterr().err
