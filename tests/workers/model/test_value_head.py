"""Value head, value loss and explained variance."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.refusals import refused
from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.roles import ModelConfig, ValueLossConfig
from workers.errors import DataError
from workers.model.losses import (
    Denominators,
    ValuePredictions,
    explained_variance,
    make_score_loss,
    make_value_loss,
    to_metrics,
    weighted_values,
)
from workers.model.rows.packing import pack, pad, read_last
from workers.model.value_head import load_value_model


def test_a_micro_batch_without_work_has_no_values():
    nothing = random_sequences().slice(0, 0)
    for rows in (pack(nothing), pad(nothing)):
        assert len(read_last(rows, nothing).predicting) == len(rows.predicting) == 0


def test_a_critic_from_a_causal_lm_starts_at_0_and_is_read_again_as_it_was_written(
    tmp_path,
):
    path = save_tiny_model(tmp_path / "lm")
    critic = load_value_model(ModelConfig(path=path), torch.float64)
    assert not critic.model.score.weight.any()
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    torch.testing.assert_close(
        critic.model.model.norm.weight, policy.model.norm.weight, rtol=0, atol=0
    )
    torch.nn.init.normal_(critic.model.score.weight)
    critic.model.save_pretrained(tmp_path / "critic")
    again = load_value_model(ModelConfig(path=str(tmp_path / "critic")), torch.float64)
    torch.testing.assert_close(
        again.model.score.weight, critic.model.score.weight, rtol=0, atol=0
    )


def test_a_head_gives_only_what_it_has(model):
    sequences = random_sequences()
    with refused("head='value'"):
        build_engine(model, head="value").log_probs(sequences, [(0, 11)])
    with refused("head='lm'"):
        build_engine(model).values(sequences, [(0, 11)])
    with refused("head=reward"):
        build_engine(model, head="reward")


def predictions(values: Tensor, **columns: list[float]) -> ValuePredictions:
    return ValuePredictions(
        values=values,
        columns={
            name: torch.tensor(column, dtype=values.dtype)
            for name, column in columns.items()
        },
        sequence_index=torch.zeros(len(values), dtype=torch.int64),
        num_sequences=1,
    )


def test_the_clipped_loss_by_hand():
    # Returns are 1. From 0.0 to 0.8, clipped to 0.2: the worse error counts, without gradient. From 0.5 to
    # 0.6: not clipped. From 2.0 to 1.5, clipped to 1.8: the worse again. From 0.9 to 1.5, clipped to 1.1: its
    # own is worse.
    values = torch.tensor([0.8, 0.6, 1.5, 1.5], dtype=torch.float64, requires_grad=True)
    batch = predictions(values, returns=[1.0] * 4, old_values=[0.0, 0.5, 2.0, 0.9])
    loss, statistics = make_value_loss(ValueLossConfig(clip=0.2))(batch, Denominators(4, 1))
    loss.backward()
    assert loss.item() == pytest.approx((0.8**2 + 0.4**2 + 0.8**2 + 0.5**2) / 2 / 4)
    assert values.grad.tolist() == pytest.approx([0.0, -0.1, 0.0, 0.125])
    assert results(to_metrics([statistics]))["value_clip_fraction"] == 0.5


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
)
def test_loss_and_explained_variance_do_not_depend_on_the_cut(aggregation):
    sequences = random_sequences()
    generator = torch.Generator().manual_seed(1)
    returns = 5 + torch.randn(
        sequences.num_tokens, generator=generator, dtype=torch.float64
    )
    values = returns + 0.5 * torch.randn(
        sequences.num_tokens, generator=generator, dtype=torch.float64
    )
    tokens = sequences.tokens | {
        "returns": returns,
        "values": values,
        "old_values": values + 0.3,
    }
    sequences = DataProto(sequences.lengths, tokens, sequences.columns)
    loss_function = make_value_loss(ValueLossConfig(clip=0.2, aggregation=aggregation))
    denominators = Denominators.of(sequences)

    def in_parts(*edges: int) -> tuple[float, dict]:
        total, statistics = 0.0, []
        for start, stop in itertools.pairwise(edges):
            part = sequences.slice(start, stop)
            row = pack(part)
            own = part.tokens["values"][row.loss_positions]
            loss, measured = loss_function(
                ValuePredictions.gather(own, part, row), denominators
            )
            total += loss.item()
            statistics.append(measured)
        return total, to_metrics(statistics)

    whole, metrics = in_parts(0, 11)
    cut, cut_metrics = in_parts(0, 1, 2, 7, 7, 11)
    assert cut == pytest.approx(whole, rel=1e-12)
    mask = sequences.tokens["loss_mask"]
    expected = 1 - (returns - values)[mask].var(correction=0) / returns[mask].var(
        correction=0
    )
    assert explained_variance(metrics) == pytest.approx(float(expected), rel=1e-9)
    assert explained_variance(cut_metrics) == pytest.approx(float(expected), rel=1e-9)


SCORES = [2.0, 0.5, -1.5, 0.0, -0.5]
LABELS = [0.0, 0.75, 0.25, 0.4, 0.5]
"""The last two are wrong steps, as scored: a score of 0 is not positive, nor a half more than a half."""


@pytest.mark.parametrize("name", ["regression", "process"])
def test_the_loss_of_scores_is_the_mean_of_their_errors(name: str) -> None:
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    batch = predictions(scores, label=LABELS)
    loss, statistics = make_score_loss(name)(batch, Denominators(5, 5))
    loss.backward()
    errors = []
    slopes = []
    for score, label in zip(SCORES, LABELS, strict=True):
        chance = 1 / (1 + math.exp(-score))
        if name == "regression":
            errors.append((score - label) ** 2)
            slopes.append(2 * (score - label))
        else:
            errors.append(-label * math.log(chance) - (1 - label) * math.log(1 - chance))
            slopes.append(chance - label)
    assert loss.item() == pytest.approx(sum(errors) / 5)
    assert scores.grad.tolist() == pytest.approx([slope / 5 for slope in slopes])
    metrics = results(to_metrics([statistics]))
    assert metrics.pop("loss") == pytest.approx(loss.item())
    assert metrics == (
        {"absolute_error": pytest.approx((2.0 + 0.25 + 1.75 + 0.4 + 1.0) / 5)}
        if name == "regression"
        else {"accuracy": pytest.approx(4 / 5)}
    )


def test_weighted_values_are_summed_without_a_denominator() -> None:
    values = torch.tensor([2.0, -1.5], requires_grad=True)
    batch = predictions(values, coefficient=[0.5, -3.0])
    loss, statistics = weighted_values(batch, Denominators(7, 7))
    loss.backward()
    assert (loss.item(), values.grad.tolist()) == (5.5, [0.5, -3.0])
    assert results(to_metrics([statistics])) == {"loss": 5.5}


@pytest.mark.parametrize("returns", [0.0, 0.1])
def test_equal_returns_explain_nothing_and_a_clip_needs_the_old_values(
    returns: float,
) -> None:
    batch = predictions(torch.tensor([0.1, 0.2, 0.3]), returns=[returns] * 3)
    _, statistics = make_value_loss(ValueLossConfig(clip=0.0))(batch, Denominators(3, 1))
    assert math.isnan(explained_variance(to_metrics([statistics])))
    with refused("old_values", DataError):
        make_value_loss(ValueLossConfig(clip=0.2))(batch, Denominators(3, 1))
