"""Selection: groups are whole and share a prompt, no sample vanishes or is dropped for its length."""

import hashlib
from math import erfc, log, sqrt

import numpy as np

from ballast.audit.bundle import Bundle
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.token_sums import row_sums, sum_rows

CHANCE = 1e-6
"""Probability of a false alarm below which equal rows are called copies."""
DROPPED_CHANCE = 1e-4
FEWEST_DROPPED = 6
MOST_DROPPED = 0.5


def check_groups(bundle: Bundle) -> Finding:
    """Check that every group has the size that the algorithm says, apart from reported drops."""
    name = "selection.group_sizes"
    size = bundle.setting("group_size")
    checked = (
        f"every group has {size} samples, apart from those that are reported as dropped"
    )
    group = bundle.row_column("group")
    samples = _first_rows(bundle)
    names, counts = np.unique(group[samples], return_counts=True)
    dropped = sum(bundle.facts.dropped.values())
    details = {
        "unit": "groups",
        "bound": float(size),
        "residual": float(np.abs(counts - size).max(initial=0)),
    }
    larger = names[counts > size]
    if len(larger):
        rows = np.flatnonzero(np.isin(group, larger))
        text = f"{len(larger)} groups have more than {size} samples, the largest {counts.max()}"
        advice = "Two prompts share a group, or rows are doubled."
        return failed(
            name,
            checked,
            len(names),
            Problem("groups_too_large", text, advice, rows),
            **details,
        )
    smaller = names[counts < size]
    lost = int((size - counts[counts < size]).sum())
    if lost > dropped:
        rows = np.flatnonzero(np.isin(group, smaller))
        text = f"{len(smaller)} groups lack {lost} samples, of which {dropped} are reported as dropped"
        advice = "Samples vanished between rollout and update."
        return failed(
            name,
            checked,
            len(names),
            Problem("groups_too_small", text, advice, rows),
            **details,
        )
    return passed(name, checked, len(names), **details)


def _first_rows(bundle: Bundle) -> np.ndarray:
    """Return the first row of each sample."""
    if not bundle.has("sample", "group"):
        return np.arange(bundle.row_count)
    pairs = np.stack([bundle.row_column("group"), bundle.row_column("sample")], axis=1)
    return np.sort(np.unique(pairs, axis=0, return_index=True)[1])


def check_count(bundle: Bundle) -> Finding:
    """Check that every generated sample is there or reported as dropped."""
    name = "selection.sampled"
    checked = "every generated sample is in the step, or reported as dropped"
    sampled = bundle.fact("sampled")
    present = len(_first_rows(bundle))
    dropped = sum(bundle.facts.dropped.values())
    vanished = sampled - present - dropped
    details = {"unit": "samples", "bound": 0.0, "residual": float(abs(vanished))}
    if not vanished:
        return passed(name, checked, sampled, **details)
    cause = "samples_vanished" if vanished > 0 else "samples_appeared"
    text = f"{sampled} samples were generated, {present} are there and {dropped} are reported as dropped"
    problem = Problem(cause, text, "Look between rollout and update.")
    return failed(name, checked, sampled, problem, **details)


def check_prompts(bundle: Bundle) -> Finding:
    """Check that all rows of a group have the same prompt."""
    name = "selection.group_prompts"
    checked = "all samples of a group have the same prompt"
    group = bundle.row_column("group")
    digests = _prompt_digests(bundle)
    first_of_group: dict[int, bytes] = {}
    wrong = []
    for row in _first_rows(bundle):
        expected = first_of_group.setdefault(int(group[row]), digests[row])
        if digests[row] != expected:
            wrong.append(row)
    count = bundle.row_count
    if not wrong:
        return passed(name, checked, count, unit="rows")
    groups = np.unique(group[wrong])
    text = f"{len(groups)} of {len(first_of_group)} groups mix several prompts"
    advice = (
        "Rewards are then compared across prompts: rows or group numbers were reordered."
    )
    problem = Problem("mixed_prompts", text, advice, np.array(wrong))
    return failed(name, checked, count, problem, unit="rows")


def _prompt_digests(bundle: Bundle) -> list[bytes]:
    lengths = bundle.row_column("prompt_length")
    tokens = bundle.token_column("token_ids")
    digests = []
    for row, length in enumerate(lengths.tolist()):
        start = int(bundle.offsets[row])
        prompt = np.ascontiguousarray(tokens[start : start + max(length, 0)])
        digests.append(hashlib.blake2b(prompt.data, digest_size=16).digest())
    return digests


def check_duplicates(bundle: Bundle) -> Finding:
    """Check that no row is there twice: equal tokens that chance does not explain."""
    name = "selection.duplicates"
    checked = "no row is there twice"
    column = "sampler_logprobs" if bundle.has("sampler_logprobs") else "old_logprobs"
    log_probs = sum_rows(
        bundle, lambda part: part.token_column(column) * part.token_column("loss_mask")
    )
    if bundle.facts.algorithm.temperature == 0:
        return unknown(name, checked, "a temperature above 0: greedy samples repeat")
    tokens = bundle.token_column("token_ids")
    offsets = bundle.offsets
    first_row: dict[bytes, int] = {}
    copies = []
    limit = log(CHANCE) - 2 * log(max(bundle.row_count, 1))
    for row in range(bundle.row_count):
        if not log_probs[row] < limit:
            continue  # a likely response may be drawn twice
        ids = np.ascontiguousarray(tokens[offsets[row] : offsets[row + 1]])
        digest = hashlib.blake2b(ids.data, digest_size=16).digest()
        if first_row.setdefault(digest, row) != row:
            copies.append(row)
    if not copies:
        return passed(name, checked, bundle.row_count, unit="rows")
    text = f"{len(copies)} rows equal an earlier one, which chance gives less than once in a million steps"
    problem = Problem(
        "duplicate_rows",
        text,
        "A row was trained twice, or stands for another.",
        np.array(copies),
    )
    return failed(name, checked, bundle.row_count, problem, unit="rows")


