"""Loss: it follows from ratios, advantages, bounds, masks and denominators, or from what is named instead."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ballast.audit.aggregations import (
    Batch,
    Denominator,
    losses_of,
    named,
    other_denominators,
    read_batch,
    sizes_of,
)
from ballast.audit.bundle import Algorithm, Bundle, MissingError
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.token_losses import LOSSES, RowLosses, Variant, row_losses
from ballast.audit.token_sums import segment_sums

RELATIVE_BOUND = 2e-4
"""Of the mean absolute token loss. A sum of a million float32 numbers has an error of 1e-5."""
UNKNOWN_IF_LEFT_OUT = ("kl_coefficient", "entropy_coefficient", "correction", "dual_clip")
"""Settings that a step may not have. A loss that fits without them shows that it has none."""
NO_CLIP = 1e9
COMMON_BOUNDS = (0.1, 0.2, 0.25, 0.28, 0.3, 0.4, 3e-4, 4e-4)
LARGEST_FACTOR = 17
CLIPPED = ("ppo_clip", "gspo")


def check_value(bundle: Bundle) -> Finding:
    """Check that the reported loss follows from the step's columns, or name what else explains it."""
    name = "loss.value"
    loss = bundle.setting("loss")
    aggregation = bundle.setting("aggregation")
    checked = f"the loss follows from ratios and advantages by {loss} and {aggregation}"
    reported = np.array(bundle.fact("loss"))
    if loss not in LOSSES:
        return unknown(name, checked, f"a formula for algorithm.loss={loss}")
    if not np.all(np.isfinite(reported)):
        problem = Problem(
            "not_finite",
            "the reported loss is NaN or infinite",
            "Look at log-probs and rewards.",
        )
        return failed(name, checked, 0, problem)
    if bundle.facts.algorithm.entropy_coefficient:
        return unknown(name, checked, "entropies (algorithm.entropy_coefficient is not 0)")
    if loss != "reinforce":
        bundle.setting("clip_low")
        bundle.setting("clip_high")
    if len(reported) > 1:
        bundle.row_column("mini_batch")
    batch = read_batch(bundle)
    if len(reported) not in (1, batch.number):
        return unknown(name, checked, f"a loss for each of {batch.number} mini-batches")
    usual = Variant("", "", bundle.facts.algorithm)
    denominator = named(batch, aggregation)
    losses = row_losses(bundle, usual)
    count = int(losses.counts.sum())
    if not count:
        return unknown(name, checked, "loss tokens")
    bound = RELATIVE_BOUND * float(np.mean(sizes_of(batch, losses, denominator))) + 1e-7
    residual = _difference(reported, losses_of(batch, losses, denominator))
    details = {"bound": bound, "residual": residual}
    if residual <= bound:
        return passed(name, checked, count, **details)
    explanation = _explain(bundle, batch, usual, reported, bound)
    if explanation is None:
        settings = bundle.facts.algorithm
        if not bundle.has("mini_batch"):
            return unknown(name, checked, "mini_batch")
        for setting in UNKNOWN_IF_LEFT_OUT:
            if getattr(settings, setting) is None:
                return unknown(name, checked, f"algorithm.{setting}")
        expected = float(np.mean(losses_of(batch, losses, denominator)))
        text = f"reported {np.mean(reported):.6g}, but the columns give {expected:.6g}, and no other bounds, "
        text += "aggregation or denominator that was tried explains it"
        explanation = Problem("unexplained", text, "Compare the loss token by token.")
    return failed(name, checked, count, explanation, **details)


