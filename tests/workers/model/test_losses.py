import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.model.tiny import random_sequences
from workers.config import LossConfig
from workers.errors import ConfigError, DataError
from workers.metrics import results
from workers.model.losses import (
    Denominators,
    Predictions,
    kl_estimate,
    make_policy_loss,
    sft,
    to_metrics,
)
from workers.model.packing import Sequences, pack

AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]


def predictions_of(sequences: Sequences, log_probs: torch.Tensor) -> Predictions:
    """As if the model gave `log_probs` [T]; the entropy is made up from them."""
    row = pack(sequences)
    chosen = log_probs[row.loss_positions]
    return Predictions.gather(chosen, 0.5 * chosen**2, sequences, row)


def loss_by_definition(sequences: Sequences, log_probs: torch.Tensor, config: LossConfig) -> float:
    """Token by token and sequence by sequence, in plain Python."""
    sums, counts = [], []
    position = 0
    for index, length in enumerate(sequences.lengths.tolist()):
        losses = []
        for t in range(position, position + length):
            if not sequences.tokens["loss_mask"][t]:
                continue
            log_prob = float(log_probs[t])
            advantage = float(sequences.columns["advantages"][index])
            ratio = math.exp(log_prob - float(sequences.tokens["old_log_probs"][t]))
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            toward_reference = float(sequences.tokens["reference_log_probs"][t]) - log_prob
            kl = math.exp(toward_reference) - 1 - toward_reference
            surrogate = min(ratio * advantage, clipped * advantage)
            losses.append(-surrogate - config.entropy_coefficient * 0.5 * log_prob**2 + config.kl_coefficient * kl)
        position += length
        if losses:
            sums.append(sum(losses))
            counts.append(len(losses))
    if config.aggregation == "token_mean":
        return sum(sums) / sum(counts)
    if config.aggregation == "sequence_mean_token_mean":
        return sum(s / n for s, n in zip(sums, counts, strict=True)) / len(sums)
    return sum(sums) / len(sums)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_ppo_clip_equals_its_definition(aggregation):
    sequences = random_sequences()
    log_probs = sequences.tokens["old_log_probs"] + 0.5 * torch.randn(sequences.num_tokens, dtype=torch.float64)
    config = LossConfig(
        aggregation=aggregation, clip_low=0.1, clip_high=0.3, entropy_coefficient=0.01, kl_coefficient=0.05
    )
    loss, statistics = make_policy_loss(config)(predictions_of(sequences, log_probs), Denominators.of(sequences))
    assert float(loss) == pytest.approx(loss_by_definition(sequences, log_probs, config), rel=1e-12)
    assert results(to_metrics([statistics]))["loss"] == pytest.approx(float(loss))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(AGGREGATIONS), st.lists(st.integers(0, 11), max_size=4), st.integers(0, 5))
def test_loss_and_metrics_do_not_depend_on_how_the_mini_batch_is_cut(aggregation, cuts, seed):
    sequences = random_sequences(seed=seed)
    log_probs = sequences.tokens["old_log_probs"] + 0.3
    loss_function = make_policy_loss(LossConfig(aggregation=aggregation, kl_coefficient=0.1))
    denominators = Denominators.of(sequences)
    ends = sequences.lengths.cumsum(0).tolist()
    edges = sorted([0, 11, *cuts])
    losses, statistics = [], []
    for start, stop in itertools.pairwise(edges):
        first, last = [0, *ends][start], [0, *ends][stop]
        loss, part = loss_function(predictions_of(sequences.slice(start, stop), log_probs[first:last]), denominators)
        losses.append(float(loss))
        statistics.append(part)
    whole, whole_statistics = loss_function(predictions_of(sequences, log_probs), denominators)
    assert sum(losses) == pytest.approx(float(whole), rel=1e-12)
    assert results(to_metrics(statistics)) == pytest.approx(results(to_metrics([whole_statistics])), rel=1e-12)


