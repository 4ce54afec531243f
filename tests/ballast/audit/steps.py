"""Clean steps: bundles of a simulated trainer whose columns follow from one another by plain loops.

logits --temperature--> sampler's, old, new and reference log-probs
rewards --estimator of controller.algorithm--> advantages --loops--> loss
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ballast.audit.bundle import Algorithm, Bundle, Facts, Named

VOCABULARY = 24
END = 2
FIRST_WORD = 3


@dataclass(frozen=True)
class Recipe:
    """What a clean step is made with. dropped: whole groups of equal rewards are left out. noise: mean
    difference of sampler and trainer in bfloat16, nats.
    """

    seed: int = 0
    estimator: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    groups: int = 8
    group_size: int = 4
    turns: int = 1
    longest: int = 40
    mini_batches: int = 2
    precision: str = "float32"
    noise: float = 0.03
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    kl_coefficient: float = 0.0
    correction: str = "none"
    binary_rewards: bool = False
    drop_equal_groups: bool = False
    learning: float = 0.15


@dataclass
class Row:
    ids: list[int]
    mask: list[int]
    prompt_length: int
    truncated: bool


def clean_step(recipe: Recipe | None = None, **changes: Any) -> Bundle:
    """Return a bundle in which everything follows."""
    recipe = replace(recipe or Recipe(), **changes)
    random = np.random.default_rng(recipe.seed)
    rows, group = _rows(recipe, random)
    offsets = np.cumsum([0, *(len(row.ids) for row in rows)])
    mask = np.concatenate([row.mask for row in rows]).astype(np.int64)
    ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
    rewards = (
        random.integers(0, 2, len(rows))
        if recipe.binary_rewards
        else random.normal(0.4, 1, len(rows))
    )
    rewards = rewards.astype(np.float32).astype(np.float64)
    trained = _trained(recipe, rewards, group)
    mini_batch = random.permutation(np.arange(len(rows)) % recipe.mini_batches)
    columns = _log_probs(recipe, random, ids, mask, np.repeat(mini_batch, np.diff(offsets)))
    tokens = np.add.reduceat(mask, offsets[:-1])
    advantages = expected_advantages(recipe.estimator, rewards, group, tokens)
    columns |= {
        "token_ids": ids,
        "loss_mask": mask,
        "advantages": np.repeat(advantages, np.diff(offsets)).astype(np.float32),
        "weight_versions": np.full(len(ids), 6),
    }
    row_columns = {
        "rewards": rewards,
        "group": group,
        "sample": np.arange(len(rows)) % recipe.group_size,
        "prompt_length": np.array([row.prompt_length for row in rows]),
        "truncated": np.array([row.truncated for row in rows]).astype(np.int64),
        "trained": trained.astype(np.int64),
        "mini_batch": mini_batch,
        "micro_batch": mini_batch * 2 + random.integers(0, 2, len(rows)),
    }
    algorithm = Algorithm(
        estimator=recipe.estimator,
        epsilon=1e-6,
        loss=recipe.loss,
        clip_low=recipe.clip_low,
        clip_high=recipe.clip_high,
        dual_clip=recipe.dual_clip,
        aggregation=recipe.aggregation,
        constant_length=64,
        kl_coefficient=recipe.kl_coefficient,
        kl_estimator="k3",
        kl_in_reward=0.0,
        entropy_coefficient=0.0,
        correction=recipe.correction,
        correction_cap=2.0,
        temperature=recipe.temperature,
        top_p=1.0,
        top_k=0,
        group_size=recipe.group_size,
    )
    facts = Facts(
        step=7,
        algorithm=algorithm,
        gradient_norm=(0.7,) * recipe.mini_batches,
        model=Named("tiny", "0"),
        weight_version=6,
        learning_rate=1e-5,
        sampled=len(rows),
        end_tokens=(END,),
        precision=recipe.precision,
    )
    bundle = Bundle(facts, offsets, columns, row_columns)
    return with_reported_loss(bundle)


def with_reported_loss(bundle: Bundle) -> Bundle:
    """Report the loss and the denominators that the columns give."""
    trained = bundle.rows["trained"].astype(bool)
    mini_batches = bundle.rows["mini_batch"]
    numbers = np.unique(mini_batches[trained])
    losses = []
    tokens = []
    for number in numbers:
        rows = np.flatnonzero(trained & (mini_batches == number))
        losses.append(expected_loss(bundle, rows))
        tokens.append(
            sum(bundle.tokens["loss_mask"][_tokens(bundle, row)].sum() for row in rows)
        )
    facts = replace(
        bundle.facts, loss=tuple(losses), token_denominators=tuple(map(float, tokens))
    )
    return replace(bundle, facts=facts)


def _tokens(bundle: Bundle, row: int) -> slice:
    return slice(bundle.offsets[row], bundle.offsets[row + 1])


def expected_advantages(
    estimator: str, rewards: np.ndarray, group: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """By Ballast's own estimators, and by the formula where Ballast has none."""
    from controller.algorithm.advantages import estimate

    if estimator == "grpo_population_std":
        return np.concatenate(
            [_standardise(rewards[group == number], 0) for number in np.unique(group)]
        )
    if estimator == "batch":
        return _standardise(rewards, 1)
    if estimator == "reinforce":
        return rewards
    return estimate(estimator, {"reward": rewards, "group_number": group, "tokens": tokens})