def _difference(reported: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, of each mini-batch if they are reported one by one, else of the mean."""
    if len(reported) == len(expected):
        difference = np.abs(reported - expected).max()
    else:
        difference = np.abs(reported.mean() - expected.mean())
    return float(difference) if np.isfinite(difference) else np.inf


def _explain(
    bundle: Bundle, batch: Batch, usual: Variant, reported: np.ndarray, bound: float
) -> Problem | None:
    """Try other denominators, then other losses, then both together."""
    aggregation = bundle.setting("aggregation")
    denominators = [named(batch, aggregation), *other_denominators(batch, aggregation)]
    variants = [usual, *_variants(usual.algorithm)]
    pairs: list[tuple[int, int]] = [(0, number) for number in range(1, len(denominators))]
    pairs += [(number, 0) for number in range(1, len(variants))]
    for number in range(1, len(variants)):
        pairs += [(number, other) for other in range(1, len(denominators))]
    tables: dict[int, RowLosses | None] = {}
    for variant_number, denominator_number in pairs:
        variant = variants[variant_number]
        denominator = denominators[denominator_number]
        if variant_number not in tables:
            try:
                tables[variant_number] = row_losses(bundle, variant)
            except MissingError:
                tables[variant_number] = None
        table = tables[variant_number]
        if (
            table is None
            or _difference(reported, losses_of(batch, table, denominator)) > bound
        ):
            continue
        return _problem(
            variant if variant_number else None, denominator if denominator_number else None
        )
    return _explain_factors(bundle, batch, usual, reported, bound)


def _explain_factors(
    bundle: Bundle, batch: Batch, usual: Variant, reported: np.ndarray, bound: float
) -> Problem | None:
    """Try a constant factor of the loss, and another weight of the KL."""
    denominator = named(batch, bundle.setting("aggregation"))
    expected = losses_of(batch, row_losses(bundle, usual), denominator)
    advice = "Look at what multiplies the loss: micro-batches, ranks, accumulation."
    factor = _common_factor(reported, expected, bound)
    if factor is not None:
        return Problem("scaled", f"the loss is that times {factor:.6g}", advice)
    if not bundle.has("reference_logprobs"):
        return None
    without = replace(usual, algorithm=replace(usual.algorithm, kl_coefficient=0.0))
    with_one = replace(usual, algorithm=replace(usual.algorithm, kl_coefficient=1.0))
    base = losses_of(batch, row_losses(bundle, without), denominator)
    penalty = losses_of(batch, row_losses(bundle, with_one), denominator) - base
    weight = _common_factor(reported - base, penalty, bound)
    if weight is None:
        return None
    text = f"the loss is that with a KL of weight {weight:.4g}"
    return Problem(
        "kl_coefficient", text, "Correct algorithm.kl_coefficient, or the trainer."
    )


def _common_factor(
    reported: np.ndarray, expected: np.ndarray, bound: float
) -> float | None:
    """Return the factor of all mini-batches, or of one number a whole factor, which chance does not give."""
    power = float(expected @ expected)
    if len(reported) == len(expected) > 1 and power:
        factor = float(expected @ reported) / power
        return factor if _difference(reported, factor * expected) <= bound else None
    mean = float(expected.mean())
    for number in range(2, LARGEST_FACTOR):
        for factor in (float(number), 1 / number):
            # A loss near 0 fits any factor.
            if abs(mean) > 10 * bound and abs(
                reported.mean() - factor * mean
            ) <= bound * min(factor, 1):
                return factor
    return None


def _problem(variant: Variant | None, denominator: Denominator | None) -> Problem:
    parts = [part for part in (variant, denominator) if part is not None]
    cause = "+".join(part.cause for part in parts)
    text = "the loss is " + ", and ".join(part.text for part in parts)
    return Problem(cause, text, "Correct the bundle's settings, or the trainer.")


def _variants(algorithm: Algorithm) -> Iterator[Variant]:
    """Yield other ways to compute token losses, the frequent mistakes first."""
    usual = Variant("", "", algorithm)
    yield from _clip_variants(algorithm)
    yield replace(usual, cause="sign_flipped", text="that with the sign flipped", sign=-1)
    text = "that of ratios of 1, of a column with itself"
    yield replace(usual, cause="ratio_of_itself", text=text, old="new_logprobs")
    text = "that of ratios to the sampler's log-probs, not to old_logprobs"
    yield replace(usual, cause="old_is_sampler", text=text, old="sampler_logprobs")
    yield replace(
        usual, cause="ratio_inverted", text="that of ratios of old to new", inverted=True
    )
    if algorithm.kl_coefficient:
        yield Variant(
            "kl_left_out", "that without its KL", replace(algorithm, kl_coefficient=0.0)
        )
        flipped = replace(algorithm, kl_coefficient=-algorithm.kl_coefficient)
        yield Variant("kl_sign_flipped", "that with the sign of the KL flipped", flipped)
        for estimator in ("k1", "k2", "k3", "absolute"):
            if estimator != algorithm.kl_estimator:
                other = replace(algorithm, kl_estimator=estimator)
                yield Variant(
                    f"kl_estimator:{estimator}", f"that with the KL of {estimator}", other
                )
    if algorithm.correction not in (None, "none"):
        uncorrected = replace(algorithm, correction="none")
        yield Variant(
            "correction_left_out", "that without weights for the sampler", uncorrected
        )
    if algorithm.dual_clip:
        yield Variant(
            "dual_clip_left_out",
            "that without the dual clip",
            replace(algorithm, dual_clip=0.0),
        )
    for loss in LOSSES:
        if loss != algorithm.loss:
            yield Variant(
                f"loss:{loss}",
                f"{loss}, not {algorithm.loss}",
                replace(algorithm, loss=loss),
            )
    yield replace(
        usual,
        cause="mask_not_applied",
        text="over all tokens, without the loss mask",
        masked=False,
    )


def _clip_variants(algorithm: Algorithm) -> Iterator[Variant]:
    low = algorithm.clip_low or 0.0
    high = algorithm.clip_high or 0.0
    if low != high:
        swapped = replace(algorithm, clip_low=high, clip_high=low)
        yield Variant(
            "clip_bounds_swapped",
            f"clipped to 1 - {high:g} and 1 + {low:g}, bounds swapped",
            swapped,
        )
        for bound in (low, high):
            equal = replace(algorithm, clip_low=bound, clip_high=bound)
            yield Variant("clip_bounds_equal", f"clipped by {bound:g} on both sides", equal)
    for bound in COMMON_BOUNDS:
        if bound != low:
            other = replace(algorithm, clip_low=bound)
            yield Variant(
                "clip_bounds_other", f"with clip_low={bound:g}, not {low:g}", other
            )
        if bound != high:
            other = replace(algorithm, clip_high=bound)
            yield Variant(
                "clip_bounds_other", f"with clip_high={bound:g}, not {high:g}", other
            )
    unclipped = replace(algorithm, clip_low=NO_CLIP, clip_high=NO_CLIP)
    yield Variant("not_clipped", "not clipped", unclipped)


def check_denominators(bundle: Bundle) -> Finding:
    """Check that the trainer divided by the loss tokens of each mini-batch."""
    name = "loss.denominators"
    checked = "the trainer divided by the loss tokens of each mini-batch"
    reported = np.array(bundle.fact("token_denominators"))
    batch = read_batch(bundle)
    numbers = range(batch.number)
    counts = np.array(
        [batch.counts[batch.mini_batches == number].sum() for number in numbers]
    )
    details = {"bound": 0.0, "residual": float(np.abs(reported.sum() - counts.sum()))}
    if len(reported) != len(counts):
        return unknown(
            name, f"{checked} ({len(reported)} denominators)", "one for each mini-batch"
        )
    if np.array_equal(reported, counts):
        return passed(name, checked, int(counts.sum()), **details)
    problem = _explain_denominators(batch, reported, counts)
    return failed(name, checked, int(counts.sum()), problem, **details)


def _explain_denominators(
    batch: Batch, reported: np.ndarray, counts: np.ndarray
) -> Problem:
    rows = [np.flatnonzero(batch.mini_batches == number) for number in range(batch.number)]
    trained = batch.mini_batches >= 0
    lengths = batch.lengths
    responses = batch.responses
    candidates = {
        "prompt_tokens_counted": [lengths[part].sum() for part in rows],
        "padding_counted": [len(part) * lengths[part].max() for part in rows],
        "step_tokens": [batch.counts[trained].sum()] * len(rows),
        "dropped_rows_counted": [batch.counts.sum()] * len(rows),
        "rows_counted": [len(part) for part in rows],
    }
    if responses is not None:
        candidates["masked_tokens_counted"] = [responses[part].sum() for part in rows]
        candidates["response_padding_counted"] = [
            len(part) * responses[part].max() for part in rows
        ]
    difference = f"reported {reported.sum():.0f}, counted {counts.sum():.0f}"
    for cause, values in candidates.items():
        if np.array_equal(reported, values):
            text = f"{difference}: {cause.replace('_', ' ')}"
            return Problem(cause, text, "Divide by the loss tokens of the mini-batch.")
    return Problem(
        "unexplained", difference, "Divide by the loss tokens of the mini-batch."
    )


def check_gradient_norm(bundle: Bundle) -> Finding:
    """Check that the gradient is finite, and not 0 where an advantage is not."""
    name = "loss.gradient_norm"
    checked = "the gradient norm is finite, and not 0"
    norms = np.array(bundle.fact("gradient_norm"))
    count = len(norms)
    if not np.all(np.isfinite(norms)):
        problem = Problem(
            "not_finite",
            "the gradient norm is NaN or infinite",
            "Look at log-probs and loss.",
        )
        return failed(name, checked, count, problem, unit="norms")
    if np.any(norms < 0):
        problem = Problem(
            "negative", "a gradient norm is negative", "Something else was recorded."
        )
        return failed(name, checked, count, problem, unit="norms")
    algorithm = bundle.facts.algorithm
    if (
        not np.any(norms)
        and not algorithm.kl_coefficient
        and not algorithm.entropy_coefficient
    ):
        advantages = bundle.token_column("advantages")
        has_advantages = np.any(
            advantages[np.flatnonzero(bundle.token_column("loss_mask"))]
        )
        if has_advantages and not _is_all_clipped(bundle):
            problem = Problem(
                "zero_gradient",
                "the gradient is 0, although advantages are not",
                "Detached loss?",
            )
            return failed(name, checked, count, problem, unit="norms")
    return passed(
        name, checked, count, unit="norms", residual=float(norms.max(initial=0.0))
    )


def _is_all_clipped(bundle: Bundle) -> bool:
    """Return whether ratios beyond their bounds take every token's gradient, as GSPO's do at a high rate."""
    algorithm = bundle.facts.algorithm
    low = algorithm.clip_low
    high = algorithm.clip_high
    if low is None or high is None or algorithm.loss not in CLIPPED:
        return False
    if not bundle.has("new_logprobs", "old_logprobs"):
        return False
    mask = bundle.token_column("loss_mask").astype(np.float64)
    new = bundle.token_column("new_logprobs").astype(np.float64)
    moves = (new - bundle.token_column("old_logprobs")) * mask
    if algorithm.loss == "gspo":
        row_means = segment_sums(moves, bundle.offsets) / np.maximum(
            segment_sums(mask, bundle.offsets), 1
        )
        moves = np.repeat(row_means, np.diff(bundle.offsets))
    ratios = np.exp(moves)
    advantages = bundle.token_column("advantages") * mask
    rises = (advantages > 0) & (ratios <= 1 + high)
    falls = (advantages < 0) & (ratios >= 1 - low)
    return not np.any(rises | falls)


CHECKS = {
    "loss.value": check_value,
    "loss.denominators": check_denominators,
    "loss.gradient_norm": check_gradient_norm,
}
