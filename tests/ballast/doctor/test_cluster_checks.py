"""The checks that ask Ray, and their order."""

from pathlib import Path
from typing import Any

import pytest
import ray

from ballast import doctor
from ballast.doctor import smoke_test
from ballast.doctor.cluster_checks import (
    Node,
    check_cluster,
    check_offered,
    look_at,
    marked_folder,
    requirements,
)
from ballast.doctor.report import Report, Status, ok
from controller.config import load
from tests.controller.config_workspace import write_workspace

GIB = 2**30


def node(address: str, **resources: float) -> Node:
    return {
        "NodeID": "ab" * 28,
        "NodeManagerAddress": address,
        "Resources": resources,
        "Alive": True,
    }


def test_a_task_on_every_node_brings_its_findings_and_a_lost_node_an_error(
    ray_session: None,
) -> None:
    (here,) = ray.nodes()
    found = look_at([here, node("10.0.0.9")], ["torch"])
    findings, _ = found[here["NodeManagerAddress"]]
    assert {each.name: each.status for each in findings}["versions"] is Status.OK
    ((lost,), gpus) = found["10.0.0.9"]
    assert (lost.name, lost.status, gpus) == ("node", Status.FAIL, 0)


@pytest.mark.parametrize(
    ("gpus", "seen", "on_gpus", "status"),
    [
        (0.0, 0, False, Status.OK),
        (8.0, 8, True, Status.OK),
        (0.0, 8, True, Status.FAIL),
        (0.0, 0, True, Status.FAIL),
    ],
)
def test_ray_must_offer_the_gpus_that_torch_sees(
    gpus: float, seen: int, on_gpus: bool, status: Status
) -> None:
    found = check_offered(
        [node("10.0.0.1", CPU=16.0, GPU=gpus, object_store_memory=8.0 * GIB)], seen, on_gpus
    )
    assert found.status is status
    assert (
        f"1 node, 16 CPUs, {gpus:g} GPUs, object store of 8.0 GiB on a node" in found.text
    )


def test_requirements_are_those_that_this_project_declares() -> None:
    torch, ray_, *_, vllm = requirements(on_gpus=True)
    assert (torch, ray_, vllm) == ("torch==2.13.0", "ray>=2.60", "vllm==0.32.0")


def test_every_check_is_made_though_those_before_it_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ray_session: None
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("broken")

    tried: list[str] = []
    monkeypatch.setattr(smoke_test, "all_reduce", broken)
    monkeypatch.setattr(
        smoke_test, "train_two_steps", lambda config, _: tried.append(config.model.path)
    )
    config = load(
        write_workspace(tmp_path),
        [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'a/b'}"],
    )
    (tmp_path / "made").mkdir()
    report = Report()
    check_cluster(config, report, tmp_path / "made", of_a_run=True, model="given")
    failed = {
        finding.name: finding.text
        for finding in report.findings
        if finding.status is Status.FAIL
    }
    assert failed == {"all-reduce": "RuntimeError: broken"}
    assert tried == ["given"]
    assert {"versions", "run.dir", "Ray"} <= {finding.name for finding in report.findings}
    assert not (tmp_path / "a").exists()  # run.dir was made to be looked at


def test_a_run_folder_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file where a folder should be")
    report = Report()
    with marked_folder(str(tmp_path / "a" / "b"), report) as marker:
        assert marker == ""
    (found,) = report.findings
    assert (found.name, found.status) == ("run.dir", Status.FAIL)


def test_without_a_model_a_tiny_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    used: list[str] = []
    monkeypatch.setattr(smoke_test, "all_reduce", lambda *_: ok("all-reduce", ""))
    monkeypatch.setattr(
        smoke_test, "train_two_steps", lambda config, _: used.append(config.model.path)
    )
    check_cluster(load(None, doctor.ANYWHERE), Report(), tmp_path, of_a_run=False, model="")
    assert used == [str(tmp_path / "model")]
    assert (tmp_path / "model" / "config.json").is_file()
