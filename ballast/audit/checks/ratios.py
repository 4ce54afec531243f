"""Ratios of new to old log-probs: 1 at equal weights, and moving once weights have moved."""

import numpy as np

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.pairs import compare, explain, mean_bound, mini_batch_tokens
from ballast.audit.token_sums import loss_tokens, trained_rows

LARGEST_MEAN = {"float32": 1e-3, "float64": 1e-3}
COARSE_MEAN = 0.06


def check_first_update(bundle: Bundle) -> Finding:
    """Check that the first optimiser step begins with ratios of 1: its weights made the old log-probs."""
    name = "ratios.first_update"
    checked = "the log-ratio of new to old is 0 in the first optimiser step"
    for column in ("new_logprobs", "old_logprobs"):
        bundle.token_column(column)
    bound = LARGEST_MEAN.get(bundle.facts.precision, COARSE_MEAN)
    if _old_is_the_samplers(bundle):
        bound = max(bound, mean_bound(bundle))
    selection = (
        mini_batch_tokens(bundle, first=True) if bundle.has("mini_batch") else loss_tokens
    )
    comparison = compare(bundle, "new_logprobs", "old_logprobs", selection)
    rows = comparison.rows_beyond(bound)
    details = {"bound": bound, "residual": comparison.mean}
    if comparison.mean <= bound and not len(rows):
        return passed(name, checked, comparison.count, **details)
    problem = explain(bundle, "new_logprobs", "old_logprobs", selection, bound)
    if problem is None and not bundle.has("mini_batch"):
        return unknown(name, checked, "mini_batch")
    if problem is None and _old_is_the_samplers(bundle):
        return unknown(
            name, checked, "old_logprobs of the trainer (they are the sampler's)"
        )
    if problem is None:
        text = f"new and old log-probs differ by {comparison.mean:.3g} nats a token before any update"
        advice = "Dropout, other weights, or other positions in one of the two passes: `--model` tries them."
        problem = Problem("ratio_not_one", text, advice, rows)
    return failed(name, checked, comparison.count, problem, **details)


def _old_is_the_samplers(bundle: Bundle) -> bool:
    if not bundle.has("sampler_logprobs"):
        return False
    return compare(bundle, "old_logprobs", "sampler_logprobs", loss_tokens).mean == 0


def check_later_updates(bundle: Bundle) -> Finding:
    """Check that ratios leave 1 in later optimiser steps, whose weights have moved."""
    name = "ratios.later_updates"
    checked = "the log-ratio is not exactly 0 in later optimiser steps"
    mini_batches = bundle.row_column("mini_batch")
    for column in ("new_logprobs", "old_logprobs"):
        bundle.token_column(column)
    later = (
        mini_batches > np.min(mini_batches, initial=np.iinfo(np.int64).max)
    ) & trained_rows(bundle)
    if not later.any():
        return passed(name, f"{checked} (there is one)", 0)
    if bundle.facts.learning_rate == 0:
        return passed(name, f"{checked} (the learning rate is 0)", 0)

    selection = mini_batch_tokens(bundle, first=False)
    comparison = compare(bundle, "new_logprobs", "old_logprobs", selection)
    details = {"residual": comparison.mean}
    if comparison.mean > 0:
        return passed(name, checked, comparison.count, **details)
    if bundle.facts.learning_rate is None or not bundle.has("advantages"):
        raise MissingError("learning_rate" if bundle.has("advantages") else "advantages")
    if not np.any(bundle.token_column("advantages")):
        return passed(name, f"{checked} (all advantages are 0)", 0)
    text = "new log-probs equal the old ones exactly, although earlier optimiser steps moved the weights"
    advice = "The ratio is of a column with itself, or the updates are not applied."
    problem = Problem("ratio_never_moves", text, advice, np.flatnonzero(later))
    return failed(name, checked, comparison.count, problem, **details)


CHECKS = {
    "ratios.first_update": check_first_update,
    "ratios.later_updates": check_later_updates,
}
