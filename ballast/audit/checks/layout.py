"""Layout: ids, masks, ends and weight versions of a bundle fit together."""

import numpy as np

from ballast.audit.bundle import Bundle
from ballast.audit.finding import Finding, Problem, failed, passed
from ballast.audit.token_sums import row_sums, sum_rows, trained_rows

MOST = 0.9
"""Share of rows above which a fault is of the layout, and not of single rows."""


def check_ids(bundle: Bundle) -> Finding:
    """Check that token ids are not negative, and that masks are 0 or 1."""
    name = "layout.ids"
    checked = "token ids are not negative, loss masks are 0 or 1"
    bad_ids = sum_rows(bundle, lambda part: part.token_column("token_ids") < 0)
    bad_masks = sum_rows(
        bundle, lambda part: ~np.isin(part.token_column("loss_mask"), (0, 1))
    )
    rows = np.flatnonzero(bad_ids + bad_masks)
    if not len(rows):
        return passed(name, checked, bundle.token_count)
    cause = "negative_ids" if bad_ids.any() else "mask_not_binary"
    column = "token_ids" if bad_ids.any() else "loss_mask"
    text = f"{column} has values that it cannot have in {len(rows)} rows"
    problem = Problem(cause, text, "Padding or a weight was recorded in its place.", rows)
    return failed(name, checked, bundle.token_count, problem)


def check_loss_tokens(bundle: Bundle) -> Finding:
    """Check that every trained row has a token to train on, and that most rows are trained."""
    name = "layout.loss_tokens"
    checked = "trained rows have loss tokens"
    counts = row_sums(bundle, "loss_mask")
    trained = trained_rows(bundle)
    empty = np.flatnonzero(trained & (counts == 0))
    details = {"unit": "rows", "residual": float(len(empty)), "bound": bundle.row_count / 2}
    if not counts[trained].sum():
        problem = Problem(
            "nothing_trained", "no row has a loss token", "Look at the loss mask.", empty
        )
        return failed(name, checked, bundle.row_count, problem, **details)
    if len(empty) > bundle.row_count / 2:
        share = len(empty) / bundle.row_count
        text = f"{share:.0%} of the rows are trained without a single loss token"
        problem = Problem(
            "most_rows_masked", text, "Look at what masks whole responses.", empty
        )
        return failed(name, checked, bundle.row_count, problem, **details)
    return passed(name, checked, bundle.row_count, **details)


def check_prompt_mask(bundle: Bundle) -> Finding:
    """Check that the loss mask begins where the response does."""
    name = "layout.prompt_mask"
    checked = "no prompt token is trained, and the response's first token is"
    first = _first_loss_token(bundle)
    masked = first >= 0
    details = {"unit": "rows"}
    count = int(masked.sum())
    at_start = np.flatnonzero(first == 0)
    if len(at_start):
        text = f"the first token of {len(at_start)} rows is trained, which nothing predicts"
        problem = Problem("mask_covers_prompt", text, "Mask the prompt.", at_start)
        return failed(name, checked, count, problem, **details)
    distance = first - bundle.row_column("prompt_length")
    early = np.flatnonzero(masked & (distance < 0))
    late = np.flatnonzero(masked & (distance > 0))
    if len(early):
        by_one = bool(np.all(distance[early] == -1)) and len(early) >= MOST * count
        cause = "mask_shifted_left" if by_one else "mask_covers_prompt"
        place = "one token before the response" if by_one else "inside the prompt"
        text = f"the mask of {len(early)} rows begins {place}"
        problem = Problem(
            cause, text, "A log-prob stands at its own token, not at the one before.", early
        )
        return failed(name, checked, count, problem, **details)
    if len(late) >= max(2, MOST * count):
        by_one = bool(np.all(distance[late] == 1))
        cause = "mask_shifted_right" if by_one else "mask_begins_late"
        text = f"the first response token of {len(late)} rows is not trained"
        problem = Problem(cause, text, "Mask prompts alone.", late)
        return failed(name, checked, count, problem, **details)
    return passed(name, checked, count, **details)


def _first_loss_token(bundle: Bundle) -> np.ndarray:
    """Return the place of the first loss token in each row, -1 for none, int64 [B]."""
    first = np.full(bundle.row_count, -1)
    for start, part in bundle.parts():
        tokens = np.flatnonzero(part.token_column("loss_mask"))
        rows = np.searchsorted(part.offsets, tokens, side="right") - 1
        numbers, index = np.unique(rows, return_index=True)
        first[start + numbers] = tokens[index] - part.offsets[numbers]
    return first


