"""The all-reduce by real ranks, and the two steps on stand-ins; tests/end_to_end/test_doctor.py has the real
ones.
"""

from pathlib import Path

import pytest
import ray

from ballast.doctor import smoke_test
from ballast.doctor.report import Report, Status
from ballast.doctor.smoke_test import REDUCED_BYTES, judge_all_reduce
from controller.config import load
from controller.preflight.checks import check
from tests.controller.stand_ins.run import StandIns


def test_ranks_on_a_cpu_add_up_and_are_timed(ray_session: None) -> None:
    config = load(None, ["model.path=none", "run.name=doctor", "resources.device=cpu"])
    found = smoke_test.all_reduce(config, nodes=1, gpus=0)
    assert found.status is Status.OK
    assert found.text.startswith("16 MiB over 2 ranks by gloo in ")
    assert not [actor for actor in ray.util.list_named_actors() if actor.startswith("link")]


def test_a_rank_with_a_wrong_sum_is_named() -> None:
    found = judge_all_reduce([(0.1, 3.0), (0.1, 2.0), (0.1, 3.0)], "cpu")
    assert (found.status, found.text) == (
        Status.FAIL,
        "rank 1 got 2 where 3 ones add up to 3",
    )


def test_bandwidth_counts_what_a_rank_sends_and_receives() -> None:
    """8 ranks move 2 x 7/8 of 256 MiB each: 470 MB in 4.7 ms are 100 GB/s."""
    seconds = 1.75 * REDUCED_BYTES["cuda"] / 100e9
    found = judge_all_reduce([(seconds, 8.0)] * 8, "cuda")
    assert (found.status, found.text.endswith("100.00 GB/s")) == (Status.OK, True)
    slow = judge_all_reduce([(seconds, 8.0)] * 7 + [(100 * seconds, 8.0)], "cuda")
    assert (slow.status, slow.text.endswith("1.00 GB/s")) == (Status.WARN, True)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_the_two_steps_are_a_run_with_the_devices_placement_and_type_of_the_users(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandIns(monkeypatch)  # its ledger raises where two owners of a GPU meet
    asked = load(
        None,
        [
            "model.path=none",
            "run.name=r",
            "resources.device=cuda",
            f"rollout.placement={placement}",
        ],
    )
    asked.model.dtype = "float32"
    config = smoke_test.settings_for(
        asked, smoke_test.tiny_model(tmp_path / "model"), tmp_path
    )
    assert (config.policy.data_parallel, config.rollout.replicas, config.compute_dtype) == (
        1,
        1,
        "float32",
    )
    check(config)
    report = Report()
    smoke_test.train_two_steps(config, report)
    started, before, after = report.findings
    assert (started.name, started.text.endswith(placement)) == ("engine and rank", True)
    assert "nats a token" in before.text
    assert "weights were sent in" in after.text
    assert not (tmp_path / "doctor" / "model").exists(), "nothing is saved"