def test_metrics_count_tokens_not_micro_batches():
    sequences = random_sequences()
    mask = sequences.tokens["loss_mask"]
    log_probs = sequences.tokens["rollout_log_probs"] + torch.linspace(-1, 1, sequences.num_tokens, dtype=torch.float64)
    expected = (sequences.tokens["rollout_log_probs"] - log_probs).abs()[mask]
    _, statistics = make_policy_loss(LossConfig())(predictions_of(sequences, log_probs), Denominators.of(sequences))
    metrics = results(to_metrics([statistics]))
    assert metrics["rollout_mismatch_mean"] == pytest.approx(float(expected.mean()))
    assert metrics["rollout_mismatch_max"] == pytest.approx(float(expected.max()))
    log_ratio = (log_probs - sequences.tokens["old_log_probs"])[mask]
    assert metrics["approximate_kl"] == pytest.approx(float((log_ratio.neg().exp() - 1 + log_ratio).mean()))


def test_clip_bounds_are_separate_and_depend_on_the_sign_of_the_advantage():
    old = torch.zeros(4)
    log_probs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    predictions = Predictions(
        log_probs,
        torch.zeros(4),
        {"old_log_probs": old, "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0])},
        torch.full((4,), 4.0),
    )
    loss, statistics = make_policy_loss(LossConfig(clip_low=0.2, clip_high=0.4))(predictions, Denominators(4, 1))
    loss.backward()
    assert loss.item() == pytest.approx(-(1.4 + 0.5 - 1.5 - 0.8) / 4)
    # Rising above 1 + high with a good token, falling below 1 - low with a bad one: no gradient.
    assert log_probs.grad.ne(0).tolist() == [False, True, True, False]
    assert results(to_metrics([statistics]))["clip_fraction"] == 0.5


def test_without_old_log_probs_the_gradient_is_the_policy_gradient():
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    predictions = Predictions(log_probs, torch.zeros(3), {"advantages": advantages}, torch.full((3,), 3.0))
    loss, _ = make_policy_loss(LossConfig())(predictions, Denominators(3, 1))
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_estimate((q / p).log(), estimator)).sum(), exact)


def test_k2_is_half_the_squared_log_ratio():
    assert kl_estimate(torch.tensor([3.0]), "k2").item() == 4.5


def test_sft_is_the_mean_negative_log_likelihood():
    sequences = random_sequences()
    log_probs = -torch.rand(sequences.num_tokens, dtype=torch.float64)
    loss, _ = sft(predictions_of(sequences, log_probs), Denominators.of(sequences))
    assert float(loss) == pytest.approx(-float(log_probs[sequences.tokens["loss_mask"]].mean()))


def test_denominators_count_only_sequences_that_have_a_loss_token():
    sequences = random_sequences()
    assert Denominators.of(sequences) == Denominators(sequences.num_loss_tokens, len(sequences) - 1)


def test_a_mini_batch_without_loss_tokens_is_refused():
    with pytest.raises(DataError, match="nothing to learn"):
        Denominators(0, 0)


def test_a_missing_column_is_named():
    predictions = Predictions(torch.zeros(1), torch.zeros(1), {"advantages": torch.ones(1)}, torch.ones(1))
    with pytest.raises(DataError, match="reference_log_probs"):
        make_policy_loss(LossConfig(kl_coefficient=0.1))(predictions, Denominators(1, 1))


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="ppo_clip"):
        make_policy_loss(LossConfig(name="ppo"))
    predictions = Predictions(torch.zeros(1), torch.zeros(1), {"advantages": torch.ones(1)}, torch.ones(1))
    with pytest.raises(ConfigError, match="aggregation=median"):
        make_policy_loss(LossConfig(aggregation="median"))(predictions, Denominators(1, 1))
    with pytest.raises(ConfigError, match="kl_estimator=k4"):
        kl_estimate(torch.zeros(1), "k4")
