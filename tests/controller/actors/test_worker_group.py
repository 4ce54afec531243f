import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from balancing import plan_batch
from controller.actors.launch import worker_arguments
from controller.actors.layout import Pool
from controller.actors.resources import reserve
from controller.actors.worker_group import LOST_SECONDS, GroupFuture, Share, WorkerGroup
from controller.config import load
from tests.controller.actors.arithmetic_worker import ArithmeticWorker, OnTwoNodes
from tests.controller.config_workspace import write_workspace
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import RemoteBatch
from workers.errors import ResourceError, WorkerError


@pytest.fixture(scope="module")
def group(ray_session) -> Iterator[WorkerGroup]:
    bundles = reserve(Pool("arithmetic", ({"CPU": 0.5},) * 4), 30)
    group = WorkerGroup(
        "arithmetic", ArithmeticWorker, bundles, Share(0.5), dp=2, tp=2, timeout_s=120
    )
    yield group
    group.stop()
    bundles.release()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("threads", [0, 3])
def test_the_ranks_of_a_node_share_its_cores(ray_session, threads: int) -> None:
    bundles = reserve(Pool("nodes", ({"CPU": 0.5},) * 3), 30)
    group = WorkerGroup(
        "nodes", OnTwoNodes, bundles, Share(0.5), dp=3, arguments={"threads": threads}
    )
    try:
        cores = len(os.sched_getaffinity(0))
        assert group.threads() == (
            [threads] * 3 if threads else [max(1, cores // 2)] * 2 + [cores]
        )
    finally:
        group.stop()
        bundles.release()


@pytest.mark.parametrize("value", ["none", "optimizer", "all"])
def test_settings_of_offload_reach_the_ranks_that_train(tmp_path: Path, value: str) -> None:
    overrides = [
        "model.path=Qwen/Qwen3-30B-A3B",
        f"policy.cpu_offload={value}",
        "reference.cpu_offload=true",
        "resources.device=cuda",
    ]
    config = load(write_workspace(tmp_path), overrides)
    policy, reference = (
        worker_arguments(config, "policy"),
        worker_arguments(config, "reference"),
    )
    assert (policy["cpu_offload"], policy["optimizer_offload"]) == (
        value == "all",
        value == "optimizer",
    )
    assert reference["cpu_offload"]
    assert "optimizer_offload" not in reference


def batch_of(lengths: list[int]) -> RemoteBatch:
    """Rows of 0, 1, 2, ... in one block."""
    block = DataProto.from_rows(
        [{"input_ids": np.full(n, i, np.int32)} for i, n in enumerate(lengths)]
    )
    return RemoteBatch.of_block(
        ray.put(block), {"length": np.array(lengths)}, ["input_ids"]
    )


def test_actors_have_readable_names(group: WorkerGroup) -> None:
    assert group.names == [
        f"arithmetic dp={dp} tp={tp}" for dp in range(2) for tp in range(2)
    ]
    assert len({facts["pid"] for facts in group.facts()}) == 4
    assert ray.get_actor("arithmetic dp=1 tp=0") is not None


def test_the_ranks_share_a_process_group(group: WorkerGroup) -> None:
    assert group.ranks_sum() == [6, 6, 6, 6]


def test_the_process_group_uses_the_interface_that_ray_uses(group: WorkerGroup) -> None:
    (expected, used), *others = group.interface()
    assert expected
    assert used == os.environ.get("GLOO_SOCKET_IFNAME", expected)
    assert others == [(expected, used)] * 3


def test_calls_to_all_to_rank_zero_and_by_reference(group: WorkerGroup) -> None:
    assert group.double(3) == [6] * 4
    assert group.answer() == 40
    reference, metrics = group.large()
    assert ray.get(reference).tolist() == [0, 1, 2, 3, 4]
    assert metrics["ranks"].value == 2  # one answer for each dp group


@pytest.mark.parametrize("lengths", [[3, 1, 2, 5, 4], [7], [2, 2, 2, 2, 2, 2, 2]])
def test_a_batch_under_a_plan_comes_back_in_its_order(
    group: WorkerGroup, lengths: list[int]
) -> None:
    plan = plan_batch(
        lengths, ranks=2, mini_batches=[np.arange(len(lengths))], max_tokens=8
    )
    batch = batch_of(lengths)
    result = group.doubled(batch, plan)
    assert result.metrics["rows"].value == len(lengths)
    assert result.metrics["tokens"].value == sum(lengths)
    gathered = batch.with_tokens(doubled=result.tokens["doubled"]).gather()
    rows = [gathered.row(row)["doubled"].tolist() for row in range(len(lengths))]
    assert rows == [[2 * i] * n for i, n in enumerate(lengths)]


def test_an_unknown_method_is_named(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="no dispatched method 'tripled'"):
        group.tripled  # noqa: B018


def test_a_failing_rank_is_named_while_the_others_hang(ray_session) -> None:
    bundles = reserve(Pool("failing", ({"CPU": 0.5},) * 2), 30)
    group = WorkerGroup(
        "failing", ArithmeticWorker, bundles, Share(0.5), dp=2, timeout_s=120
    )
    try:
        with pytest.raises(
            WorkerError,
            match=r"(?s)^failing dp=1 failed in failing\.fail_on: RuntimeError.*in fail_on.*out of cheese",
        ):
            group.fail_on(1)
        late: Callable = group.double.remote(1).result
        with pytest.raises(
            WorkerError,
            match=r"failing\.double did not finish within 0\.5 s on failing dp=0",
        ):
            late(timeout_s=0.5)
        with pytest.raises(LookupError, match="seen while waiting"):
            late(meanwhile=raise_what_was_seen)
    finally:
        group.stop()
        bundles.release()


@ray.remote(num_cpus=0)
def fail_or_hang(fails: bool) -> None:
    if fails:
        raise RuntimeError("out of cheese")
    time.sleep(60)


def test_a_wait_for_lost_ranks_may_end_between_two_looks_at_the_clock(
    ray_session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last moment of the wait is there at one look, and over at the next."""
    refs = [fail_or_hang.remote(True), fail_or_hang.remote(False)]
    times = iter([0.0, LOST_SECONDS - 1e-6, LOST_SECONDS + 1e-6])
    monkeypatch.setattr(
        "controller.actors.worker_group.time",
        SimpleNamespace(monotonic=lambda: next(times)),
    )
    with pytest.raises(
        WorkerError, match=r"rank 0 failed in the call: RuntimeError.*out of cheese"
    ):
        GroupFuture("the call", ["rank 0", "rank 1"], refs, lambda: None).result()
    ray.cancel(refs[1], force=True)


def raise_what_was_seen() -> None:
    raise LookupError("seen while waiting")


def test_missing_resources_are_named(ray_session) -> None:
    with pytest.raises(
        ResourceError,
        match=r"'huge'.*492 CPU missing in the whole cluster.*free of 8.*policy.data_parallel",
    ):
        reserve(Pool("huge", ({"CPU": 250.0},) * 2), 30)
    with pytest.raises(ResourceError, match="1 GPU missing in the whole cluster"):
        reserve(Pool("gpu", ({"GPU": 1.0},)), 30)
