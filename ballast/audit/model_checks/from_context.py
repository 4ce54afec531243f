"""Explanations that need another forward pass: of other positions, another context, another adapter."""

from collections.abc import Callable, Iterator

import numpy as np

from ballast.audit.model_checks.from_logits import Explanation, Sampling
from ballast.audit.model_checks.sample import Row
from ballast.audit.model_checks.scoring import ScoringModel, log_probs

Change = Callable[[np.ndarray], np.ndarray]


def explain_from_context(
    model: ScoringModel, row: Row, sampling: Sampling, thoughts: tuple[int, int] | None
) -> Iterator[tuple[Explanation, np.ndarray]]:
    """Yield explanations, and the log-probs [P] that each predicts."""
    yield from _positions(model, row, sampling)
    ends = list(sampling.end_tokens)
    if np.isin(row.token_ids[: row.places[-1]], ends).any():
        text = "of a context without the end tokens of its earlier turns"
        advice = "Let the chat template keep every end token that was sampled."
        explanation = Explanation("end_token_left_out", text, advice)

        def without_ends(ids: np.ndarray) -> np.ndarray:
            return ids[~np.isin(ids, ends)]

        yield explanation, _predict_turns(model, row, sampling, without_ends)
    if thoughts is not None:
        yield from _without_thoughts(model, row, sampling, thoughts)
    if model.has_adapter:
        yield from _adapters(model, row, sampling)


def _positions(
    model: ScoringModel, row: Row, sampling: Sampling
) -> Iterator[tuple[Explanation, np.ndarray]]:
    if len(row.before):
        advice = "Separate packed rows in the attention, and begin their positions at 0."
        joined = np.concatenate([row.before, row.token_ids])
        logits = model.logits(joined, row.places + len(row.before))
        explanation = Explanation(
            "attends_to_row_before", "of tokens that see the row before theirs", advice
        )
        yield explanation, log_probs(logits, row.targets, sampling.temperature)
        logits = model.logits(row.token_ids, row.places, len(row.before))
        text = "at positions that go on from the row before"
        yield (
            Explanation("positions_not_restarted", text, advice),
            log_probs(logits, row.targets, sampling.temperature),
        )
    if row.padding:
        logits = model.logits(row.token_ids, row.places, row.padding)
        text = "at positions that count the padding to the left"
        advice = "Count positions from the first token of a prompt."
        yield (
            Explanation("positions_count_padding", text, advice),
            log_probs(logits, row.targets, sampling.temperature),
        )


def _predict_turns(
    model: ScoringModel, row: Row, sampling: Sampling, change: Change
) -> np.ndarray:
    """Predict each turn whole, from a changed context."""
    predicted = np.zeros(len(row.places))
    for turn in row.turns():
        start = row.places[turn[0]]
        context = change(row.token_ids[:start])
        tokens = np.concatenate([context, row.token_ids[start : row.places[turn[-1]] + 1]])
        places = np.arange(len(context), len(tokens))
        if not len(context):
            predicted[turn] = row.recorded[turn]
            continue
        logits = model.logits(tokens, places)
        predicted[turn] = log_probs(logits, tokens[places], sampling.temperature)
    return predicted


def _without_thoughts(
    model: ScoringModel, row: Row, sampling: Sampling, thoughts: tuple[int, int]
) -> Iterator[tuple[Explanation, np.ndarray]]:
    is_thought = find_thoughts(row.token_ids, thoughts)
    if not is_thought.any():
        return
    advice = "Keep the thoughts that were sampled in the context of later tokens."

    def without_thoughts(ids: np.ndarray) -> np.ndarray:
        return ids[~is_thought[: len(ids)]]

    explanation = Explanation(
        "thoughts_left_out", "of a context without the thoughts of earlier turns", advice
    )
    yield explanation, _predict_turns(model, row, sampling, without_thoughts)
    remaining = np.flatnonzero(~is_thought)
    new_places = np.cumsum(~is_thought) - 1
    is_comparable = ~is_thought[row.places] & (new_places[row.places] > 0)
    if not is_comparable.any():
        return
    # Tokens of thoughts are not in such a context. They count as explained.
    predicted = row.recorded.copy()
    logits = model.logits(row.token_ids[remaining], new_places[row.places[is_comparable]])
    predicted[is_comparable] = log_probs(
        logits, row.targets[is_comparable], sampling.temperature
    )
    yield (
        Explanation("thoughts_left_out", "of a context without any thoughts", advice),
        predicted,
    )


def find_thoughts(token_ids: np.ndarray, thoughts: tuple[int, int]) -> np.ndarray:
    """Return a mask of the thoughts that begin and end, with their marks, bool [T]."""
    mask = np.zeros(len(token_ids), bool)
    start = None
    for place, token in enumerate(token_ids):
        if token == thoughts[0] and start is None:
            start = place
        elif token == thoughts[1] and start is not None:
            mask[start : place + 1] = True
            start = None
    return mask


def _adapters(
    model: ScoringModel, row: Row, sampling: Sampling
) -> Iterator[tuple[Explanation, np.ndarray]]:
    advice = "Load the adapter once, with its own scale."
    for cause, factor, text in (
        ("adapter_not_applied", 0.0, "of the model without its adapter"),
        ("adapter_scaled_twice", 2.0, "of the model with its adapter scaled twice"),
    ):
        with model.adapter_scaled(factor):
            logits = model.logits(row.token_ids, row.places)
        yield (
            Explanation(cause, text, advice),
            log_probs(logits, row.targets, sampling.temperature),
        )
