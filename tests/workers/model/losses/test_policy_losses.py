"""Every policy loss against its paper, one sequence at a time in float64, and against answers worked out by
hand.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.model.losses.loss_cases import (
    computed_in_parts,
    logs,
    loss_and_gradient,
    tokens_of,
    with_log_probs,
)
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.loss import automatic_aggregation
from workers.config.roles import POLICY_LOSS_NAMES, LossConfig
from workers.model.losses import Denominators, make_policy_loss, prepare, to_metrics
from workers.model.losses.registry import POLICY_LOSSES

Reference = Callable[[Tensor, Tensor, float, LossConfig], Tensor]
"""Of one sequence: (log_probs [n], old_log_probs [n], advantage, settings) -> loss of each token [n]."""


def reinforce(
    log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig
) -> Tensor:
    return -advantage * log_probs


def ppo_clip(
    log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig
) -> Tensor:
    losses = []
    for ratio in (log_probs - old).exp():
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        objective = min(ratio * advantage, bounded * advantage)
        if config.dual_clip and advantage < 0:
            objective = max(objective, config.dual_clip * advantage)
        losses.append(-torch.as_tensor(objective, dtype=torch.float64))
    return torch.stack(losses)


def cispo(log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig) -> Tensor:
    weights = (
        (log_probs - old).detach().exp().clamp(1 - config.clip_low, 1 + config.clip_high)
    )
    return -weights * advantage * log_probs


def gspo(log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig) -> Tensor:
    """The sequence form, eq. 5: one number, repeated so that the mean over its tokens is that number.

    The geometric mean is taken by its logarithm: products of far ratios would leave float64.
    """
    ratio = (log_probs - old).mean().exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = (
        -ratio * advantage
        if ratio * advantage <= bounded * advantage
        else -bounded * advantage
    )
    return loss.expand(len(log_probs))


def gmpo(log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig) -> Tensor:
    """The |y|-th root of a product of |min(r A, clip(r, e^-low, e^high) A)|, with the sign of A, by logarithms."""
    bounds = (
        (-math.inf, config.clip_high) if advantage > 0 else (-config.clip_low, math.inf)
    )
    return -advantage * (log_probs - old).clamp(*bounds).mean().exp().expand(len(log_probs))


def sapo(log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig) -> Tensor:
    tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
    return -4 / tau * torch.sigmoid(tau * (log_probs - old).expm1()) * advantage


REFERENCES: dict[str, Reference] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
}
CONFIGS = {
    "reinforce": LossConfig("reinforce"),
    "ppo_clip": LossConfig("ppo_clip", clip_low=0.1, clip_high=0.3),
    "dual clip": LossConfig("ppo_clip", clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    "cispo": LossConfig("cispo", clip_low=1.0, clip_high=0.3),
    "gspo": LossConfig("gspo", clip_low=0.01, clip_high=0.02),
    "gmpo": LossConfig("gmpo", clip_low=0.2, clip_high=0.5),
    "sapo": LossConfig("sapo", sapo_tau_positive=1.1, sapo_tau_negative=2.3),
}


def by_paper(sequences: DataProto, config: LossConfig) -> tuple[float, list[Tensor]]:
    """Loss under the paper's normaliser, and the gradient of each sequence's `log_probs`."""
    whole = sequences.tokens["log_probs"].clone().requires_grad_()
    losses = []
    for index, log_probs in enumerate(whole.split(sequences.lengths.tolist())):
        part = sequences.slice(index, index + 1)
        mask = part.tokens["loss_mask"]
        if mask.any():
            old, advantage = (
                part.tokens["old_log_probs"][mask],
                float(part.columns["advantages"]),
            )
            losses.append(REFERENCES[config.name](log_probs[mask], old, advantage, config))
    if config.name in ("gspo", "gmpo", "sapo"):
        loss = torch.stack([token_losses.mean() for token_losses in losses]).mean()
    else:
        loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), list(whole.grad.split(sequences.lengths.tolist()))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_paper(name, seed):
    sequences = with_log_probs(random_sequences(seed=seed), seed)
    expected, expected_gradients = by_paper(sequences, CONFIGS[name])
    loss_function = make_policy_loss(CONFIGS[name])
    loss, gradients, _ = computed_in_parts(
        sequences, [4], loss_function, Denominators.of(sequences)
    )
    assert loss == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(
        torch.cat(gradients), torch.cat(expected_gradients), rtol=1e-9, atol=1e-14
    )


def test_pages_without_torch_know_every_automatic_aggregation() -> None:
    registered = {
        name: POLICY_LOSSES[name].aggregation
        for name in POLICY_LOSS_NAMES
        if name != "custom"
    }
    assert registered == {name: automatic_aggregation(name) for name in registered}


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_NAMES))
@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 11), max_size=4),
    order=st.permutations(range(11)),
    seed=st.integers(0, 3),
)
def test_neither_order_nor_cut_changes_loss_gradient_or_metrics(name, cuts, order, seed):
    sequences = with_log_probs(random_sequences(seed=seed), seed)
    # Settings under which the covariance losses hold some tokens back.
    held = {"covariance_fraction": 0.1} if "cov" in name else {}
    held |= {"clip_cov_low": 0.1} if name == "clip_cov" else {}
    loss_function = make_policy_loss(LossConfig(name, **held))
    denominators = Denominators.of(sequences)

    def computed(rows: DataProto, at: list[int]):
        (prepared,) = prepare(loss_function, [rows], denominators)
        return computed_in_parts(prepared, at, loss_function, denominators)

    whole, gradients, statistics = computed(sequences, [])
    loss, cut_gradients, cut_statistics = computed(sequences.select_idxs(list(order)), cuts)
    assert loss == pytest.approx(whole, rel=1e-9)
    assert results(to_metrics(cut_statistics)) == pytest.approx(
        results(to_metrics(statistics)), rel=1e-9
    )
    for position, row in enumerate(order):
        torch.testing.assert_close(
            cut_gradients[position], gradients[row], rtol=1e-9, atol=1e-14
        )


HELD_BACK = (2.0, 3.0), [2], [1.0, -4.0]
HALF_CLIPPED = {"clip_fraction": 0.5}
SAPO = LossConfig("sapo", sapo_tau_positive=2.0)
GATE = 1 / (1 + math.exp(-2 * 2))


@pytest.mark.parametrize(
    ("config", "ratios", "lengths", "advantages", "loss", "gradient", "metrics"),
    [
        # Rising above 1 + high with a good token, falling below 1 - low with a bad one: no gradient.
        (
            LossConfig(clip_low=0.2, clip_high=0.4),
            (1.5, 0.5, 1.5, 0.5),
            [4],
            [1.0, 1.0, -1.0, -1.0],
            -(1.4 + 0.5 - 1.5 - 0.8) / 4,
            [0.0, -0.125, 0.375, 0.0],
            HALF_CLIPPED,
        ),
        # Ratio 5 counts as 3, ratio 2 as it is.
        (
            LossConfig(dual_clip=3.0),
            (5.0, 2.0),
            [2],
            [-2.0, -2.0],
            (3 * 2 + 2 * 2) / 2,
            [0.0, 2.0],
            {"dual_clip_fraction": 0.5},
        ),
        # Clipped tokens keep their gradient.
        (
            LossConfig("cispo", clip_high=0.5),
            (3.0, 1.2),
            [2],
            [1.0, 1.0],
            -(1.5 * math.log(3.0) + 1.2 * math.log(1.2)) / 2,
            [-0.75, -0.6],
            HALF_CLIPPED,
        ),
        # Geometric means: sqrt(4 * 1) = 2, above 1.2, and sqrt(1.21 / 1.21) = 1. Gradients are -s A /
        # (sequences * tokens).
        (
            LossConfig("gspo"),
            (4.0, 1.0, 1.21, 1 / 1.21),
            [2, 2],
            [1.0] * 4,
            -(1.2 + 1.0) / 2,
            [0.0, 0.0, -0.25, -0.25],
            HALF_CLIPPED,
        ),
        # The policy gradient on policy: sigmoid(0) * 4 / 2. It fades away from it.
        (SAPO, (1.0,), [1], [1.0], -1.0, [-1.0], {"sapo_gate": 1.0}),
        (
            SAPO,
            (3.0,),
            [1],
            [1.0],
            -2 * GATE,
            [-3 * 4 * GATE * (1 - GATE)],
            {"sapo_gate": 4 * GATE * (1 - GATE)},
        ),
        (
            LossConfig("clip_cov", clip_high=9.0),
            *HELD_BACK,
            -2 / 2,
            [-1.0, 0.0],
            {"held_back_fraction": 0.5},
        ),
        (
            LossConfig("kl_cov", kl_cov_coefficient=0.5),
            *HELD_BACK,
            (-2 + 3 * 4 + 0.5 * math.log(3)) / 2,
            [-1.0, (3 * 4 + 0.5) / 2],
            {"held_back_fraction": 0.5},
        ),
    ],
)
def test_losses_by_hand(config, ratios, lengths, advantages, loss, gradient, metrics):
    """Of tokens whose old log-prob is 0. The covariance losses hold back the second."""
    count = len(ratios)
    actual_loss, actual_gradient, actual_metrics = loss_and_gradient(
        config,
        logs(*ratios),
        lengths,
        old_log_probs=[0.0] * count,
        advantages=advantages,
        held_back=[False, True, False, False][:count],
    )
    assert actual_loss == pytest.approx(loss)
    assert actual_gradient == pytest.approx(gradient)
    assert actual_metrics == pytest.approx(actual_metrics | metrics)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "gmpo", "sapo"])
def test_without_old_log_probs_the_gradient_is_the_policy_gradient(name):
    advantages = [1.0, 1.0, -2.0]
    _, gradient, _ = loss_and_gradient(
        LossConfig(name, aggregation="token_mean"),
        [-1.0, -2.0, -3.0],
        [2, 1],
        advantages=advantages,
    )
    assert gradient == pytest.approx([-advantage / 3 for advantage in advantages])


def test_a_custom_loss_reads_old_log_probs_of_the_only_update_as_the_current_ones() -> None:
    predictions = tokens_of([-1.0, -2.0, -3.0], [2, 1])
    old = predictions["old_log_probs"]
    assert old.tolist() == [-1.0, -2.0, -3.0] and not old.requires_grad
    assert [part["old_log_probs"].tolist() for part in predictions.sequences()] == [
        [-1.0, -2.0],
        [-3.0],
    ]
    assert tokens_of([-1.0], old_log_probs=[-4.0])["old_log_probs"].tolist() == [-4.0]


def test_a_custom_loss_reads_the_columns_and_objects_of_each_sequence() -> None:
    predictions = tokens_of([-1.0, -2.0, -3.0], [2, 1], advantages=[1.0, 2.0, 3.0])
    predictions = replace(predictions, objects={"session": ["first", "second"]})
    parts = list(predictions.sequences())
    assert [part["advantages"].tolist() for part in parts] == [[1.0, 2.0], [3.0]]
    assert [part.objects["session"] for part in parts] == [["first"], ["second"]]
    assert [(part.num_sequences, part.sequence_index.tolist()) for part in parts] == [
        (1, [0, 0]),
        (1, [0]),
    ]
