"""Importance weights of trainer over sampler, rejection, and their metrics."""

import math

import pytest
import torch

from tests.workers.model.losses.loss_cases import (
    ORDER,
    computed_in_parts,
    logs,
    tokens_of,
    with_log_probs,
)
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.roles import LossConfig, RolloutCorrectionConfig
from workers.errors import ConfigError, DataError
from workers.model.losses import (
    Denominators,
    correction_weights,
    make_policy_loss,
    to_metrics,
)
from workers.model.losses.correction import rollout_mismatch


def weights_of(config: RolloutCorrectionConfig) -> tuple[list[float], dict[str, float]]:
    """For ratios pi_old / pi_rollout of 3, 1/2 and 1 in one sequence and 1/8 in another."""
    predictions = tokens_of(
        [-9.0] * 4,
        [3, 1],
        old_log_probs=logs(3, 0.5, 1, 0.125),
        rollout_log_probs=[0.0] * 4,
        advantages=[1.0] * 4,
    )
    weights, statistics = correction_weights(predictions, config)
    assert not weights.requires_grad
    return weights.tolist(), results(to_metrics([statistics]))


def test_token_weights_are_truncated_by_hand():
    weights, metrics = weights_of(RolloutCorrectionConfig("token", cap=2.0))
    assert weights == pytest.approx([2.0, 0.5, 1.0, 0.125])
    assert metrics["rollout_truncated_fraction"] == 0.25
    assert metrics["rollout_weight_mean"] == pytest.approx(3.625 / 4)
    assert (metrics["rollout_weight_max"], metrics["rollout_weight_min"]) == pytest.approx(
        (2.0, 0.125)
    )
    assert metrics["rollout_chi_square"] == pytest.approx((9 + 0.25 + 1 + 1 / 64) / 4 - 1)
    kl = [3 - 1 - math.log(3), 0.5 - 1 - math.log(0.5), 0.0, 0.125 - 1 - math.log(0.125)]
    assert metrics["rollout_kl"] == pytest.approx(sum(kl) / 4)


def test_tokens_out_of_bounds_are_rejected_by_hand():
    weights, metrics = weights_of(
        RolloutCorrectionConfig(rejection="token", rejection_low=0.25, rejection_high=2.0)
    )
    assert weights == [0.0, 1.0, 1.0, 0.0]
    assert metrics["rollout_rejected_fraction"] == 0.5
    assert "rollout_truncated_fraction" not in metrics


@pytest.mark.parametrize("rejection", ["token", "sequence"])
def test_a_ratio_at_a_bound_is_kept(rejection: str) -> None:
    """Of one sequence with ratio 1 and one with ratio 2."""
    predictions = tokens_of(
        [-9.0] * 2, [1, 1], old_log_probs=logs(1, 2), rollout_log_probs=[0.0] * 2
    )
    for low, high in ((1.0, 1.5), (0.5, 1.0)):
        config = RolloutCorrectionConfig(
            rejection=rejection, rejection_low=low, rejection_high=high
        )
        assert correction_weights(predictions, config)[0].tolist() == [1.0, 0.0]


def test_a_long_sequence_does_not_overflow():
    predictions = tokens_of(
        [0.0] * 2000, old_log_probs=[1.0] * 2000, rollout_log_probs=[0.0] * 2000
    )
    weights, _ = correction_weights(
        predictions, RolloutCorrectionConfig("sequence", cap=2.0)
    )
    assert weights.tolist() == pytest.approx([2.0] * 2000)


