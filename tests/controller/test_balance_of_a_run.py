"""What a configuration makes of balance: whole runs on stand-ins, from settings to metrics."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from balancing import Plan, plan_batch, plan_statistics
from balancing.__main__ import main
from balancing.analysis.lengths_file import read_lengths, recorded_arguments, run_step
from balancing.basics.grouping import Grouping
from balancing.search.assignment import karmarkar_karp_twice
from tests.controller.stand_ins.run import StandIns

Run = Callable[..., dict[str, float]]


@pytest.fixture
def run(stand_ins: StandIns, tmp_path: Path) -> Run:
    """The metrics of the only step of a run."""

    def metrics(*overrides: str) -> dict[str, float]:
        (step,) = stand_ins.run(
            [f"run.dir={tmp_path}", "run.steps=1", *overrides]
        ).outcome.steps
        return step

    return metrics


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many mini-batches a run planned, and how many of them began with largest differencing."""
    counted = {"mini_batches": 0, "karmarkar_karp": 0}

    def planned(*arguments: object, **settings: object) -> Plan:
        plan = plan_batch(*arguments, **settings)  # type: ignore[arg-type]
        counted["mini_batches"] += len(plan.mini_batches)
        return plan

    def begun(weights: np.ndarray, ranks: int, steps: int) -> Grouping:
        counted["karmarkar_karp"] += 1
        return karmarkar_karp_twice(weights, ranks, steps)

    monkeypatch.setattr("controller.planning.planner.plan_batch", planned)
    monkeypatch.setattr("balancing.search.assignment.karmarkar_karp_twice", begun)
    return counted


def test_p8_p9_m5_every_mini_batch_of_a_default_run_begins_with_karmarkar_karp(
    run: Run, moves: dict[str, int]
) -> None:
    metrics = run("batch.mini_batches=2", "batch.prompts_per_step=4")
    assert moves["mini_batches"] >= 2
    assert moves["karmarkar_karp"] >= moves["mini_batches"]
    assert metrics["balance/from_karmarkar_karp"] == 1.0


@pytest.mark.parametrize(("algorithm", "share"), [("load_balance", 1.0), ("none", 0.0)])
def test_p8_load_balance_is_another_name_and_none_is_not(
    run: Run, moves: dict[str, int], algorithm: str, share: float
) -> None:
    assert run(f"balance.algorithm={algorithm}")["balance/from_karmarkar_karp"] == share
    assert (moves["karmarkar_karp"] > 0) == bool(share)


def test_v3_d7_a_step_tells_three_imbalances_and_the_padding_that_is_not_computed(
    run: Run,
) -> None:
    metrics = run()
    given, alone, planned = (
        metrics[f"balance/imbalance{when}/micro_steps"]
        for when in ("_before", "_karmarkar_karp", "")
    )
    assert given >= planned - 1e-9 and alone >= 0.0
    # 4 sequences in a tensor of 8 + 8 tokens; nothing is padded.
    tokens = metrics["tokens/update"]
    assert metrics["balance/padding_removed/width"] == pytest.approx(1 - tokens / (4 * 16))
    assert (
        metrics["balance/padding_removed/longest_row"]
        < metrics["balance/padding_removed/width"]
    )


def test_the_command_explains_a_step_with_what_the_run_planned_with(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run(
        "batch.mini_batches=2", "batch.split_by=group", "batch.prompts_per_step=4"
    )
    record = run_step(tmp_path / "run")
    groups, arguments = np.array(record["groups"]), recorded_arguments(record)
    first, second = arguments["mini_batches"]
    assert not set(groups[first]) & set(groups[second])
    plan = plan_batch(read_lengths(tmp_path / "run"), **arguments)
    assert (
        plan_statistics(plan)["predicted_time/total"]
        == metrics["balance/predicted_time/total"]
    )
    capsys.readouterr()
    assert main([str(tmp_path / "run")]) == 0
    assert "ranks: 2, mini-batches: 2, max_tokens=64" in " ".join(
        capsys.readouterr().out.split()
    )
