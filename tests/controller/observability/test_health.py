"""What a run says of itself when it does not learn."""

import math

import pytest

from controller.observability.health import SYMPTOMS, Health, warnings
from controller.observability.metric_table import spec_of

SIGNAL = "rollout/groups_without_signal"


def told(name: str, *values: float | None) -> list[str]:
    return warnings({"step": step, name: value} for step, value in enumerate(values, 1))


def test_every_symptom_is_of_a_metric_that_runs_record() -> None:
    assert all(spec_of(symptom.metric) for symptom in SYMPTOMS)


def test_three_steps_without_signal_in_a_row_are_told_once() -> None:
    (sentence,) = told(SIGNAL, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert sentence.startswith("steps 2 to 4: all rewards were equal in 100% of the groups")
    assert "rollout.samples_per_prompt" in sentence
    assert not told(SIGNAL, 1.0, 1.0, 0.5, 1.0, 1.0)


def test_a_symptom_that_was_gone_is_told_again_and_stands_once_in_the_report() -> None:
    shares = (1, 1, 1, 0, 1, 1, 1)
    health = Health()
    on_the_terminal = [
        sentence
        for step, share in enumerate(shares, 1)
        for sentence in health.see(step, {SIGNAL: share}).values()
    ]
    assert [sentence[:12] for sentence in on_the_terminal] == [
        "steps 1 to 3",
        "steps 5 to 7",
    ]
    (sentence,) = told(SIGNAL, *shares)
    assert sentence.startswith("steps 1 to 3")
    assert sentence.endswith("(told 2 times, the last at step 7)")


def test_entropy_that_falls_is_no_symptom_of_supervised_fine_tuning() -> None:
    steps = [
        {"step": step, "policy/entropy": value}
        for step, value in enumerate((2.0, 0.1, 0.1, 0.1), 1)
    ]
    assert warnings(steps)
    assert not warnings(steps, samples=False)


def test_a_step_that_updates_nothing_neither_shows_nor_ends_a_symptom() -> None:
    health = Health()
    steps = [
        {"policy/entropy": 2.0},
        {"policy/entropy": 0.1},
        {},
        {"policy/entropy": 0.1},
        {"policy/entropy": 0.1},
    ]
    assert [bool(health.see(number, step)) for number, step in enumerate(steps)] == [
        False,
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "good", "bad", "advice"),
    [
        (
            "policy/entropy",
            (2.0, 1.0, 0.5, 0.3),
            (2.0, 0.1, 0.1, 0.1),
            "policy.optimizer.learning_rate",
        ),
        ("policy/skipped_steps", (0, 1, 1, 0), (0, 1, 1, 1), "huge"),
        ("policy/grad_norm", (1.0, 1e6, 1e6, 1e6), (1.0, math.nan, math.inf, None), "huge"),
        (
            "policy/rollout_mismatch_mean",
            (1e-7, 5e-3, 5e-3, 5e-3),
            (1e-3, 0.02, 0.03, 0.04),
            "rollout.max_staleness",
        ),
    ],
)
def test_other_symptoms(name: str, good: tuple, bad: tuple, advice: str) -> None:
    assert not told(name, *good)
    (sentence,) = told(name, *bad)
    assert advice in sentence
