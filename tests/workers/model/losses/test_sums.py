"""Losses that are sums, against their definitions token by token in float64, however a batch is cut into
calls.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.refusals import refused
from tests.workers.model.losses.loss_cases import computed_in_parts, with_log_probs
from tests.workers.model.losses.test_policy_losses import cispo, gspo, ppo_clip
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.config.loss import SUM_LOSS_NAMES, SumLossConfig
from workers.config.roles import LossConfig
from workers.model.losses import Denominators, make_sum_loss

ONE = Denominators(1.0, 1.0)


def importance_sampling(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    return -(log_probs - sampled).exp() * advantage


def dro(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    return -(log_probs * advantage - 0.5 * config.beta * (log_probs - sampled) ** 2)


def cross_entropy(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    return -sampled * log_probs  # the test's weights


OF_POLICIES = {"ppo": ppo_clip, "cispo": cispo, "gspo": gspo}
OF_SUMS = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "dro": dro,
}


def token_losses(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    """Losses [n] of one sequence: (log_probs [n], sampler's [n], advantage, settings)."""
    if config.name in OF_SUMS:
        return OF_SUMS[config.name](log_probs, sampled, advantage, config)
    clips = LossConfig(clip_low=1 - config.ratio_low, clip_high=config.ratio_high - 1)
    return OF_POLICIES[config.name](log_probs, sampled, advantage, clips)


def sequences(name: str) -> DataProto:
    """Without a mask for gspo, whose tokens share their ratio's gradient."""
    found = with_log_probs(random_sequences())
    mask = (torch.arange(found.num_tokens) % 5 > 0) | (name == "gspo")
    tokens = found.tokens | {
        "weights": found.tokens["rollout_log_probs"],
        "mask": mask.double(),
    }
    return replace(found, tokens=tokens)


def expected(name: str, config: SumLossConfig) -> tuple[float, list[Tensor]]:
    whole = sequences(name)
    lengths = whole.lengths.tolist()
    log_probs = whole.tokens["log_probs"].clone().requires_grad_()
    total = 0 * log_probs.sum()  # a clip may leave nothing else to differentiate
    for row, values in enumerate(log_probs.split(lengths)):
        part = whole.slice(row, row + 1)
        learned = part.tokens["loss_mask"]
        if learned.any():
            sampled = part.tokens["rollout_log_probs"][learned]
            advantage = float(part.columns["advantages"])
            losses = token_losses(values[learned], sampled, advantage, config)
            total = total + (losses * part.tokens["mask"][learned]).sum()
    total.backward()
    return total.item(), list(log_probs.grad.split(lengths))


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 10), max_size=4, unique=True))
@pytest.mark.parametrize("name", SUM_LOSS_NAMES)
def test_a_sum_is_its_definition_however_the_batch_is_cut(
    name: str, cuts: list[int]
) -> None:
    config = SumLossConfig(name, ratio_low=0.7, ratio_high=1.4, beta=0.3)
    loss, gradients, _ = computed_in_parts(
        sequences(name), cuts, make_sum_loss(config), ONE
    )
    known_loss, known = expected(name, config)
    assert loss == pytest.approx(known_loss, rel=1e-12)
    for found, gradient in zip(gradients, known, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)


def test_an_unknown_sum_is_refused() -> None:
    with refused("loss=dpo"):
        make_sum_loss(SumLossConfig("dpo"))