def check_after_end(bundle: Bundle) -> Finding:
    """Check that no token after the end of a turn is trained, and that the end itself is."""
    name = "layout.after_end"
    checked = "tokens after the end of a turn are not trained, its end token is"
    ends = np.asarray(bundle.fact("end_tokens"))
    after = sum_rows(bundle, lambda part: _trained_after_end(part, ends))
    details = {"residual": float(after.sum()), "bound": 0.0}
    rows = np.flatnonzero(after)
    if len(rows):
        text = f"{int(after.sum())} tokens after an end token are trained"
        problem = Problem(
            "trained_after_end", text, "End the mask with the end token.", rows
        )
        return failed(name, checked, bundle.token_count, problem, **details)
    left_out = sum_rows(bundle, lambda part: _untrained_ends(part, ends))
    trained_ends = sum_rows(bundle, lambda part: _trained_ends(part, ends))
    rows = np.flatnonzero(left_out)
    if len(rows) >= 2 and not trained_ends.any():
        text = f"the end token of {len(rows)} rows is not trained, so that the policy never learns to end"
        problem = Problem(
            "end_token_not_trained", text, "Let the mask cover the end token.", rows
        )
        return failed(name, checked, bundle.token_count, problem, **details)
    return passed(name, checked, bundle.token_count, **details)


def check_truncated(bundle: Bundle) -> Finding:
    """Check that rows of the greatest length that do not end are marked as truncated."""
    name = "layout.truncated"
    checked = "responses of the greatest length that have no end are marked as truncated"
    ends = np.asarray(bundle.fact("end_tokens"))
    truncated = np.asarray(bundle.row_column("truncated")).astype(bool)
    sampled = row_sums(bundle, "loss_mask")
    has_end = sum_rows(bundle, lambda part: _trained_ends(part, ends)) > 0
    unmarked = ~truncated & ~has_end & (sampled > 0)
    longest = sampled == sampled.max(initial=0)
    rows = np.flatnonzero(unmarked & longest)
    # Others without an end show that responses end in other ways, such as by a stop string.
    if len(rows) < 2 or np.any(unmarked & ~longest) or not has_end.any():
        return passed(name, checked, bundle.row_count, unit="rows")
    text = f"{len(rows)} rows of {int(sampled.max())} sampled tokens have no end token, but are not marked"
    problem = Problem(
        "truncation_not_marked",
        text,
        "Take the flag from the sampler's finish reason.",
        rows,
    )
    return failed(name, checked, bundle.row_count, problem, unit="rows")


def _same_row(part: Bundle) -> np.ndarray:
    """True where a token and the one before it are of one row, bool [T - 1]."""
    inside = np.ones(max(part.token_count - 1, 0), bool)
    borders = part.offsets[1:-1]
    borders = borders[(borders > 0) & (borders < part.token_count)]
    inside[borders - 1] = False
    return inside


def _trained_after_end(part: Bundle, ends: np.ndarray) -> np.ndarray:
    mask = part.token_column("loss_mask").astype(bool)
    is_end = np.isin(part.token_column("token_ids"), ends) & mask
    after = np.zeros(part.token_count, bool)
    after[1:] = is_end[:-1] & mask[1:] & _same_row(part)
    return after


def _trained_ends(part: Bundle, ends: np.ndarray) -> np.ndarray:
    mask = part.token_column("loss_mask").astype(bool)
    return np.isin(part.token_column("token_ids"), ends) & mask


def _untrained_ends(part: Bundle, ends: np.ndarray) -> np.ndarray:
    mask = part.token_column("loss_mask").astype(bool)
    is_end = np.isin(part.token_column("token_ids"), ends) & ~mask
    left_out = np.zeros(part.token_count, bool)
    left_out[1:] = is_end[1:] & mask[:-1] & _same_row(part)
    return left_out


def check_versions(bundle: Bundle) -> Finding:
    """Check that weights only get newer along a row, and none is newer than the trainer's."""
    name = "layout.weight_versions"
    checked = (
        "weight versions never fall within a row, and are not newer than the trainer's"
    )
    falls = np.zeros(bundle.row_count)
    newest = np.full(bundle.row_count, -1)
    for start, part in bundle.parts():
        tokens = np.flatnonzero(part.token_column("loss_mask"))
        versions = part.token_column("weight_versions")[tokens]
        rows = np.searchsorted(part.offsets, tokens, side="right") - 1 + start
        fell = (np.diff(versions) < 0) & (np.diff(rows) == 0)
        np.add.at(falls, rows[1:][fell], 1)
        np.maximum.at(newest, rows, versions)
    rows = np.flatnonzero(falls)
    count = int(row_sums(bundle, "loss_mask").sum())
    if len(rows):
        text = f"later tokens of {len(rows)} rows come from older weights"
        problem = Problem(
            "versions_fall", text, "Versions belong to other tokens or rows.", rows
        )
        return failed(name, checked, count, problem)
    trainer = bundle.facts.weight_version
    rows = (
        np.flatnonzero(newest > trainer) if trainer is not None else np.empty(0, np.int64)
    )
    if len(rows):
        text = f"{len(rows)} rows were sampled by weights newer than the trainer's version {trainer}"
        problem = Problem(
            "versions_from_future", text, "Samples are of a later step.", rows
        )
        return failed(name, checked, count, problem)
    return passed(name, checked, count)


CHECKS = {
    "layout.ids": check_ids,
    "layout.loss_tokens": check_loss_tokens,
    "layout.prompt_mask": check_prompt_mask,
    "layout.after_end": check_after_end,
    "layout.truncated": check_truncated,
    "layout.weight_versions": check_versions,
}
