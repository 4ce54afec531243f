"""Faults of trainers, planted in clean steps. Most are from public reports of other systems.

Fault.plant changes a clean bundle. The check `check` must then fail with the cause `cause`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ballast.audit.bundle import Bundle
from tests.ballast.audit.steps import (
    END,
    Recipe,
    clean_step,
    expected_advantages,
    with_reported_loss,
)

Change = Callable[[Bundle], Bundle]


@dataclass(frozen=True)
class Fault:
    """recipe: of the clean step."""

    plant: Change
    check: str
    cause: str
    recipe: dict[str, Any] = field(default_factory=dict)


def at_temperature(name: str, temperature: float) -> Change:
    """Give a column the temperature of a clean step made with another one."""

    def plant(bundle: Bundle) -> Bundle:
        recipe = Recipe(
            temperature=bundle.facts.algorithm.temperature, precision=bundle.facts.precision
        )
        other = clean_step(replace(recipe, temperature=temperature))
        return with_tokens(bundle, **{name: other.tokens[name]})

    return plant


def round_column(name: str) -> Change:
    """Keep the bits of bfloat16."""

    def plant(bundle: Bundle) -> Bundle:
        bits = bundle.tokens[name].view(np.uint32) & np.uint32(0xFFFF0000)
        return with_tokens(bundle, **{name: bits.view(np.float32)})

    return plant


def mark_none_truncated(bundle: Bundle) -> Bundle:
    return with_rows(bundle, truncated=np.zeros(bundle.row_count, np.int64))


def normalise_again(advantages: np.ndarray) -> np.ndarray:
    return (advantages - 0.1) / 1.2


def with_tokens(bundle: Bundle, **columns: np.ndarray) -> Bundle:
    return replace(bundle, tokens={**bundle.tokens, **columns})


def with_rows(bundle: Bundle, **columns: np.ndarray) -> Bundle:
    return replace(bundle, rows={**bundle.rows, **columns})


def with_settings(bundle: Bundle, **settings: Any) -> Bundle:
    return replace(
        bundle,
        facts=replace(bundle.facts, algorithm=replace(bundle.facts.algorithm, **settings)),
    )


def with_facts(bundle: Bundle, **facts: Any) -> Bundle:
    return replace(bundle, facts=replace(bundle.facts, **facts))


def rows_of_tokens(bundle: Bundle) -> np.ndarray:
    return np.repeat(np.arange(bundle.row_count), bundle.lengths)


def change_column(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Change a column where tokens are trained. It is 0 elsewhere."""

    def plant(bundle: Bundle) -> Bundle:
        mask = bundle.tokens["loss_mask"].astype(bool)
        column = bundle.tokens[name].astype(np.float64)
        return with_tokens(
            bundle, **{name: np.where(mask, change(column), 0).astype(np.float32)}
        )

    return plant


def shift_column(name: str, lag: int) -> Change:
    """Move a column within its rows."""

    def plant(bundle: Bundle) -> Bundle:
        column = bundle.tokens[name].copy()
        for start, end in zip(bundle.offsets[:-1], bundle.offsets[1:], strict=True):
            column[start:end] = np.roll(column[start:end], lag)
        return with_tokens(bundle, **{name: column})

    return plant


def zero_some(name: str, share: float) -> Change:
    def plant(bundle: Bundle) -> Bundle:
        chosen = np.random.default_rng(1).random(bundle.token_count) < share
        return with_tokens(
            bundle, **{name: np.where(chosen, 0, bundle.tokens[name]).astype(np.float32)}
        )

    return plant


def swap_rows_of_column(name: str) -> Change:
    """Give rows of equal lengths each other's values."""

    def plant(bundle: Bundle) -> Bundle:
        column = bundle.tokens[name].copy()
        masks = bundle.tokens["loss_mask"]
        by_shape: dict[bytes, list[slice]] = {}
        for start, end in zip(bundle.offsets[:-1], bundle.offsets[1:], strict=True):
            by_shape.setdefault(masks[start:end].tobytes(), []).append(slice(start, end))
        for places in by_shape.values():
            values = [bundle.tokens[name][place] for place in places]
            for place, value in zip(places, [*values[1:], values[0]], strict=True):
                column[place] = value
        return with_tokens(bundle, **{name: column})

    return plant


