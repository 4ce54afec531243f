"""Advantages: they follow from rewards and groups by the named estimator, or by another that is named.

rewards, groups --named estimator--> expected ==? recorded
                --otherwise: sign, other rewards, other groups, other estimators, a scale--> the one that fits
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.estimators import (
    EPSILONS,
    ESTIMATORS,
    SCALE_FREE,
    Samples,
    group_deviation,
)
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.token_sums import loss_tokens, row_sums, sum_rows, trained_rows

RELATIVE_BOUND = 2e-4
ROUNDING = 5e-7
"""Of a float32 reward, relative. A small standard deviation enlarges it."""
SMALL_SHARE = 0.34
"""Rows below this share are single rows that break, not another formula."""
FEWEST_OF_A_LINE = 4
NAME = "advantages.estimator"


@dataclass(frozen=True)
class Recorded:
    """samples: of the batch. advantages: of each, float64 [S]. rows: the first row of each, int64 [S]."""

    samples: Samples
    advantages: np.ndarray
    rows: np.ndarray

    def select(self, chosen: np.ndarray) -> "Recorded":
        samples = self.samples
        greedy = samples.greedy_rewards
        part = Samples(
            samples.rewards[chosen],
            np.unique(samples.group[chosen], return_inverse=True)[1],
            samples.tokens[chosen],
            None if greedy is None else greedy[chosen],
            samples.epsilon,
        )
        return Recorded(part, self.advantages[chosen], self.rows[chosen])


def check_spread(bundle: Bundle) -> Finding:
    """Check that advantages are finite, and one number a row unless the estimator is of tokens."""
    name = "advantages.tokens"
    checked = "advantages are finite, and equal within a row"
    highest, lowest, bad = _extremes(bundle)
    count = int(row_sums(bundle, "loss_mask").sum())
    if bad.any():
        rows = np.flatnonzero(bad)
        text = f"advantages are NaN or infinite in {len(rows)} rows"
        return failed(
            name, checked, count, Problem("not_finite", text, "Look at the rewards.", rows)
        )
    spread = np.where(highest >= lowest, highest - lowest, 0.0)
    scale = np.maximum(np.abs(highest), np.abs(lowest))
    with np.errstate(invalid="ignore"):
        varying = np.flatnonzero(spread > 1e-5 + RELATIVE_BOUND * scale)
    estimator = bundle.setting("estimator")
    residual = float(spread.max(initial=0.0))
    if not len(varying):
        return passed(name, checked, count, residual=residual)
    if estimator not in ESTIMATORS or bundle.facts.algorithm.kl_in_reward:
        return unknown(
            name, f"advantages are finite, and of tokens ({estimator})", "rewards of tokens"
        )
    text = f"advantages differ within {len(varying)} rows, but {estimator} gives a row one number"
    problem = Problem(
        "varies_within_row",
        text,
        "Values of other rows, or a mask, were mixed in.",
        varying,
    )
    return failed(name, checked, count, problem, residual=residual)


def _extremes(bundle: Bundle) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the highest and the lowest advantage of each row's loss tokens, and how many are not finite."""
    highest = np.full(bundle.row_count, -np.inf)
    lowest = np.full(bundle.row_count, np.inf)
    bad = np.zeros(bundle.row_count)
    for start, part in bundle.parts():
        places = loss_tokens(part)
        rows = np.searchsorted(part.offsets, places, side="right") - 1 + start
        values = part.token_column("advantages")[places].astype(np.float64)
        is_finite = np.isfinite(values)
        np.add.at(bad, rows[~is_finite], 1)
        np.maximum.at(highest, rows[is_finite], values[is_finite])
        np.minimum.at(lowest, rows[is_finite], values[is_finite])
    return highest, lowest, bad


def check_estimator(bundle: Bundle) -> Finding:
    """Check that advantages follow from rewards, or name what else explains them."""
    estimator = bundle.setting("estimator")
    checked = f"advantages follow from rewards by {estimator}"
    recorded = _read_samples(bundle)
    count = len(recorded.rows)
    if estimator not in ESTIMATORS:
        return unknown(NAME, checked, f"a formula for {estimator} from rewards alone")
    if not np.all(np.isfinite(recorded.samples.rewards)):
        rows = recorded.rows[~np.isfinite(recorded.samples.rewards)]
        problem = Problem(
            "not_finite",
            f"rewards are NaN or infinite in {len(rows)} rows",
            "Mend them.",
            rows,
        )
        return failed(NAME, checked, count, problem, unit="samples")
    epsilons = (
        EPSILONS
        if bundle.facts.algorithm.epsilon is None
        else (bundle.facts.algorithm.epsilon,)
    )
    excess, wrong = _best_fit(recorded, estimator, epsilons)
    details = {"unit": "samples", "bound": RELATIVE_BOUND, "residual": excess}
    if not len(wrong):
        return passed(NAME, checked, count, **details)
    # Advantages may be computed after groups were dropped. An estimator of the batch then differs.
    trained = trained_rows(bundle)[recorded.rows]
    if not trained.all() and trained.any():
        recorded = recorded.select(trained)
        excess, wrong = _best_fit(recorded, estimator, epsilons)
        if not len(wrong):
            return passed(
                NAME, f"{checked}, of trained rows alone", int(trained.sum()), **details
            )
    problem = _explain(recorded, estimator, epsilons, wrong)
    size = bundle.facts.algorithm.group_size
    members = np.bincount(recorded.samples.group)[recorded.samples.group[wrong]]
    if problem.cause == "stale_rewards" and size and np.all(members != size):
        text = f"all {len(wrong)} samples that differ are of groups that are not whole, the others follow"
        advice = "They were compared with samples that are not in the step."
        problem = Problem("incomplete_groups", text, advice, problem.rows)
    return failed(NAME, checked, count, problem, **details)


