"""Ratios of any size in float32: every loss and gradient is finite, and the paper's wherever a float32 can
hold it.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.losses.loss_cases import tokens_of
from tests.workers.model.losses.test_policy_losses import CONFIGS, REFERENCES, Reference
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.roles import (
    LossConfig,
    RolloutCorrectionConfig,
)
from workers.model.losses import (
    Denominators,
    Predictions,
    kl_estimate,
    make_policy_loss,
    to_metrics,
)
from workers.model.losses.kl import LARGEST_LOG_RATIO, bounded_exp, bounded_expm1

FAR = st.one_of(
    st.floats(-1e4, 1e4, width=32),
    st.floats(-60, 120, width=32),
    st.floats(-1, 1, width=32),
)
TOKEN = st.tuples(FAR, st.sampled_from([-2.0, -1.0, 0.0, 1.0, 3.0]), st.booleans())
ROWS = st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=4)
"""(log ratio, advantage, held back) of each token; a sequence has the advantage of its first."""


def kl_cov(log_probs: Tensor, old: Tensor, advantage: float, config: LossConfig) -> Tensor:
    """Of tokens that are held back."""
    log_ratio = log_probs - old
    return -log_ratio.exp() * advantage + config.kl_cov_coefficient * log_ratio.abs()


FAR_REFERENCES: dict[str, Reference] = REFERENCES | {"kl_cov": kl_cov}
FAR_CONFIGS = CONFIGS | {"kl_cov": LossConfig("kl_cov")}


def predictions_of(
    rows: list[list[tuple[float, float, bool]]], dtype: torch.dtype
) -> Predictions:
    """Old log-probs of 0, so that the log-probs are the log-ratios, without rounding."""
    log_ratios = [ratio for row in rows for ratio, _, _ in row]
    return tokens_of(
        log_ratios,
        [len(row) for row in rows],
        dtype,
        advantages=[row[0][1] for row in rows for _ in row],
        old_log_probs=[0.0] * len(log_ratios),
        held_back=[True] * len(log_ratios),
    )


def by_reference(rows: list[list[tuple[float, float, bool]]], config: LossConfig) -> Tensor:
    """Gradient of the mean over tokens, float64; infinite or NaN where float64 does not hold the paper's
    formula.
    """
    log_probs = predictions_of(rows, torch.float64).log_probs
    losses = []
    for values, row in zip(log_probs.split([len(row) for row in rows]), rows, strict=True):
        losses.append(
            FAR_REFERENCES[config.name](values, torch.zeros_like(values), row[0][1], config)
        )
    (
        torch.cat(losses).mean() + 0 * log_probs.sum()
    ).backward()  # a clip may leave nothing to differentiate
    return log_probs.grad


def largest_of(rows: list[list[tuple[float, float, bool]]], name: str) -> Tensor:
    """The log-ratio whose exponential each token's loss may take, [N]."""
    ratios = [torch.tensor([ratio for ratio, _, _ in row]) for row in rows]
    if name in ("gspo", "gmpo"):
        # The mean of what gmpo has clipped is above that of the ratios by the tokens that are clipped from
        # below.
        ratios = [row.clamp(min=-0.4).mean().expand(len(row)) for row in ratios]
    return torch.cat(ratios)


def check_gradient(found: Tensor, expected: Tensor, inside: Tensor) -> None:
    """The reference where the exponential is within its bound; beyond it the sign, of what
    float32 can hold. SAPO's gate p (1 - p) of a far ratio loses 1e-6 to the rounding of p.
    """
    assert found.isfinite().all()
    torch.testing.assert_close(
        found[inside].double(), expected[inside], rtol=1e-4, atol=1e-5
    )
    vanishes = (expected != 0) & (expected.abs() < torch.finfo(torch.float32).tiny)
    beyond = ~inside & ~expected.isnan() & ~vanishes
    assert torch.equal(found[beyond].sign().double(), expected[beyond].sign())