def noise_in_rows(name: str, rows: list[int]) -> Change:
    def plant(bundle: Bundle) -> Bundle:
        chosen = np.isin(rows_of_tokens(bundle), rows) & (bundle.tokens["loss_mask"] > 0)
        noise = np.random.default_rng(2).normal(0, 1.5, bundle.token_count)
        column = np.minimum(
            bundle.tokens[name] + np.where(chosen, noise, 0), -0.001 * chosen
        )
        return with_tokens(bundle, **{name: column.astype(np.float32)})

    return plant


def shift_mask(lag: int) -> Change:
    def plant(bundle: Bundle) -> Bundle:
        return shift_column("loss_mask", lag)(bundle)

    return plant


def mask_from(distance: int) -> Change:
    """Let the mask begin `distance` tokens after the prompt's end, before it if negative."""

    def plant(bundle: Bundle) -> Bundle:
        place = np.arange(bundle.token_count) - np.repeat(
            bundle.offsets[:-1], bundle.lengths
        )
        begin = np.repeat(bundle.rows["prompt_length"] + distance, bundle.lengths)
        return with_tokens(bundle, loss_mask=(place >= begin).astype(np.int64))

    return plant


def train_after_end(bundle: Bundle) -> Bundle:
    """Move the first end token of some rows to the middle of the response."""
    ids = bundle.tokens["token_ids"].copy()
    for row in range(0, bundle.row_count, 5):
        start = bundle.offsets[row] + bundle.rows["prompt_length"][row]
        ids[(start + bundle.offsets[row + 1]) // 2] = END
    return with_tokens(bundle, token_ids=ids)


def leave_out_ends(bundle: Bundle) -> Bundle:
    mask = bundle.tokens["loss_mask"] * (bundle.tokens["token_ids"] != END)
    return with_tokens(bundle, loss_mask=mask)


def mask_most_rows(bundle: Bundle) -> Bundle:
    chosen = rows_of_tokens(bundle) % 5 == 0
    return with_tokens(bundle, loss_mask=bundle.tokens["loss_mask"] * chosen)


def reverse_versions(bundle: Bundle) -> Bundle:
    versions = bundle.tokens["weight_versions"].copy()
    mask = bundle.tokens["loss_mask"].astype(bool)
    last = np.flatnonzero(mask)[-3:]
    versions[last] = 4
    return with_tokens(bundle, weight_versions=versions)


def advantages_by(estimator: str) -> Change:
    """Compute advantages by another estimator, and the loss from them."""

    def plant(bundle: Bundle) -> Bundle:
        rewards = bundle.rows["rewards"]
        return with_advantages(
            bundle, _estimate(bundle, estimator, rewards, bundle.rows["group"])
        )

    return plant


def _estimate(
    bundle: Bundle, estimator: str, rewards: np.ndarray, group: np.ndarray
) -> np.ndarray:
    tokens = np.add.reduceat(bundle.tokens["loss_mask"], bundle.offsets[:-1])
    return expected_advantages(estimator, rewards, group, tokens)


def with_advantages(bundle: Bundle, advantages: np.ndarray) -> Bundle:
    column = np.repeat(advantages, bundle.lengths).astype(np.float32)
    return with_reported_loss(with_tokens(bundle, advantages=column))


def change_advantages(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def plant(bundle: Bundle) -> Bundle:
        return with_advantages(
            bundle, change(bundle.tokens["advantages"][bundle.offsets[:-1]].astype(float))
        )

    return plant


def rewards_of_other_rows(lag: int) -> Change:
    """Compute advantages from the rewards of earlier rows: stale labels."""

    def plant(bundle: Bundle) -> Bundle:
        rewards = np.roll(bundle.rows["rewards"], lag)
        advantages = _estimate(
            bundle, bundle.facts.algorithm.estimator, rewards, bundle.rows["group"]
        )
        return with_advantages(bundle, advantages)

    return plant


def one_stale_reward(bundle: Bundle) -> Bundle:
    rewards = bundle.rows["rewards"].copy()
    rewards[5] += 0.25
    return with_rows(bundle, rewards=rewards)


def group_by(function: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Compare other rows. function: gives groups by row numbers."""

    def plant(bundle: Bundle) -> Bundle:
        group = np.unique(function(np.arange(bundle.row_count)), return_inverse=True)[1]
        advantages = _estimate(
            bundle, bundle.facts.algorithm.estimator, bundle.rows["rewards"], group
        )
        return with_advantages(bundle, advantages)

    return plant


def spread_advantages(bundle: Bundle) -> Bundle:
    """Let advantages of some rows fall from token to token."""
    column = bundle.tokens["advantages"].copy()
    column[::7] *= 0.9
    return with_tokens(bundle, advantages=column)


def loss_by(**settings: Any) -> Change:
    """Report the loss of other settings than the bundle's."""

    def plant(bundle: Bundle) -> Bundle:
        other = with_reported_loss(with_settings(bundle, **settings))
        return with_facts(bundle, loss=other.facts.loss)

    return plant


def loss_of(change: Change) -> Change:
    """Report the loss of other columns than the bundle's."""

    def plant(bundle: Bundle) -> Bundle:
        return with_facts(bundle, loss=with_reported_loss(change(bundle)).facts.loss)

    return plant


def scale_loss(factor: Callable[[Bundle, np.ndarray], float]) -> Change:
    """Divide the loss of each mini-batch by something else. factor: of the mini-batch's rows."""

    def plant(bundle: Bundle) -> Bundle:
        losses = []
        for number, loss in enumerate(bundle.facts.loss):
            rows = np.flatnonzero(
                (bundle.rows["mini_batch"] == number) & (bundle.rows["trained"] > 0)
            )
            losses.append(loss * factor(bundle, rows))
        return with_facts(bundle, loss=tuple(losses))

    return plant


def _loss_tokens(bundle: Bundle, rows: np.ndarray) -> int:
    return int(np.isin(rows_of_tokens(bundle), rows) @ bundle.tokens["loss_mask"])


def count_padding(bundle: Bundle, rows: np.ndarray) -> float:
    responses = (bundle.lengths - bundle.rows["prompt_length"])[rows]
    return _loss_tokens(bundle, rows) / (len(rows) * responses.max())


def count_prompts(bundle: Bundle, rows: np.ndarray) -> float:
    return _loss_tokens(bundle, rows) / bundle.lengths[rows].sum()


def count_step(bundle: Bundle, rows: np.ndarray) -> float:
    trained = np.flatnonzero(bundle.rows["trained"])
    return (
        _loss_tokens(bundle, rows) * len(bundle.facts.loss) / _loss_tokens(bundle, trained)
    )


def count_dropped(bundle: Bundle, rows: np.ndarray) -> float:
    return (
        _loss_tokens(bundle, rows)
        * len(bundle.facts.loss)
        / bundle.tokens["loss_mask"].sum()
    )


def mean_of_micro_batches(bundle: Bundle) -> Bundle:
    """Report the mean of the micro-batches' token means."""
    numbers = bundle.rows["micro_batch"]
    losses = []
    for number in range(len(bundle.facts.loss)):
        of_mini_batch = np.unique(numbers[bundle.rows["mini_batch"] == number])
        means = []
        for micro_batch in of_mini_batch:
            part = with_rows(bundle, trained=(numbers == micro_batch).astype(np.int64))
            means.append(with_reported_loss(part).facts.loss[0])
        losses.append(float(np.mean(means)))
    return with_facts(bundle, loss=tuple(losses))


def take_rows(bundle: Bundle, rows: np.ndarray) -> Bundle:
    """Return other rows of a bundle, in the order of `rows`."""
    places = np.concatenate(
        [np.arange(bundle.offsets[row], bundle.offsets[row + 1]) for row in rows]
    )
    tokens = {name: column[places] for name, column in bundle.tokens.items()}
    columns = {name: column[rows] for name, column in bundle.rows.items()}
    offsets = np.concatenate([[0], np.cumsum(bundle.lengths[rows])])
    return replace(bundle, offsets=offsets, tokens=tokens, rows=columns)


def lose_rows(bundle: Bundle) -> Bundle:
    return with_reported_loss(
        take_rows(bundle, np.delete(np.arange(bundle.row_count), [3, 9]))
    )


def double_row(bundle: Bundle) -> Bundle:
    """A row stands in the place of another one of its group."""
    rows = np.arange(bundle.row_count)
    rows[5] = rows[4]
    return with_reported_loss(take_rows(bundle, rows))


def merge_groups(bundle: Bundle) -> Bundle:
    group = bundle.rows["group"].copy()
    group[group == 1] = 0
    sample = np.arange(bundle.row_count)
    return with_rows(bundle, group=group, sample=sample)


def swap_prompts(bundle: Bundle) -> Bundle:
    """Number two rows by each other's group."""
    group = bundle.rows["group"].copy()
    group[[3, 4]] = group[[4, 3]]
    return with_rows(bundle, group=group)


def drop_long_rows(bundle: Bundle) -> Bundle:
    responses = bundle.lengths - bundle.rows["prompt_length"]
    trained = bundle.rows["trained"].copy()
    for number in np.unique(bundle.rows["group"]):
        members = np.flatnonzero(bundle.rows["group"] == number)
        trained[members[np.argmax(responses[members])]] = 0
    return with_reported_loss(with_rows(bundle, trained=trained))


def leave_out_most(bundle: Bundle) -> Bundle:
    trained = (np.arange(bundle.row_count) % 3 == 0).astype(np.int64)
    return with_reported_loss(with_rows(bundle, trained=trained))


BFLOAT = {"precision": "bfloat16"}
BINARY = {"binary_rewards": True, "groups": 12, "group_size": 6}
LN2 = float(np.log(2))
UNEQUAL_CLIP = {"clip_low": 0.1, "clip_high": 0.3, "learning": 0.4}

FAULTS: dict[str, Fault] = {
    # Layout
    "mask one token early": Fault(
        shift_mask(-1), "layout.prompt_mask", "mask_shifted_left"
    ),
    "mask one token late": Fault(mask_from(1), "layout.prompt_mask", "mask_shifted_right"),
    "mask covers the prompt's end": Fault(
        mask_from(-3), "layout.prompt_mask", "mask_covers_prompt"
    ),
    "mask covers whole rows": Fault(
        mask_from(-99), "layout.prompt_mask", "mask_covers_prompt"
    ),
    "tokens after the end trained": Fault(
        train_after_end, "layout.after_end", "trained_after_end"
    ),
    "observations trained": Fault(
        mask_from(0), "layout.after_end", "trained_after_end", {"turns": 4}
    ),
    "end tokens not trained": Fault(
        leave_out_ends, "layout.after_end", "end_token_not_trained"
    ),
    "most rows masked": Fault(mask_most_rows, "layout.loss_tokens", "most_rows_masked"),
    "padding as ids": Fault(
        lambda bundle: with_tokens(
            bundle, token_ids=np.where(bundle.tokens["token_ids"] == 9, -100, 5)
        ),
        "layout.ids",
        "negative_ids",
    ),
    "truncation not marked": Fault(
        mark_none_truncated,
        "layout.truncated",
        "truncation_not_marked",
        {"longest": 10, "groups": 20},
    ),
    "older weights at the end": Fault(
        reverse_versions, "layout.weight_versions", "versions_fall"
    ),
    "samples of the next step": Fault(
        lambda bundle: with_facts(bundle, weight_version=5),
        "layout.weight_versions",
        "versions_from_future",
    ),
    # Log-probs
    "sampler's log-probs all zero": Fault(
        change_column("sampler_logprobs", np.zeros_like), "log_probs.sampler", "all_zero"
    ),
    "old log-probs constant": Fault(
        change_column("old_logprobs", lambda x: 0 * x - 2.5), "log_probs.old", "constant"
    ),
    "reference all zero": Fault(
        change_column("reference_logprobs", np.zeros_like),
        "log_probs.reference",
        "all_zero",
    ),
    "a tenth of a percent filled with zeros": Fault(
        zero_some("sampler_logprobs", 0.01), "log_probs.filled", "partly_zero", BFLOAT
    ),
    "new log-probs partly zero": Fault(
        zero_some("new_logprobs", 0.03), "log_probs.filled", "partly_zero"
    ),
    "one NaN": Fault(
        change_column(
            "new_logprobs", lambda x: np.where(np.arange(len(x)) == np.argmin(x), np.nan, x)
        ),
        "log_probs.new",
        "not_finite",
    ),
    "probabilities": Fault(
        change_column("sampler_logprobs", np.exp), "log_probs.sampler", "probabilities"
    ),
    "negated": Fault(
        change_column("old_logprobs", np.negative), "log_probs.old", "sign_flipped"
    ),
    "base 2": Fault(
        change_column("sampler_logprobs", lambda x: x / LN2),
        "log_probs.sampler_and_trainer",
        "base_2",
        BFLOAT,
    ),
    "base 10": Fault(
        change_column("sampler_logprobs", lambda x: x / np.log(10)),
        "log_probs.sampler_and_trainer",
        "base_10",
    ),
    "a factor near to base 2": Fault(
        change_column("sampler_logprobs", lambda x: x / 1.4),
        "log_probs.sampler_and_trainer",
        "scaled",
    ),
    "a factor near to base 2, in bfloat16": Fault(
        change_column("sampler_logprobs", lambda x: x / 1.4),
        "log_probs.sampler_and_trainer",
        "scaled",
        BFLOAT,
    ),
    "sampler one token late": Fault(
        shift_column("sampler_logprobs", 1),
        "log_probs.sampler_and_trainer",
        "shifted_by_one",
        BFLOAT,
    ),
    "sampler one token early": Fault(
        shift_column("sampler_logprobs", -1),
        "log_probs.sampler_and_trainer",
        "shifted_by_one",
    ),
    "reference one token late": Fault(
        shift_column("reference_logprobs", 1),
        "log_probs.reference_places",
        "shifted_by_one",
    ),
    "new one token early": Fault(
        shift_column("new_logprobs", -1), "ratios.first_update", "shifted_by_one", BFLOAT
    ),
    "sampler of other rows": Fault(
        swap_rows_of_column("sampler_logprobs"),
        "log_probs.sampler_and_trainer",
        "other_rows",
        {"groups": 16, "group_size": 8, "longest": 8},
    ),
    "three rows of other weights": Fault(
        noise_in_rows("sampler_logprobs", [2, 3, 17]),
        "log_probs.sampler_and_trainer",
        "some_rows",
        BFLOAT,
    ),
    "log-probs clamped": Fault(
        change_column("sampler_logprobs", lambda x: np.maximum(x, -1.5)),
        "log_probs.sampler_and_trainer",
        "clamped",
    ),
    "mean of the row at each token": Fault(
        lambda bundle: _row_means(bundle, "sampler_logprobs"),
        "log_probs.sampler_and_trainer",
        "sequence_mean",
    ),
    "temperature of the sampler not applied": Fault(
        at_temperature("sampler_logprobs", 1.0),
        "log_probs.sampler_and_trainer",
        "temperature",
        {"temperature": 0.6},
    ),
    "temperature not applied in the update": Fault(
        at_temperature("new_logprobs", 1.0),
        "ratios.first_update",
        "temperature",
        {"temperature": 1.4, "precision": "bfloat16"},
    ),
    "rounded to bfloat16": Fault(
        round_column("sampler_logprobs"),
        "log_probs.sampler_and_trainer",
        "rounded_to_bfloat16",
    ),
    # Ratios
    "dropout in the update": Fault(
        noise_in_rows("new_logprobs", list(range(32))),
        "ratios.first_update",
        "ratio_not_one",
    ),
    "ratio of a column with itself": Fault(
        lambda bundle: with_reported_loss(
            with_tokens(bundle, new_logprobs=bundle.tokens["old_logprobs"])
        ),
        "ratios.later_updates",
        "ratio_never_moves",
    ),
    # Advantages
    "advantages negated": Fault(
        change_advantages(np.negative), "advantages.estimator", "sign_flipped"
    ),
    "advantages all zero": Fault(
        change_advantages(np.zeros_like), "advantages.estimator", "all_zero"
    ),
    "not divided by the deviation": Fault(
        advantages_by("dr_grpo"), "advantages.estimator", "estimator:dr_grpo", BINARY
    ),
    "biased deviation": Fault(
        advantages_by("grpo_population_std"),
        "advantages.estimator",
        "estimator:grpo_population_std",
    ),
    "leave-one-out in place of the mean": Fault(
        advantages_by("rloo"),
        "advantages.estimator",
        "estimator:rloo",
        {"estimator": "dr_grpo"},
    ),
    "whole batch normalised": Fault(
        advantages_by("batch"), "advantages.estimator", "estimator:batch", BINARY
    ),
    "reinforce++": Fault(
        advantages_by("reinforce_plus_plus"),
        "advantages.estimator",
        "estimator:reinforce_plus_plus",
    ),
    "rewards as advantages": Fault(
        advantages_by("reinforce"),
        "advantages.estimator",
        "estimator:reinforce",
        {"estimator": "rloo"},
    ),
    "rewards of the row before": Fault(
        rewards_of_other_rows(1),
        "advantages.estimator",
        "stale_rewards",
        BINARY | {"seed": 3},
    ),
    "rewards of the group before": Fault(
        rewards_of_other_rows(4), "advantages.estimator", "stale_rewards"
    ),
    "one stale reward": Fault(one_stale_reward, "advantages.estimator", "stale_rewards"),
    "groups of twice the size": Fault(
        group_by(lambda rows: rows // 8), "advantages.estimator", "other_groups", BFLOAT
    ),
    "groups across prompts": Fault(
        group_by(lambda rows: rows % 8), "advantages.estimator", "other_groups"
    ),
    "advantages scaled": Fault(
        change_advantages(lambda x: 1.05 * x), "advantages.estimator", "scaled"
    ),
    "advantages normalised twice": Fault(
        change_advantages(normalise_again),
        "advantages.estimator",
        "normalised_again",
        {"binary_rewards": True},
    ),
    "advantages clipped": Fault(
        change_advantages(lambda x: np.clip(x, -1, 1)), "advantages.estimator", "clipped"
    ),
    "advantages differ within rows": Fault(
        spread_advantages, "advantages.tokens", "varies_within_row"
    ),
    # Loss
    "clip bounds swapped": Fault(
        loss_by(clip_low=0.3, clip_high=0.1),
        "loss.value",
        "clip_bounds_swapped",
        UNEQUAL_CLIP,
    ),
    "one clip bound for both": Fault(
        loss_by(clip_low=0.1, clip_high=0.1),
        "loss.value",
        "clip_bounds_equal",
        UNEQUAL_CLIP,
    ),
    "another clip bound": Fault(
        loss_by(clip_high=0.2), "loss.value", "clip_bounds_other", UNEQUAL_CLIP
    ),
    "loss of one of four accumulated micro-batches": Fault(
        scale_loss(lambda bundle, rows: 0.25), "loss.value", "scaled", BFLOAT
    ),
    "KL of another weight": Fault(
        loss_by(kl_coefficient=0.01),
        "loss.value",
        "kl_coefficient",
        {"kl_coefficient": 0.05},
    ),
    "KL although its weight is 0": Fault(
        loss_by(kl_coefficient=0.02), "loss.value", "kl_coefficient"
    ),
    "not clipped": Fault(
        loss_by(clip_low=1e9, clip_high=1e9), "loss.value", "not_clipped", UNEQUAL_CLIP
    ),
    "sequence means in place of a token mean": Fault(
        loss_by(aggregation="sequence_mean_token_mean"),
        "loss.value",
        "aggregation:sequence_mean_token_mean",
    ),
    "token mean in place of sequence means": Fault(
        loss_by(aggregation="token_mean"),
        "loss.value",
        "aggregation:token_mean",
        {"aggregation": "sequence_mean_token_mean"},
    ),
    "mean of micro-batches": Fault(mean_of_micro_batches, "loss.value", "micro_batch_mean"),
    "padding counted": Fault(scale_loss(count_padding), "loss.value", "padding_counted"),
    "prompts counted": Fault(
        scale_loss(count_prompts), "loss.value", "prompt_tokens_counted", BFLOAT
    ),
    "tokens of the whole step": Fault(
        scale_loss(count_step), "loss.value", "step_tokens", {"seed": 1}
    ),
    "dropped groups counted": Fault(
        scale_loss(count_dropped),
        "loss.value",
        "dropped_rows_counted",
        {"binary_rewards": True, "drop_equal_groups": True, "groups": 16},
    ),
    "KL left out": Fault(
        loss_by(kl_coefficient=0.0), "loss.value", "kl_left_out", {"kl_coefficient": 0.05}
    ),
    "KL with the wrong sign": Fault(
        loss_by(kl_coefficient=-0.05),
        "loss.value",
        "kl_sign_flipped",
        {"kl_coefficient": 0.05},
    ),
    "correction left out": Fault(
        loss_by(correction="none"),
        "loss.value",
        "correction_left_out",
        BFLOAT | {"correction": "token"},
    ),
    "gspo in place of tokens' ratios": Fault(
        loss_by(loss="gspo"), "loss.value", "loss:gspo", UNEQUAL_CLIP
    ),
    "ratios to the sampler": Fault(
        loss_of(
            lambda bundle: with_tokens(
                bundle, old_logprobs=bundle.tokens["sampler_logprobs"]
            )
        ),
        "loss.value",
        "old_is_sampler",
        BFLOAT,
    ),
    "denominators with prompts": Fault(
        lambda bundle: with_facts(bundle, token_denominators=_mini_batch_lengths(bundle)),
        "loss.denominators",
        "prompt_tokens_counted",
    ),
    "gradient of NaN": Fault(
        lambda bundle: with_facts(bundle, gradient_norm=(float("nan"),)),
        "loss.gradient_norm",
        "not_finite",
    ),
    "gradient of zero": Fault(
        lambda bundle: with_facts(bundle, gradient_norm=(0.0,)),
        "loss.gradient_norm",
        "zero_gradient",
    ),
    # Selection
    "two rows vanished": Fault(lose_rows, "selection.group_sizes", "groups_too_small"),
    "two samples vanished": Fault(lose_rows, "selection.sampled", "samples_vanished"),
    "two prompts in one group": Fault(
        merge_groups, "selection.group_sizes", "groups_too_large"
    ),
    "rows of another prompt in a group": Fault(
        swap_prompts, "selection.group_prompts", "mixed_prompts"
    ),
    "advantages of groups that lost samples": Fault(
        lose_rows, "advantages.estimator", "incomplete_groups"
    ),
    "a row twice": Fault(double_row, "selection.duplicates", "duplicate_rows"),
    "long rows dropped": Fault(
        drop_long_rows,
        "selection.dropped_lengths",
        "long_rows_dropped",
        {"groups": 16, "group_size": 8},
    ),
    "most rows left out": Fault(
        leave_out_most, "selection.dropped_share", "most_rows_left_out"
    ),
}


def _row_means(bundle: Bundle, name: str) -> Bundle:
    rows = rows_of_tokens(bundle)
    mask = bundle.tokens["loss_mask"]
    means = np.bincount(rows, bundle.tokens[name]) / np.bincount(rows, mask)
    return with_tokens(bundle, **{name: (means[rows] * mask).astype(np.float32)})


def _mini_batch_lengths(bundle: Bundle) -> tuple[float, ...]:
    return tuple(np.bincount(bundle.rows["mini_batch"], bundle.lengths).tolist())
