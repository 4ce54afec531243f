"""The command around the checks: its options, its settings, and a Ray that does not come up."""

import json

import pytest
import ray

from ballast import doctor


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("without_ray")
def test_without_ray_this_machine_is_looked_at_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["resources.ray_address=10.0.0.1:6379"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "FAIL  Ray: Ray at 10.0.0.1:6379 could not be reached: refused"
    )
    assert [line[6:].partition(":")[0] for line in lines[1:5]] == [
        "versions",
        "GPUs",
        "speed",
        "/dev/shm",
    ]


@pytest.mark.usefixtures("without_ray")
def test_settings_that_cannot_be_read_are_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["run.sed=1"]) == 1
    assert capsys.readouterr().out.startswith(
        "FAIL  configuration: run.sed is not a setting; did you mean"
    )


@pytest.mark.usefixtures("without_ray")
def test_json_is_one_object_with_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "run.sed=1"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 1
    first = document["findings"][0]
    assert first.keys() == {"name", "status", "text", "advice"}
    assert (first["name"], first["status"]) == ("configuration", "fail")


def test_options_are_those_of_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--help"])
    assert (ended.value.code, doctor.main(["--no-such"])) == (0, 2)
    shown, refused = capsys.readouterr()
    assert all(
        "usage: python -m ballast doctor [--config FILE]" in text
        for text in (shown, refused)
    )