def _read_samples(bundle: Bundle) -> Recorded:
    rewards = bundle.row_column("rewards").astype(np.float64)
    group = bundle.row_column("group")
    counts = row_sums(bundle, "loss_mask")
    numbers = np.arange(bundle.row_count)
    if bundle.has("sample"):
        pairs = np.stack([group, bundle.row_column("sample")], axis=1)
        numbers = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    _, first, sample = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    totals = sum_rows(
        bundle,
        lambda part: part.token_column("advantages") * part.token_column("loss_mask"),
    )
    tokens = np.bincount(sample, counts)
    advantages = np.bincount(sample, totals) / np.maximum(tokens, 1)
    has_tokens = tokens > 0
    greedy = (
        bundle.row_column("greedy_rewards")[first] if bundle.has("greedy_rewards") else None
    )
    if bundle.facts.algorithm.kl_in_reward:
        rewards = rewards - bundle.facts.algorithm.kl_in_reward * _sequence_kl(bundle)
    samples = Samples(
        rewards[first], np.unique(group[first], return_inverse=True)[1], tokens, greedy
    )
    # Rows in the order of the batch. Those without tokens have no advantage to compare.
    return Recorded(samples, np.where(has_tokens, advantages, np.nan), first).select(order)


def _sequence_kl(bundle: Bundle) -> np.ndarray:
    for column in ("old_logprobs", "reference_logprobs"):
        bundle.token_column(column)

    def token_kl(part: Bundle) -> np.ndarray:
        difference = part.token_column("old_logprobs") - part.token_column(
            "reference_logprobs"
        )
        return difference * part.token_column("loss_mask")

    return sum_rows(bundle, token_kl)


def _best_fit(
    recorded: Recorded, estimator: str, epsilons: tuple[float, ...], sign: int = 1
) -> tuple[float, np.ndarray]:
    """Return the largest difference in bounds, and the wrong samples, for the epsilon that fits best."""
    if estimator in SCALE_FREE:
        epsilons = epsilons[:1]
    fits = [_fit(recorded, estimator, epsilon, sign) for epsilon in epsilons]
    return min(fits, key=lambda fit: len(fit[1]))


def _fit(
    recorded: Recorded, estimator: str, epsilon: float, sign: int
) -> tuple[float, np.ndarray]:
    samples = replace(recorded.samples, epsilon=epsilon)
    expected = sign * ESTIMATORS[estimator](samples)
    difference = np.abs(recorded.advantages - expected)
    largest = np.abs(samples.rewards).max(initial=0.0)
    rounding = ROUNDING * largest
    if estimator not in SCALE_FREE:
        deviation = (
            group_deviation(samples, 1)
            if estimator.startswith("grpo")
            else np.std(samples.rewards)
        )
        rounding = rounding / np.maximum(deviation + epsilon, 1e-8)
    limit = RELATIVE_BOUND * np.maximum(np.abs(expected), 0.1) + rounding
    compared = np.isfinite(recorded.advantages)
    wrong = np.flatnonzero(compared & (difference > limit))
    return float(np.max(difference[compared], initial=0.0)), wrong


@dataclass(frozen=True)
class Candidate:
    """Another way to advantages. sign: -1 for flipped ones."""

    cause: str
    text: str
    advice: str
    recorded: Recorded
    estimator: str
    sign: int = 1


def _explain(
    recorded: Recorded, estimator: str, epsilons: tuple[float, ...], wrong: np.ndarray
) -> Problem:
    for candidate in _candidates(recorded, estimator):
        try:
            tried = epsilons if candidate.estimator == estimator else EPSILONS
            if candidate.cause == "epsilon":
                tried = (candidate.recorded.samples.epsilon,)
            _, still_wrong = _best_fit(
                candidate.recorded, candidate.estimator, tried, candidate.sign
            )
        except MissingError:
            continue
        if not len(still_wrong):
            return Problem(
                candidate.cause, candidate.text, candidate.advice, recorded.rows[wrong]
            )
    if problem := _explain_scale(recorded, estimator, epsilons, wrong):
        return problem
    if len(wrong) <= SMALL_SHARE * len(recorded.rows):
        groups = np.unique(recorded.samples.group[wrong])
        text = f"{len(wrong)} samples in {len(groups)} groups do not follow from their rewards, all others do"
        advice = "Their rewards changed after the advantages were computed, or their rows were replaced."
        return Problem("stale_rewards", text, advice, recorded.rows[wrong])
    text = f"no estimator, sign, order or grouping that was tried gives them ({len(wrong)} samples differ)"
    return Problem(
        "unexplained",
        text,
        "Compare the rewards that the estimator read.",
        recorded.rows[wrong],
    )