def corrected_by_definition(sequences: DataProto, config: LossConfig) -> float:
    """A weighted REINFORCE with KL, one sequence at a time."""
    correction, losses = config.rollout_correction, []
    for index in range(len(sequences)):
        part = sequences.slice(index, index + 1)
        mask = part.tokens["loss_mask"]
        log_probs, old, rollout, reference = (
            part.tokens[name][mask].tolist()
            for name in (
                "log_probs",
                "old_log_probs",
                "rollout_log_probs",
                "reference_log_probs",
            )
        )
        ratios = [math.exp(a - b) for a, b in zip(old, rollout, strict=True)]
        whole = math.prod(ratios)
        for log_prob, ratio, toward in zip(log_probs, ratios, reference, strict=True):
            weight = {"none": 1.0, "token": ratio, "sequence": whole}[correction.weights]
            weight = min(weight, correction.cap) if correction.weights != "none" else 1.0
            judged = {"none": 1.0, "token": ratio, "sequence": whole ** (1 / len(ratios))}[
                correction.rejection
            ]
            weight *= correction.rejection_low <= judged <= correction.rejection_high
            kl = 0.5 * (toward - log_prob) ** 2
            losses.append(
                -weight * float(part.columns["advantages"]) * log_prob
                + config.kl_coefficient * kl
            )
    return sum(losses) / len(losses)


@pytest.mark.parametrize("weights", ["none", "token", "sequence"])
@pytest.mark.parametrize("rejection", ["none", "token", "sequence"])
def test_corrected_loss_equals_its_definition_and_ignores_order_and_cut(weights, rejection):
    correction = RolloutCorrectionConfig(
        weights, 1.5, rejection, rejection_low=0.5, rejection_high=2.5
    )
    config = LossConfig(
        "reinforce", kl_coefficient=0.1, kl_estimator="k2", rollout_correction=correction
    )
    sequences = with_log_probs(random_sequences(seed=4))
    denominators = Denominators.of(sequences)
    expected = corrected_by_definition(sequences, config)
    whole, _, statistics = computed_in_parts(
        sequences, [], make_policy_loss(config), denominators
    )
    shuffled = sequences.select_idxs(ORDER)
    loss, _, cut_statistics = computed_in_parts(
        shuffled, [0, 4, 5], make_policy_loss(config), denominators
    )
    assert (whole, loss) == pytest.approx((expected, expected), rel=1e-9)
    assert results(to_metrics(cut_statistics)) == pytest.approx(
        results(to_metrics(statistics)), rel=1e-9
    )


def test_before_the_only_update_the_current_policy_is_the_old_one():
    predictions = tokens_of(
        logs(0.5, 0.25), rollout_log_probs=logs(0.25, 0.5), advantages=[1.0, 1.0]
    )
    config = LossConfig(
        "ppo_clip", rollout_correction=RolloutCorrectionConfig("token", cap=9.0)
    )
    loss, _ = make_policy_loss(config)(predictions, Denominators(2, 1))
    loss.backward()
    torch.testing.assert_close(
        predictions.log_probs.grad, torch.tensor([-1.0, -0.25], dtype=torch.float64)
    )


def test_the_mismatch_is_the_distance_of_the_current_policy_from_the_sampler() -> None:
    """Not of the old policy, which may be another."""
    predictions = tokens_of(
        [-1.0, -2.0], old_log_probs=[-5.0, -7.0], rollout_log_probs=[-1.5, -0.25]
    )
    metrics = results(to_metrics([rollout_mismatch(predictions)]))
    assert metrics == {
        "rollout_mismatch_mean": (0.5 + 1.75) / 2,
        "rollout_mismatch_max": 1.75,
    }
    assert rollout_mismatch(tokens_of([-1.0])) == {}


def test_correction_without_the_samplers_log_probs_is_refused():
    with pytest.raises(DataError, match="rollout_log_probs"):
        correction_weights(tokens_of([0.0]), RolloutCorrectionConfig("token"))


@pytest.mark.parametrize("setting", ["weights", "rejection"])
def test_an_unknown_correction_is_refused(setting):
    predictions = tokens_of([0.0], rollout_log_probs=[0.0])
    with pytest.raises(ConfigError, match=f"rollout_correction.{setting}=both"):
        correction_weights(predictions, RolloutCorrectionConfig(**{setting: "both"}))