def _standardise(rewards: np.ndarray, subtracted: int) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std(ddof=subtracted) + 1e-6)


def _trained(recipe: Recipe, rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    trained = np.ones(len(rewards), bool)
    if recipe.drop_equal_groups:
        for number in np.unique(group):
            members = group == number
            trained[members] = np.ptp(rewards[members]) > 0
        if not trained.any():
            trained[:] = True
    return trained


def _rows(recipe: Recipe, random: np.random.Generator) -> tuple[list[Row], np.ndarray]:
    rows = []
    for _ in range(recipe.groups):
        prompt = random.integers(FIRST_WORD, VOCABULARY, random.integers(4, 12)).tolist()
        rows += [_row(recipe, random, prompt) for _ in range(recipe.group_size)]
    return rows, np.repeat(np.arange(recipe.groups), recipe.group_size)


def _row(recipe: Recipe, random: np.random.Generator, prompt: list[int]) -> Row:
    ids = list(prompt)
    mask = [0] * len(prompt)
    truncated = False
    for turn in range(int(random.integers(1, recipe.turns + 1))):
        if turn:
            observation = random.integers(FIRST_WORD, VOCABULARY, 5).tolist()
            ids += observation
            mask += [0] * len(observation)
        length = int(random.integers(6, recipe.longest + 1))
        truncated = length == recipe.longest
        words = random.integers(FIRST_WORD, VOCABULARY, length).tolist()
        ids += words if truncated else [*words[:-1], END]
        mask += [1] * length
    return Row(ids, mask, len(prompt), truncated)


def _log_probs(
    recipe: Recipe,
    random: np.random.Generator,
    ids: np.ndarray,
    mask: np.ndarray,
    mini_batch: np.ndarray,
) -> dict[str, np.ndarray]:
    """Sampled tokens are likely ones: their logit is raised, as that of a sampled token is."""
    count = len(ids)
    logits = random.normal(0, 1.5, (count, VOCABULARY))
    logits[np.arange(count), ids] += random.gumbel(2, 1.5, count)
    old = log_probs_of(logits, ids, recipe.temperature)
    moved = logits + random.normal(0, recipe.learning, logits.shape)
    reference = log_probs_of(
        logits + random.normal(0, 0.3, logits.shape), ids, recipe.temperature
    )
    is_coarse = recipe.precision == "bfloat16"
    scale = recipe.noise if is_coarse else 1e-6
    sampler = np.minimum(old + random.laplace(0, scale, count), 0)
    new = np.where(mini_batch == 0, old, log_probs_of(moved, ids, recipe.temperature))
    if is_coarse:
        new = np.minimum(new + random.laplace(0, recipe.noise / 3, count), 0)
    columns: Mapping[str, np.ndarray] = {
        "sampler_logprobs": sampler,
        "old_logprobs": old,
        "new_logprobs": new,
        "reference_logprobs": reference,
    }
    return {
        name: np.where(mask, column, 0).astype(np.float32)
        for name, column in columns.items()
    }


def log_probs_of(logits: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature
    normaliser = np.log(np.exp(scaled).sum(-1))
    return scaled[np.arange(len(ids)), ids] - normaliser


def expected_loss(bundle: Bundle, rows: np.ndarray) -> float:
    """The loss of a mini-batch by loops over rows, as the papers write it."""
    algorithm = bundle.facts.algorithm
    row_losses = []
    counts = []
    for row in rows:
        tokens = _tokens(bundle, row)
        chosen = bundle.tokens["loss_mask"][tokens].astype(bool)
        values = {
            name: column[tokens][chosen].astype(np.float64)
            for name, column in bundle.tokens.items()
        }
        if chosen.any():
            row_losses.append(_token_losses(algorithm, values).sum())
            counts.append(chosen.sum())
    match algorithm.aggregation:
        case "token_mean":
            return float(np.sum(row_losses) / np.sum(counts))
        case "sequence_mean_token_mean":
            return float(np.mean(np.divide(row_losses, counts)))
        case "sequence_mean_token_sum":
            return float(np.mean(row_losses))
        case _:
            return float(np.mean(row_losses) / algorithm.constant_length)


def _token_losses(algorithm: Algorithm, values: dict[str, np.ndarray]) -> np.ndarray:
    new = values["new_logprobs"]
    advantages = values["advantages"]
    log_ratio = new - values["old_logprobs"]
    if algorithm.loss == "gspo":
        log_ratio = np.full(len(new), log_ratio.mean())
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    losses = -np.minimum(ratio * advantages, clipped * advantages)
    if algorithm.loss == "reinforce":
        losses = -advantages * new
    if algorithm.loss == "cispo":
        losses = -clipped * advantages * new
    if algorithm.dual_clip:
        bad = advantages < 0
        losses[bad] = np.minimum(losses[bad], -algorithm.dual_clip * advantages[bad])
    if algorithm.correction == "token":
        losses = losses * np.minimum(
            np.exp(values["old_logprobs"] - values["sampler_logprobs"]), 2.0
        )
    if algorithm.kl_coefficient:
        difference = values["reference_logprobs"] - new
        losses = losses + algorithm.kl_coefficient * (np.exp(difference) - difference - 1)
    return losses
