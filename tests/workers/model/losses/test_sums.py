"""Losses that are sums, against their definitions token by token in float64, however a batch is cut into
calls.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.refusals import refused
from tests.workers.model.losses.loss_cases import computed_in_parts, with_log_probs
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.config.loss import SUM_LOSS_NAMES, SumLossConfig
from workers.model.losses import Denominators, make_sum_loss

Reference = Callable[[Tensor, Tensor, float, SumLossConfig], Tensor]
"""Of one sequence: (log_probs [n], sampler's [n], advantage, settings) -> loss of each token [n]."""
ONE = Denominators(1.0, 1.0)


def bounded(ratio: float, config: SumLossConfig) -> float:
    return min(max(ratio, config.ratio_low), config.ratio_high)


def importance_sampling(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    return -(log_probs - sampled).exp() * advantage


def ppo(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    ratios = (log_probs - sampled).exp()
    clipped = torch.tensor(
        [bounded(r, config) for r in ratios.tolist()], dtype=torch.float64
    )
    return torch.where(
        clipped * advantage < ratios * advantage, -clipped * advantage, -ratios * advantage
    )


def cispo(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    weights = [bounded(math.exp(d), config) for d in (log_probs - sampled).tolist()]
    return -torch.tensor(weights, dtype=torch.float64) * advantage * log_probs


def dro(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    return -(log_probs * advantage - 0.5 * config.beta * (log_probs - sampled) ** 2)


def gspo(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    """The sequence form, repeated at each token."""
    ratio = (log_probs.sum() - sampled.sum()).div(len(log_probs)).exp()
    clipped = ratio.clamp(config.ratio_low, config.ratio_high)
    return -torch.minimum(ratio * advantage, clipped * advantage).expand(len(log_probs))


def cross_entropy(
    log_probs: Tensor, sampled: Tensor, advantage: float, config: SumLossConfig
) -> Tensor:
    return -sampled * log_probs  # the test's weights


REFERENCES: dict[str, Reference] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


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
    whole, total, gradients = sequences(name), 0.0, []
    for row in range(len(whole)):
        part = whole.slice(row, row + 1)
        log_probs = part.tokens["log_probs"].clone().requires_grad_()
        learned = part.tokens["loss_mask"]
        if learned.any():
            sampled, advantage = (
                part.tokens["rollout_log_probs"][learned],
                float(part.columns["advantages"]),
            )
            losses = REFERENCES[name](log_probs[learned], sampled, advantage, config)
            loss = (losses * part.tokens["mask"][learned]).sum()
            loss.backward()
            total += loss.item()
        gradients.append(
            torch.zeros_like(log_probs) if log_probs.grad is None else log_probs.grad
        )
    return total, gradients


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