def check_dropped_lengths(bundle: Bundle) -> Finding:
    """Check that what the update left out is not longer than what it trained on, within groups."""
    name = "selection.dropped_lengths"
    checked = "samples that the update left out are as long as others of their groups"
    trained = bundle.row_column("trained").astype(bool)
    group = bundle.row_column("group")
    lengths = _response_lengths(bundle)
    dropped = _partly_dropped(group, trained)
    count = int(dropped.sum())
    details = {"unit": "rows", "bound": DROPPED_CHANCE}
    if count < FEWEST_DROPPED:
        return passed(
            name,
            f"{checked} ({count} were left out of kept groups)",
            bundle.row_count,
            **details,
        )
    z = _stratified_rank_score(lengths, dropped, group)
    chance = erfc(abs(z) / sqrt(2))
    details["residual"] = chance
    reported = sum(
        number for reason, number in bundle.facts.dropped.items() if "trunc" in reason
    )
    if chance >= DROPPED_CHANCE or reported >= count:
        return passed(name, checked, bundle.row_count, **details)
    direction = "longer" if z > 0 else "shorter"
    kept_mean = lengths[trained].mean()
    text = f"{count} samples that were left out are {direction}: {lengths[dropped].mean():.0f} tokens, "
    text += f"the others {kept_mean:.0f}"
    cause = "long_rows_dropped" if z > 0 else "short_rows_dropped"
    problem = Problem(
        cause,
        text,
        "Advantages of the rest are then biased by length.",
        np.flatnonzero(dropped),
    )
    return failed(name, checked, bundle.row_count, problem, **details)


def _response_lengths(bundle: Bundle) -> np.ndarray:
    """Loss masks of rows that are left out may be 0, so lengths are of tokens."""
    if bundle.has("prompt_length"):
        return bundle.lengths - bundle.row_column("prompt_length")
    return bundle.lengths


def _partly_dropped(group: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return rows left out of trained groups. A group of equal rewards is left out whole."""
    kept_groups = np.unique(group[trained])
    return ~trained & np.isin(group, kept_groups)


def _stratified_rank_score(
    lengths: np.ndarray, dropped: np.ndarray, group: np.ndarray
) -> float:
    """Return the normal score of the dropped rows' ranks within their groups (van Elteren 1960)."""
    score = 0.0
    variance = 0.0
    for number in np.unique(group[dropped]):
        rows = np.flatnonzero(group == number)
        _, index, counts = np.unique(lengths[rows], return_inverse=True, return_counts=True)
        ranks = np.cumsum(counts) - (counts - 1) / 2
        ranks = ranks[index]
        total = len(rows)
        chosen = dropped[rows]
        weight = 1 / (total + 1)
        score += weight * float(np.sum(ranks[chosen] - ranks.mean()))
        spread = float(np.var(ranks, ddof=1)) if total > 1 else 0.0
        picked = int(chosen.sum())
        variance += weight**2 * spread * picked * (total - picked) / total
    return score / sqrt(variance) if variance else 0.0


def check_dropped_share(bundle: Bundle) -> Finding:
    """Check that most samples with a signal are trained."""
    name = "selection.dropped_share"
    checked = "at least half of the samples whose groups have unequal rewards are trained"
    trained = bundle.row_column("trained").astype(bool)
    group = np.unique(bundle.row_column("group"), return_inverse=True)[1]
    rewards = bundle.row_column("rewards")
    highest = np.full(group.max(initial=-1) + 1, -np.inf)
    lowest = -highest
    np.maximum.at(highest, group, rewards)
    np.minimum.at(lowest, group, rewards)
    has_signal = (highest > lowest)[group]
    masked = trained & (row_sums(bundle, "loss_mask") == 0)
    lost = has_signal & (~trained | masked)
    count = int(has_signal.sum())
    share = float(lost.sum() / count) if count else 0.0
    details = {"unit": "samples", "bound": MOST_DROPPED, "residual": share}
    if share <= MOST_DROPPED:
        return passed(name, checked, count, **details)
    text = f"{share:.0%} of the samples with a signal are not trained"
    problem = Problem(
        "most_rows_left_out", text, "Look at what filters them.", np.flatnonzero(lost)
    )
    return failed(name, checked, count, problem, **details)


CHECKS = {
    "selection.group_sizes": check_groups,
    "selection.sampled": check_count,
    "selection.group_prompts": check_prompts,
    "selection.duplicates": check_duplicates,
    "selection.dropped_lengths": check_dropped_lengths,
    "selection.dropped_share": check_dropped_share,
}
