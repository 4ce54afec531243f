"""Compare two columns of log-probs, and explain a difference.

    columns x, y at some tokens --compare--> mean difference, of all tokens and of each row
    a difference --explain--> shift, base, probabilities, sign, other rows, zeros, a bound, temperature

An explanation is a change of one column that makes it the other, up to rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log

import numpy as np

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.finding import Problem
from ballast.audit.token_sums import loss_tokens, segment_sums

MEAN_BOUNDS = {"float32": 2e-3, "float64": 2e-3}
"""Mean difference of sampler and trainer, nats a token. Exact models reach 3e-5 in float32."""
COARSE_BOUND = 0.1
"""The same in bfloat16, or if the bundle does not name its precision. Means up to 0.03 are usual on tiny
models, and up to 0.1 for mixtures of experts."""
TOKENS_OF_AN_EXPLANATION = 2**18
CLEAR_CORRELATION = 0.8
FEWEST_ROUNDED = 32
EXPLAINED_SHARE = 0.25
"""An explanation leaves at most this share of a difference, and at most twice the bound."""

Selection = Callable[[Bundle], np.ndarray]
"""Places of the tokens of a part that are compared."""


def mini_batch_tokens(
    bundle: Bundle, *, first: bool, among: Selection = loss_tokens
) -> Selection:
    """Select tokens of the first optimiser step, or of the later ones.

    Raises MissingError without mini_batch.
    """
    first_number = bundle.row_column("mini_batch").min()

    def select(part: Bundle) -> np.ndarray:
        places = among(part)
        rows = np.searchsorted(part.offsets, places, side="right") - 1
        is_first = part.row_column("mini_batch")[rows] == first_number
        return places[is_first == first]

    return select


@dataclass(frozen=True)
class Comparison:
    """count: compared tokens. mean: mean absolute difference. row_means, row_counts: of each row, [B]."""

    count: int
    mean: float
    row_means: np.ndarray
    row_counts: np.ndarray

    def rows_beyond(self, bound: float) -> np.ndarray:
        """Return rows whose own mean differs too much. A short row may differ more."""
        limits = 3 * bound + 10 * bound / np.maximum(self.row_counts, 1)
        return np.flatnonzero(self.row_means > limits)


def mean_bound(bundle: Bundle) -> float:
    return MEAN_BOUNDS.get(bundle.facts.precision, COARSE_BOUND)


def compare(bundle: Bundle, first: str, second: str, selection: Selection) -> Comparison:
    """Raises MissingError if a column is missing, or not finite."""
    sums = []
    counts = []
    for _, part in bundle.parts():
        places = selection(part)
        differences = np.zeros(part.token_count)
        chosen = np.zeros(part.token_count)
        first_values = part.token_column(first)[places].astype(np.float64)
        differences[places] = np.abs(first_values - part.token_column(second)[places])
        chosen[places] = 1
        sums.append(segment_sums(differences, part.offsets))
        counts.append(segment_sums(chosen, part.offsets))
    row_sums = np.concatenate(sums) if sums else np.empty(0)
    row_counts = np.concatenate(counts) if counts else np.empty(0)
    count = int(row_counts.sum())
    mean = float(row_sums.sum() / max(count, 1))
    if not np.isfinite(mean):
        raise MissingError(f"finite {first} and {second}")
    return Comparison(count, mean, row_sums / np.maximum(row_counts, 1), row_counts)


@dataclass(frozen=True)
class PairSample:
    """Compared tokens of the first rows. places: of the tokens in x_all and y_all, which are whole columns.

    x, y: float64 [N]. rows: of each token, int64 [N].
    """

    x_all: np.ndarray
    y_all: np.ndarray
    places: np.ndarray
    rows: np.ndarray

    @property
    def x(self) -> np.ndarray:
        return self.x_all[self.places]

    @property
    def y(self) -> np.ndarray:
        return self.y_all[self.places]

    @property
    def swapped(self) -> "PairSample":
        return PairSample(self.y_all, self.x_all, self.places, self.rows)

    @property
    def difference(self) -> float:
        return _distance(self.x, self.y)


def sample_pair(
    bundle: Bundle, first: str, second: str, selection: Selection
) -> PairSample:
    part = next(part for _, part in bundle.parts(TOKENS_OF_AN_EXPLANATION))
    places = selection(part)
    rows = np.searchsorted(part.offsets, places, side="right") - 1
    x_all = part.token_column(first).astype(np.float64)
    y_all = part.token_column(second).astype(np.float64)
    return PairSample(x_all, y_all, places, rows)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.abs(x - y))) if len(x) else np.inf


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 8 or np.std(x) == 0 or np.std(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


@dataclass(frozen=True)
class Explanation:
    """residual: mean difference that remains."""

    cause: str
    text: str
    residual: float


def explain(
    bundle: Bundle, first: str, second: str, selection: Selection, bound: float
) -> Problem | None:
    """Return what turns one column into the other, or None."""
    sample = sample_pair(bundle, first, second, selection)
    if not len(sample.places):
        return None
    for name, other, pair in ((first, second, sample), (second, first, sample.swapped)):
        limit = min(2 * bound, EXPLAINED_SHARE * pair.difference)
        for explanation in _explanations(bundle, name, other, pair):
            if explanation.residual <= limit:
                return Problem(
                    explanation.cause, explanation.text, ADVICE.get(explanation.cause, "")
                )
    return None


ADVICE = {
    "shifted_by_one": "A log-prob stands at its own token, not at the one before.",
    "base_2": "Multiply by ln 2.",
    "base_10": "Multiply by ln 10.",
    "probabilities": "Take their logarithm.",
    "sign_flipped": "Negate them.",
    "other_rows": "Rows were reordered between sampling and training, and this column was not.",
    "partly_zero": "Look at what fills missing log-probs with 0.",
    "clamped": "Record log-probs before they are clamped.",
    "temperature": "Divide logits by the temperature of sampling on both sides.",
    "all_zero": "It was filled, not computed.",
    "constant": "It was filled, not computed.",
    "shifted_by_two": "A log-prob stands at its own token, not at another one.",
    "rounded_to_bfloat16": "Record log-probs in float32, or name precision=bfloat16.",
    "scaled": "Look for a temperature, a weight or a scale of logits that one side alone applies.",
    "sequence_mean": "Record the log-prob of each token.",
}


def _explanations(
    bundle: Bundle, name: str, other: str, pair: PairSample
) -> Iterator[Explanation]:
    """Yield changes of `name` (x), the likely ones first."""
    x = pair.x
    y = pair.y
    if np.ptp(x) == 0:
        kind = "all_zero" if x[0] == 0 else "constant"
        yield Explanation(kind, f"{name} is {x[0]:g} at every token", 0.0)
        return
    yield Explanation(
        "sign_flipped", f"{name} has the sign of {other} flipped", _distance(-x, y)
    )
    scaled = _scaled(name, other, x, y)
    for base in (2, 10):
        residual = _distance(x * log(base), y)
        if residual <= 2 * scaled.residual:  # a factor of 1.4 is near to base 2, and not it
            yield Explanation(f"base_{base}", f"{name} is in base {base}", residual)
    if x.min() > 0 and x.max() <= 1.0001:
        text = f"{name} holds probabilities, not their logarithms"
        yield Explanation("probabilities", text, _distance(np.log(x), y))
    yield _rounded(name, x, pair.difference)
    yield from _shifts(name, other, pair)
    yield from _zeros(name, other, x, y)
    yield _clamped(name, x, y)
    yield _sequence_means(name, other, pair)
    yield _other_rows(name, other, pair)
    yield from _temperature(bundle, name, other, x, y)
    yield scaled


def _scaled(name: str, other: str, x: np.ndarray, y: np.ndarray) -> Explanation:
    """Fit x = factor * y by least squares."""
    factor = float(x @ y / (y @ y)) if y.any() else 0.0
    text = f"{name} is {other} times {factor:.3g}"
    return Explanation("scaled", text, _distance(x / factor, y) if factor else np.inf)


def _shifts(name: str, other: str, pair: PairSample) -> Iterator[Explanation]:
    """Found by correlation: at the right lag the columns agree, at 0 they do not."""
    at_zero = _correlation(pair.x, pair.y)
    for lag in (-1, 1, -2, 2):
        neighbours = pair.places + lag
        is_inside = (neighbours >= 0) & (neighbours < len(pair.x_all))
        chosen = np.zeros(len(pair.x_all), bool)
        chosen[pair.places] = True
        is_inside[is_inside] = chosen[neighbours[is_inside]]
        shifted = pair.x_all[neighbours[is_inside]]
        expected = pair.y[is_inside]
        correlation = _correlation(shifted, expected)
        if correlation > CLEAR_CORRELATION and correlation > at_zero + 0.2:
            direction = "late" if lag > 0 else "early"
            count = {1: "one token", 2: "two tokens"}[abs(lag)]
            text = f"{name} stands {count} too {direction} for {other} (correlation {correlation:.3f} there, "
            text += f"{at_zero:.3f} here)"
            cause = "shifted_by_one" if abs(lag) == 1 else "shifted_by_two"
            # Correlation decides: the columns may be of different models.
            yield Explanation(cause, text, 0.0)


def _zeros(name: str, other: str, x: np.ndarray, y: np.ndarray) -> Iterator[Explanation]:
    is_zero = x == 0
    if is_zero.any() and not is_zero.all():
        text = f"{name} is exactly 0 at {is_zero.mean():.1%} of the tokens, where {other} is not"
        yield Explanation("partly_zero", text, _distance(x[~is_zero], y[~is_zero]))


def _clamped(name: str, x: np.ndarray, y: np.ndarray) -> Explanation:
    lowest = x.min()
    repeated = np.mean(x == lowest)
    residual = _distance(x, np.maximum(y, lowest)) if repeated * len(x) >= 3 else np.inf
    return Explanation("clamped", f"{name} is never below {lowest:g}", residual)


def _sequence_means(name: str, other: str, pair: PairSample) -> Explanation:
    count = np.maximum(np.bincount(pair.rows), 1)
    means = np.bincount(pair.rows, pair.y) / count
    text = f"{name} holds the mean of {other} over the row at each of its tokens"
    return Explanation("sequence_mean", text, _distance(pair.x, means[pair.rows]))


def _other_rows(name: str, other: str, pair: PairSample) -> Explanation:
    """Match rows of equal token counts by their values."""
    borders = np.flatnonzero(np.diff(pair.rows)) + 1
    x_rows = np.split(pair.x, borders)
    y_rows = np.split(pair.y, borders)
    by_count: dict[int, list[int]] = {}
    for number, values in enumerate(y_rows):
        by_count.setdefault(len(values), []).append(number)
    residuals = []
    moved = 0
    for number, values in enumerate(x_rows[:500]):
        candidates = by_count[len(values)][:500]
        distances = [_distance(values, y_rows[candidate]) for candidate in candidates]
        best = int(np.argmin(distances))
        moved += candidates[best] != number
        residuals.append(distances[best])
    text = f"{name} of {moved} rows is that of other rows in {other}"
    return Explanation("other_rows", text, float(np.mean(residuals)) if moved else np.inf)


def _temperature(
    bundle: Bundle, name: str, other: str, x: np.ndarray, y: np.ndarray
) -> Iterator[Explanation]:
    """Columns at two temperatures follow one curve: the colder one is lower where both are low."""
    temperature = bundle.facts.algorithm.temperature
    if temperature in (None, 0.0, 1.0) or _correlation(x, y) < CLEAR_CORRELATION:
        return
    slope, _ = np.polyfit(y, x, 1)
    expected = temperature if temperature > 1 else 1 / temperature
    if 1 + 0.25 * (expected - 1) < slope < 1 + 2 * (expected - 1):
        without = name if temperature > 1 else other
        text = f"{name} is steeper than {other} by {slope:.2f}: {without} is not divided by the temperature "
        text += f"{temperature:g}"
        yield Explanation("temperature", text, 0.0)


def _rounded(name: str, x: np.ndarray, difference: float) -> Explanation:
    """bfloat16 keeps 8 bits of a float32."""
    bits = x.astype(np.float32).view(np.uint32)
    is_rounded = len(x) >= FEWEST_ROUNDED and not np.any(bits & 0xFFFF)
    small = difference <= 2**-8 * float(np.mean(np.abs(x)))
    text = f"{name} was rounded to bfloat16"
    return Explanation("rounded_to_bfloat16", text, 0.0 if is_rounded and small else np.inf)
