"""Fitting a cost model to measured micro-batches: what is recovered, what is reported, what is refused."""

import numpy as np
import pytest

from balancing import CostModel
from balancing.analysis.distributions import draw
from balancing.errors import CostModelError, LengthError, WeightError

TRUE = CostModel(2e-6, 3e-11, "second")
OVERHEAD = 0.004


def measured(
    noise: float = 0.0, count: int = 40, model: CostModel = TRUE, overhead: float = OVERHEAD
):
    """Micro-batches of mixed lengths, and their seconds with multiplicative noise."""
    rng = np.random.default_rng(0)
    lengths = draw("reasoning", 4096, 0)
    micro_batches = [rng.choice(lengths, rng.integers(1, 24)) for _ in range(count)]
    seconds = np.array([overhead + model.workload(batch).sum() for batch in micro_batches])
    return micro_batches, seconds * rng.normal(1.0, noise, count)


def test_exact_measurements_are_recovered():
    fit = CostModel.fit(*measured())
    assert fit.model.linear == pytest.approx(TRUE.linear)
    assert fit.model.quadratic == pytest.approx(TRUE.quadratic)
    assert fit.overhead_seconds == pytest.approx(OVERHEAD)
    assert fit.model.unit == "second"
    assert fit.relative_error == pytest.approx(0.0, abs=1e-9)
    assert fit.measurements == 40


def test_the_reported_error_is_the_noise_of_the_times():
    micro_batches, seconds = measured(noise=0.02, count=400)
    fit = CostModel.fit(micro_batches, seconds)
    assert fit.relative_error == pytest.approx(0.02, rel=0.15)
    assert fit.model.quadratic == pytest.approx(TRUE.quadratic, rel=0.05)
    predicted = [
        fit.overhead_seconds + fit.model.workload(lengths).sum()
        for lengths in micro_batches
    ]
    by_hand = predicted / seconds - 1.0
    assert fit.relative_error == pytest.approx(np.sqrt(np.mean(by_hand**2)))


def test_no_coefficient_is_negative():
    # Times that grow more slowly than linearly would ask for a negative quadratic term.
    micro_batches = [[length] for length in (100, 200, 400, 800, 1600, 3200)]
    fit = CostModel.fit(micro_batches, [np.sqrt(batch[0]) for batch in micro_batches])
    assert fit.model.quadratic == 0.0
    assert fit.model.linear > 0
    assert fit.overhead_seconds > 0


def test_the_best_non_negative_fit_is_found():
    # Against a fine grid of non-negative coefficients around it: none has a smaller error.
    micro_batches, seconds = measured(noise=0.3, count=12, overhead=0.0)
    fit = CostModel.fit(micro_batches, seconds)
    found = np.array([fit.overhead_seconds, fit.model.linear, fit.model.quadratic])
    scale = np.array([OVERHEAD, TRUE.linear, TRUE.quadratic])
    terms = np.array(
        [(1.0, np.sum(batch), np.sum(np.square(batch))) for batch in micro_batches]
    )

    def error(coefficients):
        return np.sqrt(np.mean((terms @ coefficients / seconds - 1.0) ** 2))

    assert error(found) == pytest.approx(fit.relative_error)
    for step in np.stack(np.meshgrid(*[[-0.05, -0.001, 0.0, 0.001, 0.05]] * 3), -1).reshape(
        -1, 3
    ):
        assert error(np.maximum(found + step * scale, 0.0)) >= fit.relative_error - 1e-12


@pytest.mark.parametrize(
    ("micro_batches", "seconds", "error", "words"),
    [
        ([[5], [6], [7]], [1, 2, 3], CostModelError, "3 measurements"),
        ([[5], [6], [7], [8]], [1, 2, 3], CostModelError, "4 micro-batches with 3 seconds"),
        ([[5]] * 6, [1.0] * 6, CostModelError, "too similar"),
        (
            [[512] * count for count in range(1, 9)],
            list(range(1, 9)),
            CostModelError,
            "short sequences and of long",
        ),
        ([[5], [60], [700], [8000]], [1, 0, 2, 3], CostModelError, r"seconds\[1\] is 0"),
        (
            [[5], [60], [700], [8000]],
            [1, np.nan, 2, 3],
            WeightError,
            r"seconds\[1\] is nan",
        ),
        (
            [[5], [60, 0], [700], [8000]],
            [1, 1, 2, 3],
            LengthError,
            r"micro_batches\[1\]\[1\] is 0",
        ),
        (
            [[10], [100] * 9, [1000], [10] * 7],
            [1.0, 1.0, 1.0, 1.0],
            CostModelError,
            "do not grow",
        ),
    ],
)
def test_measurements_that_tell_nothing_are_refused(micro_batches, seconds, error, words):
    with pytest.raises(error, match=words):
        CostModel.fit(micro_batches, seconds)


def test_sums_say_as_much_as_the_lengths():
    micro_batches, seconds = measured(noise=0.02)
    tokens, squared = (
        [np.sum(np.power(batch, p, dtype=np.int64)) for batch in micro_batches]
        for p in (1, 2)
    )
    assert CostModel.fit_sums(tokens, squared, seconds) == CostModel.fit(
        micro_batches, seconds
    )
    with pytest.raises(CostModelError, match="differ in length"):
        CostModel.fit_sums(tokens[:-1], squared, seconds)
