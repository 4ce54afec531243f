"""The trial by the real driver and actors on GPUs that are stand-ins, with a ledger of who owns them."""

from pathlib import Path

import pytest

from controller.config import load
from controller.diagnosis.findings import Report
from controller.diagnosis.trial import Compared, Trial, run_trial, trial_config
from tests.controller.stand_ins.run import StandIns, write_stand_in_workspace

MISMATCH = ("rollout_mismatch_mean", "rollout_mismatch_max")


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_no_two_owners_have_a_gpu_at_one_time(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stand_in_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    StandIns(monkeypatch)  # its ledger raises where two owners meet
    compare, compared = Trial.compare, []

    def noted(trial: Trial, batch: object) -> Compared:
        compared.append(compare(trial, batch))  # type: ignore[arg-type]
        return compared[-1]

    monkeypatch.setattr(Trial, "compare", noted)
    # Every pass is made; the stand-ins have neither log-probs nor weights to compare.
    monkeypatch.setattr("controller.diagnosis.trial.results", lambda metrics: dict.fromkeys(MISMATCH, 0.0))
    monkeypatch.setattr(Trial, "sent_checksums", lambda trial: {})
    monkeypatch.setattr(Trial, "engine_checksums", lambda trial: {})
    asked = load(None, ["model.path=none", "run.name=r", "resources.device=cuda", f"rollout.placement={placement}"])
    report = Report()
    run_trial(trial_config(asked, "model"), report, gpu_gib=80.0)
    assert len(compared) == 3
    assert report.findings[0].text.endswith(placement)
    assert report.findings[-1].name == "memory of a rank"
