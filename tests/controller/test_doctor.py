"""The command around the checks: its options, its settings, and a Ray that does not come up."""

from pathlib import Path
from typing import Any

import pytest
import ray

from controller import doctor
from controller.diagnosis import examination
from controller.diagnosis.findings import Status, ok
from tests.controller.config_workspace import write_workspace


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("without_ray")
def test_without_ray_this_machine_is_looked_at_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["resources.ray_address=10.0.0.1:6379"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  Ray: ResourceError: Ray at 10.0.0.1:6379 could not be reached: refused")
    assert [line[6:].partition(":")[0] for line in lines[1:4]] == ["versions", "driver", "GPUs"]


@pytest.mark.usefixtures("without_ray")
def test_settings_that_cannot_be_read_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["policy.max_token=1"]) == 1
    assert capsys.readouterr().out.startswith("FAIL  configuration: policy.max_token is not a setting; did you mean")


def test_options_are_those_of_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--help"])
    assert (ended.value.code, doctor.main(["--no-such"])) == (0, 2)
    shown, refused = capsys.readouterr()
    assert all("usage: python -m controller.doctor [--config FILE]" in text for text in (shown, refused))


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None) -> examination.Examination:
    """Of a run in a workspace, on the session's Ray, without ranks and engines."""
    config = doctor.load(write_workspace(tmp_path), [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'a/b'}"])
    monkeypatch.setattr(examination, "time_all_reduce", lambda config, ranks: ok("all-reduce", f"{ranks} ranks"))
    return examination.Examination(config, doctor.Report(), of_a_run=True, model="given", folder=tmp_path / "made")


def test_every_check_is_made_though_those_before_it_fail(
    examined: examination.Examination, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("broken")

    tried: list[str] = []
    monkeypatch.setattr(examination, "time_all_reduce", broken)
    monkeypatch.setattr(examination.cluster, "fits", broken)
    monkeypatch.setattr(examination.trial, "run_trial", lambda config, *_: tried.append(config.model.path))
    examined.of_the_cluster()
    failed = {finding.name: finding.text for finding in examined.report.findings if finding.status is Status.FAIL}
    assert failed == {"the run's place": "RuntimeError: broken", "all-reduce": "RuntimeError: broken"}
    assert tried == ["given"]
    assert {"versions", "run.dir", "Ray"} <= {finding.name for finding in examined.report.findings}
    assert not (tmp_path / "a").exists()  # run.dir was made to be looked at


def test_a_run_folder_that_cannot_be_made_is_told(examined: examination.Examination, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file where a folder should be")
    with examined.marked_folder() as marked:
        assert marked == ("", "")
    (found,) = examined.report.findings
    assert (found.name, found.status) == ("run.dir", Status.FAIL)


def test_without_a_model_a_tiny_one_is_made(
    examined: examination.Examination, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used: list[str] = []
    examined.model = ""
    monkeypatch.setattr(examination.trial, "run_trial", lambda config, *_: used.append(config.model.path))
    examined.of_the_cluster()
    assert used == [str(tmp_path / "made")]
    assert (tmp_path / "made" / "config.json").is_file()