@pytest.mark.parametrize("name", FAR_CONFIGS)
@settings(max_examples=25, deadline=None)
@given(rows=ROWS)
@example(
    rows=[
        [(200.0, 1.0, False)],
        [(200.0, -1.0, False)],
        [(-200.0, 1.0, False)],
        [(0.1, 1.0, False)],
    ]
)
@example(rows=[[(1e4, 3.0, False), (-1e4, 3.0, False)], [(1e4, -2.0, False)]])
def test_gradients_of_far_ratios_are_the_papers(name, rows):
    config = FAR_CONFIGS[name]
    predictions = predictions_of(rows, torch.float32)
    loss, statistics = make_policy_loss(
        LossConfig(**{**vars(config), "aggregation": "token_mean"})
    )(predictions, Denominators(len(predictions), len(rows)))
    loss.backward()
    assert loss.isfinite()
    assert all(math.isfinite(value) for value in results(to_metrics([statistics])).values())
    inside = largest_of(rows, config.name) <= LARGEST_LOG_RATIO
    check_gradient(predictions.log_probs.grad, by_reference(rows, config), inside)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "absolute"])
@settings(max_examples=25, deadline=None)
@given(log_ratios=st.lists(FAR, min_size=1, max_size=6))
@example(log_ratios=[200.0, -200.0, 1e4, -1e4])
def test_kl_estimates_of_far_policies_are_finite_and_right(estimator, log_ratios):
    found = torch.tensor(log_ratios, requires_grad=True)
    kl_estimate(found, estimator).sum().backward()
    exact = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    values = {
        "k1": -exact,
        "k2": exact**2 / 2,
        "k3": exact.expm1() - exact,
        "absolute": exact.abs(),
    }[estimator]
    values.sum().backward()
    inside = found.detach() <= LARGEST_LOG_RATIO
    inside |= torch.tensor(estimator != "k3")
    estimates = kl_estimate(found.detach(), estimator)
    assert estimates.isfinite().all()
    torch.testing.assert_close(
        estimates[inside].double(), values.detach()[inside], rtol=1e-4, atol=1e-6
    )
    check_gradient(found.grad, exact.grad, inside)


def test_beyond_its_bound_the_exponential_goes_on_along_its_tangent():
    values = torch.tensor(
        [-1e4, -1.0, 0.0, 40.0, 41.0, 1e4], dtype=torch.float64, requires_grad=True
    )
    found = bounded_exp(values)
    found.sum().backward()
    edge = math.exp(LARGEST_LOG_RATIO)
    assert found.tolist() == pytest.approx(
        [0.0, math.exp(-1), 1.0, edge, 2 * edge, edge * (1e4 - 39)]
    )
    slopes = [0.0, math.exp(-1), 1.0, edge, edge, edge]
    assert values.grad.tolist() == pytest.approx(slopes)
    values.grad = None
    less_one = bounded_expm1(values)
    less_one.sum().backward()
    assert less_one.tolist() == pytest.approx([value - 1 for value in found.tolist()])
    assert values.grad.tolist() == pytest.approx(slopes)


CORRECTIONS = [
    RolloutCorrectionConfig(weights="token", rejection="sequence"),
    RolloutCorrectionConfig(weights="sequence", rejection="token"),
]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_sampler_far_from_the_trainer_leaves_loss_and_metrics_finite(correction):
    predictions = predictions_of(
        [[(0.1, 1.0, False)] * 4, [(0.1, -1.0, False)] * 2], torch.float32
    )
    predictions.columns["rollout_log_probs"] = torch.tensor(
        [-1e4, 1e4, 200.0, -200.0, 0.1, 0.0]
    )
    config = LossConfig(rollout_correction=correction)
    loss, statistics = make_policy_loss(config)(predictions, Denominators(6, 2))
    loss.backward()
    assert predictions.log_probs.grad.isfinite().all()
    assert all(math.isfinite(value) for value in results(to_metrics([statistics])).values())


@pytest.mark.parametrize(
    "config",
    [LossConfig(), LossConfig(dual_clip=3.0), LossConfig("sapo"), LossConfig("gspo")],
)
def test_a_step_with_a_token_far_from_its_old_policy_is_taken(config, model):
    """Such tokens have no gradient, and those beside them keep theirs; a NaN would have the step skipped."""
    sequences = random_sequences(dtype=torch.float32)
    sequences.tokens["old_log_probs"][
        sequences.lengths[0] - 1
    ] = -500.0  # the last of the first sequence
    good = DataProto(
        sequences.lengths, sequences.tokens, {"advantages": torch.ones(len(sequences))}
    )
    engine = build_engine(model, dtype="float32")
    loss = make_policy_loss(config)
    engine.forward_backward(good, [(0, len(good))], loss, Denominators.of(good))
    taken = results(engine.optimizer_step())
    assert taken["skipped_steps"] == 0
    assert 0 < taken["grad_norm"] < 1e3
