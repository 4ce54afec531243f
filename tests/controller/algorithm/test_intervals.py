import math
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.algorithm import validation_metrics
from controller.algorithm.validation_metrics import (
    BOOTSTRAP,
    WILSON,
    PromptValues,
    ScoredResponse,
    bootstrap,
    by_prompt,
    interval,
    summarize,
    wilson,
)

Z_95 = 1.959963984540054


@given(st.integers(1, 400), st.data())
def test_wilsons_ends_are_the_shares_that_the_found_one_is_z_deviations_from(
    trials: int, data: st.DataObject
) -> None:
    """Brute force: the ends of the set {p: |p_hat - p| <= z sqrt(p (1 - p) / n)}, each by bisection."""
    successes = data.draw(st.integers(0, trials))
    share = successes / trials

    def is_inside(p: float) -> bool:
        return abs(share - p) <= Z_95 * math.sqrt(p * (1 - p) / trials) + 1e-15

    def end(outside: float) -> float:
        inside = share
        if is_inside(outside):
            return outside
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
        return inside

    assert wilson(successes, trials, 0.95) == pytest.approx((end(0.0), end(1.0)), abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=2, max_size=4))
def test_the_bootstrap_is_the_quantiles_of_all_possible_draws(
    prompts: list[tuple[int, int]],
) -> None:
    """Brute force: every one of the n^n draws of n prompts, equally likely; quantiles a little to either
    side.
    """
    sums, counts = (
        np.array(column, dtype=np.float64) for column in zip(*prompts, strict=True)
    )
    draws = [list(draw) for draw in product(range(len(prompts)), repeat=len(prompts))]
    every = np.array([sums[draw].sum() / counts[draw].sum() for draw in draws])
    low, high = bootstrap(PromptValues(sums, counts), 0.8)
    ends = np.quantile(every, [0.06, 0.14, 0.86, 0.94], method="inverted_cdf")
    assert ends[0] - 1e-9 <= low <= ends[1] + 1e-9
    assert ends[2] - 1e-9 <= high <= ends[3] + 1e-9


def test_resamples_in_chunks_give_the_same_ends_and_hold_no_more_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 64 prompts in chunks of 128 resamples, of which the last has 80. All have 2,000 draws of seed 0."""
    sums = np.sqrt(np.arange(64.0))
    values = PromptValues(sums, np.arange(64.0) % 3 + 1)
    ends = bootstrap(values, 0.8)
    times = np.random.default_rng(0).multinomial(64, np.full(64, 1 / 64), size=2_000)
    means = np.sort((times @ sums) / (times @ values.counts))
    assert ends == pytest.approx((means[199], means[1799]))
    numbers = 64 * 128
    monkeypatch.setattr(validation_metrics, "NUMBERS_AT_A_TIME", numbers)
    tracemalloc.start()
    try:
        chunked_ends = bootstrap(values, 0.8)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert chunked_ends == ends
    # The chunk, its copy in float64, and a few lists of the means. All resamples at once take 2 MB.
    assert peak_bytes < 2 * 8 * numbers + 5 * 8 * validation_metrics.RESAMPLES


def test_wilson_is_for_prompts_that_are_right_or_wrong_and_the_bootstrap_for_the_rest() -> (
    None
):
    right = interval(PromptValues.of([1.0, 0.0, 1.0]))
    assert right is not None and right.method == WILSON
    shares = interval(PromptValues.of([1.0, 0.5, 1.0]))
    assert shares is not None and shares.method == BOOTSTRAP
    # Not [1, 1].
    assert interval(PromptValues.of([1.0] * 20)).low == pytest.approx(0.8389, abs=1e-4)
    assert interval(PromptValues.of([0.5, 0.5])) is None
    assert interval(PromptValues(np.array([1.0, 3.0]), np.array([2.0, 6.0]))) is None


def test_responses_to_one_prompt_count_as_one_observation() -> None:
    """Ten prompts, each always right or always wrong: 80 responses say no more than 10."""
    responses = [
        ScoredResponse(str(prompt), "sums", {"reward": float(prompt % 2)})
        for prompt in range(10)
        for _ in range(8)
    ]
    found = by_prompt(responses, "reward", 1.0)
    one = interval(found["pass@1"])
    assert (one.low, one.high) == wilson(5, 10, 0.95)
    reward = interval(found["reward"])
    assert reward.high - reward.low > 0.5
    assert summarize(responses, "reward", 1.0) == {
        name: values.value for name, values in found.items()
    }