def _candidates(recorded: Recorded, estimator: str) -> Iterator[Candidate]:
    samples = recorded.samples
    advice = "Correct the estimator's name, or the trainer."
    yield Candidate(
        "sign_flipped",
        f"they are {estimator} with the sign flipped",
        "Negate.",
        recorded,
        estimator,
        -1,
    )
    if np.ptp(recorded.advantages[np.isfinite(recorded.advantages)]) == 0:
        yield Candidate(
            "all_zero",
            "every advantage is 0",
            "They were filled, not computed.",
            recorded,
            "none",
        )
    for name in ESTIMATORS:
        if name not in (estimator, "none", "reinforce"):
            text = f"they are {name}, not {estimator}"
            yield Candidate(f"estimator:{name}", text, advice, recorded, name)
    stale = "Rewards and rows are in different orders."
    for lag in _lags(samples):
        rolled = replace(
            recorded, samples=samples.with_rewards(np.roll(samples.rewards, lag))
        )
        side = "before" if lag > 0 else "after"
        text = f"they follow from the reward of the row {abs(lag)} {side} their own"
        yield Candidate("stale_rewards", text, stale, rolled, estimator)
    for text, group in _groupings(samples):
        regrouped = replace(recorded, samples=samples.with_group(group))
        yield Candidate(
            "other_groups",
            f"they compare {text}",
            "Groups follow prompts.",
            regrouped,
            estimator,
        )
    yield Candidate(
        "estimator:reinforce",
        "they are the rewards, without a baseline",
        advice,
        recorded,
        "reinforce",
    )


def _lags(samples: Samples) -> list[int]:
    size = int(np.bincount(samples.group).max(initial=1))
    return [1, -1, size, -size]


def _groupings(samples: Samples) -> Iterator[tuple[str, np.ndarray]]:
    """Yield other ways to group rows: all, blocks of other sizes, every n-th, shifted blocks."""
    count = len(samples.rewards)
    rows = np.arange(count)
    size = int(np.bincount(samples.group).max(initial=1))
    yield "the whole batch, not groups", np.zeros(count, np.int64)
    for other in sorted({*range(2, 17), 2 * size, 4 * size, max(size // 2, 1)} - {size}):
        if other < count:
            yield f"blocks of {other} rows, not groups of {size}", rows // other
    if size > 1 and count % size == 0:
        yield f"every {count // size}th row, not neighbours", rows % (count // size)
        yield "groups shifted by one row", np.roll(samples.group, 1)
        yield "groups shifted by one row", np.roll(samples.group, -1)


def _explain_scale(
    recorded: Recorded, estimator: str, epsilons: tuple[float, ...], wrong: np.ndarray
) -> Problem | None:
    """Try a constant factor, a constant offset, both, and clipping."""
    samples = replace(recorded.samples, epsilon=epsilons[0])
    expected = ESTIMATORS[estimator](samples)
    actual = recorded.advantages
    chosen = np.isfinite(actual)
    expected = expected[chosen]
    actual = actual[chosen]
    limit = 1e-3 * max(float(np.abs(actual).max(initial=0.0)), 1e-6)
    rows = recorded.rows[wrong]
    power = float(expected @ expected)
    factor = float(expected @ actual) / power if power else 0.0
    if power and np.all(np.abs(actual - factor * expected) <= limit):
        text = f"they are {estimator} times {factor:.4g}"
        return Problem(
            "scaled",
            text,
            "Rewards or advantages were scaled once more, or once less.",
            rows,
        )
    offset = float(np.mean(actual - expected)) if len(actual) else 0.0
    if len(actual) and np.all(np.abs(actual - offset - expected) <= limit):
        text = f"they are {estimator} plus {offset:.4g}"
        return Problem("offset", text, "Rewards or advantages were moved.", rows)
    if power and len(actual) > FEWEST_OF_A_LINE and np.ptp(expected):
        factor, offset = np.polyfit(expected, actual, 1)
        if np.all(np.abs(factor * expected + offset - actual) <= limit):
            text = f"they are {estimator} times {factor:.4g} plus {offset:.4g}"
            return Problem("normalised_again", text, "They were normalised twice.", rows)
    low = actual.min(initial=0.0)
    high = actual.max(initial=0.0)
    if np.all(np.abs(np.clip(expected, low, high) - actual) <= limit):
        text = f"they are {estimator} clipped to {low:.4g} and {high:.4g}"
        return Problem("clipped", text, "Name the bounds, or do not clip.", rows)
    return None


CHECKS = {"advantages.tokens": check_spread, NAME: check_estimator}
