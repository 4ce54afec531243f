"""Engines and trainer that do not agree stop a run, before it learns from the difference or saves what came
of it.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from controller.algorithm.logprob_check import (
    LARGEST,
    MEAN,
    AtEqualWeights,
    LogProbCheck,
    beyond,
    compares_exactly,
)
from controller.config import Config, load
from tests.controller.stand_ins.run import StandInRun, StandIns
from workers.batch.metrics import TOLERANCE, Metric
from workers.errors import MismatchError

Run = Callable[..., StandInRun]
NAN = math.nan


@pytest.mark.parametrize(
    ("mean", "dtype", "equal_weights", "text"),
    [
        (1e-5, "float32", AtEqualWeights.FIRST, ""),
        (
            2e-3,
            "float32",
            AtEqualWeights.FIRST,
            "at the weights that the engines were sent",
        ),
        (
            2e-3,
            "float32",
            AtEqualWeights.CHANGED,
            "at the first weights that an update has changed",
        ),
        (2e-3, "float32", AtEqualWeights.NONE, ""),
        (2e-3, "bfloat16", AtEqualWeights.FIRST, ""),
        (TOLERANCE["float32"], "float32", AtEqualWeights.FIRST, ""),
        (0.5, "bfloat16", AtEqualWeights.NONE, ""),
        (0.2, "bfloat16", AtEqualWeights.FIRST, "more than rounding in bfloat16"),
        (0.2, "bfloat16", AtEqualWeights.NONE, ""),
        (
            0.6,
            "bfloat16",
            AtEqualWeights.NONE,
            r"0.6 nats a token .* above policy.max_mismatch=0.5. .*ballast.doctor",
        ),
        (math.inf, "float32", AtEqualWeights.NONE, "above policy.max_mismatch"),
        (NAN, "float32", AtEqualWeights.NONE, "differ by NaN"),
        (NAN, "bfloat16", AtEqualWeights.CHANGED, "differ by NaN"),
    ],
)
def test_only_rounding_may_differ_at_equal_weights(
    mean: float, dtype: str, equal_weights: AtEqualWeights, text: str
) -> None:
    found = beyond(mean, 2 * mean, 0.5, dtype, equal_weights)
    assert bool(found) == bool(text)
    assert re.search(text, found)


def config(*overrides: str) -> Config:
    required = (
        "run.name=run",
        "model.path=model",
        "data.train=train.jsonl",
        "resources.device=cpu",
    )
    return load(None, [*required, *overrides])


def watch(*overrides: str) -> LogProbCheck:
    return LogProbCheck(config(*overrides), first_version=4)


def versions(*numbers: int) -> np.ndarray:
    return np.array(numbers)


def mismatch(mean: float) -> dict[str, Metric]:
    return {MEAN: Metric.mean(3 * mean, 3, "tokens"), LARGEST: Metric.max(mean)}


def test_the_first_weights_and_the_first_changed_ones_are_proved_once_each() -> None:
    watching = watch()
    assert (
        watching.at_equal_weights(versions(4, 4), versions(4, 4), 4) is AtEqualWeights.FIRST
    )
    watching.compare(1, mismatch(1e-6), AtEqualWeights.FIRST)
    assert (
        watching.at_equal_weights(versions(4, 4), versions(4, 4), 4) is AtEqualWeights.NONE
    )
    assert (
        watching.at_equal_weights(versions(5, 5), versions(5, 5), 5)
        is AtEqualWeights.CHANGED
    )
    watching.compare(2, mismatch(1e-6), AtEqualWeights.CHANGED)
    assert (
        watching.at_equal_weights(versions(6, 6), versions(6, 6), 6) is AtEqualWeights.NONE
    )


def test_samples_of_older_weights_prove_nothing() -> None:
    watching = watch()
    assert (
        watching.at_equal_weights(versions(4, 5), versions(5, 5), 5) is AtEqualWeights.NONE
    )
    assert (
        watching.at_equal_weights(versions(4, 4), versions(4, 4), 5) is AtEqualWeights.NONE
    )


def test_a_pass_that_says_nothing_proves_nothing() -> None:
    watching = watch()
    watching.compare(1, {}, AtEqualWeights.FIRST)
    watching.compare(1, {MEAN: Metric.mean(0, 0, "tokens")}, AtEqualWeights.FIRST)
    assert watching.at_equal_weights(versions(4), versions(4), 4) is AtEqualWeights.FIRST


CUT = ("rollout.sampling.top_p=0.9", "rollout.sampling.temperature=0.7")


@pytest.mark.parametrize("overrides", [CUT, ("rollout.engine={quantization: fp8}",)])
def test_a_cut_distribution_or_a_coarser_engine_is_held_to_the_limit_alone(
    overrides: tuple[str, ...],
) -> None:
    assert not compares_exactly(config(*overrides))
    watching = watch(*overrides)
    assert watching.at_equal_weights(versions(4), versions(4), 4) is AtEqualWeights.NONE
    with pytest.raises(MismatchError, match=r"step 7: .* above policy\.max_mismatch=0\.5"):
        watching.compare(7, mismatch(0.6))


LONG = (
    "run.steps=6",
    "data.validation=''",
    "rollout.placement=apart",
    "run.checkpoint_every=1",
)


def optimizer_steps(stand_ins: StandIns) -> int:
    return sum(
        what == "update"
        for actor, what in stand_ins.world.ledger.events
        if actor == "policy dp=0"
    )


def newest_checkpoint(folder: Path) -> str:
    return max(path.name for path in (folder / "run" / "checkpoints" / "policy").iterdir())


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_weights_that_do_not_reach_the_engines_stop_the_run_before_the_second_update(
    stand_ins: StandIns, run_on_stand_ins: Run, tmp_path: Path, placement: str
) -> None:
    stand_ins.world.loses_updates = True
    with pytest.raises(
        MismatchError,
        match=r"step 2: .* differ by 0\.25 nats .* that an update has changed",
    ):
        run_on_stand_ins(*LONG, f"rollout.placement={placement}")
    assert optimizer_steps(stand_ins) == 1
    assert newest_checkpoint(tmp_path) == "step-1"
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("passes", ["batch.mini_batches=1", "batch.mini_batches=2"])
def test_log_probs_that_are_nan_stop_the_run(
    stand_ins: StandIns, run_on_stand_ins: Run, passes: str
) -> None:
    sent = []

    def spoil(actor: str, what: str) -> None:
        if (actor, what) == ("policy dp=0", "send"):
            sent.append(what)
            stand_ins.world.log_prob = NAN if len(sent) == 4 else stand_ins.world.log_prob

    stand_ins.world.trouble = spoil
    with pytest.raises(
        MismatchError, match="step 4: log-probs of engines and trainer differ by NaN"
    ):
        run_on_stand_ins(*LONG, passes)
