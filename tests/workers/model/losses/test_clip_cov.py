"""Clip-Cov and KL-Cov: which tokens are held back, over any order, cut and number of ranks, and what it costs
them.
"""

import math
import struct
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.refusals import refused
from tests.workers.model.losses.loss_cases import tokens_of, with_log_probs
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.batch.metrics import results
from workers.config.roles import LossConfig, ModelConfig, OptimizerConfig
from workers.errors import DataError
from workers.model.engine import TrainingEngine
from workers.model.losses import (
    Denominators,
    hold_back,
    make_policy_loss,
    prepare,
    to_metrics,
)

CONFIGS = {
    "kl_cov": LossConfig("kl_cov", covariance_fraction=0.1),
    "clip_cov": LossConfig(
        "clip_cov", covariance_fraction=0.1, clip_cov_low=0.1, clip_cov_high=2.0
    ),
}
ORDER = [7, 2, 10, 0, 5, 1, 3, 9, 6, 8, 4]


def covariances(sequences: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """(covariance of every loss token as the paper defines it, `loss_mask`)."""
    mask = sequences.tokens["loss_mask"]
    log_probs = sequences.tokens["old_log_probs"][mask]
    advantages = sequences.columns["advantages"].repeat_interleave(sequences.lengths)[mask]
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean()), mask


def held_back_of(sequences: DataProto, config: LossConfig) -> torch.Tensor:
    (part,) = hold_back([sequences], Denominators.of(sequences), config)
    return part.tokens["held_back"]


def test_kl_cov_holds_back_the_highest_covariances():
    sequences = random_sequences()
    covariance, mask = covariances(sequences)
    count = int(0.1 * len(covariance))
    expected = torch.zeros(len(covariance), dtype=torch.bool)
    expected[covariance.topk(count).indices] = True
    held_back = held_back_of(sequences, CONFIGS["kl_cov"])
    assert torch.equal(held_back[mask], expected)
    assert not held_back[~mask].any()


def test_clip_cov_draws_its_share_from_the_band():
    sequences = random_sequences()
    covariance, mask = covariances(sequences)
    drawn = held_back_of(sequences, CONFIGS["clip_cov"])[mask]
    assert int(drawn.sum()) == int(0.1 * len(covariance))
    assert ((covariance[drawn] > 0.1) & (covariance[drawn] < 2.0)).all()
    # A draw, not a ranking: neither the lowest nor the highest of the band.
    band = covariance[(covariance > 0.1) & (covariance < 2.0)].sort().values
    assert not torch.equal(covariance[drawn].sort().values, band[: int(drawn.sum())])
    assert not torch.equal(covariance[drawn].sort().values, band[-int(drawn.sum()) :])


def test_the_band_is_without_its_bounds() -> None:
    """Of four tokens: log-probs 1, -1, 1, -1 with advantages 2, -2, 0, 0 have covariances 2, 2, 0, 0."""
    rows = [
        {
            "input_ids": torch.zeros(len(log_probs), dtype=torch.int64),
            "loss_mask": torch.ones(len(log_probs), dtype=torch.bool),
            "old_log_probs": torch.tensor(log_probs),
        }
        for log_probs in ([1.0], [-1.0], [1.0, -1.0])
    ]
    sequences = DataProto.from_list(rows, {"advantages": torch.tensor([2.0, -2.0, 0.0])})
    for low, high, count in ((0.0, 2.0, 0), (2.0, 3.0, 0), (0.0, 3.0, 2), (-1.0, 2.0, 2)):
        config = LossConfig(
            "clip_cov", covariance_fraction=1.0, clip_cov_low=low, clip_cov_high=high
        )
        assert int(held_back_of(sequences, config).sum()) == count


def splitmix64(state: int) -> int:
    """Mix one number, as in `java.util.SplittableRandom` (Steele et al. 2014)."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_clip_cov_draws_the_tokens_with_the_highest_hashes() -> None:
    """Of a token's log-prob, advantage and position. 0xE220... is the published first number of seed 0."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    sequences = random_sequences()
    covariance, mask = covariances(sequences)
    positions = torch.cat([torch.arange(int(length)) for length in sequences.lengths])
    advantages = sequences.columns["advantages"].repeat_interleave(sequences.lengths)
    columns = sequences.tokens["old_log_probs"], advantages, positions
    priorities = []
    for numbers in zip(*(column[mask].tolist() for column in columns), strict=True):
        state = 0
        for number in numbers:
            bits = int.from_bytes(struct.pack("<d", number), "little")
            state = splitmix64((state + bits) % 2**64)
        priorities.append(state >> 11)
    band = (covariance > 0.1) & (covariance < 2.0)
    candidates = band.nonzero().flatten().tolist()
    count = int(0.1 * len(covariance))
    highest = sorted(candidates, key=lambda token: priorities[token])[-count:]
    held_back = held_back_of(sequences, CONFIGS["clip_cov"])[mask]
    assert held_back.nonzero().flatten().tolist() == sorted(highest)


def test_clip_cov_draws_evenly():
    """Over many batches the drawn tokens are a uniform sample of the band, by covariance and by position."""
    config = LossConfig(
        "clip_cov", covariance_fraction=0.05, clip_cov_low=0.0, clip_cov_high=9.0
    )
    ranks = []
    for seed in range(150):
        sequences = random_sequences(seed=seed)
        covariance, mask = covariances(sequences)
        band = (covariance > 0) & (covariance < 9.0)
        drawn = held_back_of(sequences, config)[mask][band]
        ranks.append(
            (covariance[band].argsort().argsort().double() / (int(band.sum()) - 1))[drawn]
        )
    mean_rank, count = float(torch.cat(ranks).mean()), len(torch.cat(ranks))
    assert abs(mean_rank - 0.5) < 4 * math.sqrt(1 / 12 / count)


def test_of_a_small_share_the_highest_covariance_alone_is_held_back() -> None:
    sequences = random_sequences()
    covariance, mask = covariances(sequences)
    for fraction in (1e-6, 1.9 / len(covariance)):
        config = LossConfig("kl_cov", covariance_fraction=fraction)
        held_back = held_back_of(sequences, config)[mask]
        assert held_back.nonzero().flatten().tolist() == [int(covariance.argmax())]


def test_without_a_candidate_nothing_is_held_back():
    sequences = random_sequences()
    sequences.columns["advantages"].fill_(1.0)
    assert not held_back_of(sequences, CONFIGS["kl_cov"]).any()
    assert not held_back_of(sequences, CONFIGS["clip_cov"]).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_neither_order_nor_cut_changes_what_is_held_back(name):
    sequences = random_sequences()
    expected = held_back_of(sequences, CONFIGS[name]).split(sequences.lengths.tolist())
    shuffled = sequences.select_idxs(ORDER)
    parts = [shuffled.slice(0, 4), shuffled.slice(4, 4), shuffled.slice(4, 11)]
    prepared = hold_back(parts, Denominators.of(sequences), CONFIGS[name])
    actual = torch.cat([part.tokens["held_back"] for part in prepared])
    assert torch.equal(actual, torch.cat([expected[row] for row in ORDER]))


def hold_back_on_a_rank(name: str) -> dict[int, torch.Tensor]:
    rank, sequences = dist.get_rank(), random_sequences()
    rows = [row for row in range(len(sequences)) if row % 3 == rank] if rank < 2 else []
    if rank == 0:
        rows += [row for row in range(len(sequences)) if row % 3 == 2]
    parts = [sequences.select_idxs(rows)] if rows else [sequences.slice(0, 0)]
    prepared = hold_back(
        parts, Denominators.of(sequences), CONFIGS[name], [dist.group.WORLD]
    )
    return dict(
        zip(
            rows,
            prepared[0].tokens["held_back"].split(prepared[0].lengths.tolist()),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_all_ranks_draw_the_line_together(name, ranks: RankPool):
    """Three ranks, one of them without work."""
    sequences = random_sequences()
    expected = held_back_of(sequences, CONFIGS[name]).split(sequences.lengths.tolist())
    by_row = {
        row: held
        for part in ranks.run(hold_back_on_a_rank, 3, name)
        for row, held in part.items()
    }
    assert sorted(by_row) == list(range(len(sequences)))
    for row, held in by_row.items():
        assert torch.equal(held, expected[row]), row


def of_tokens(config: LossConfig) -> tuple[float, list[float], dict[str, float]]:
    """Ratios 2 and 3, advantages 1 and -4; the second token is held back."""
    predictions = tokens_of(
        [math.log(2), math.log(3)], old_log_probs=[0.0, 0.0], advantages=[1.0, -4.0]
    )
    predictions.columns["held_back"] = torch.tensor([False, True])
    loss, statistics = make_policy_loss(config)(predictions, Denominators(2, 1))
    loss.backward()
    return (
        loss.item(),
        predictions.log_probs.grad.tolist(),
        results(to_metrics([statistics])),
    )


def test_clip_cov_by_hand():
    loss, gradient, metrics = of_tokens(LossConfig("clip_cov", clip_high=9.0))
    assert loss == pytest.approx(-2 / 2)
    assert gradient == pytest.approx([-1.0, 0.0])
    assert metrics["held_back_fraction"] == 0.5


def test_kl_cov_by_hand():
    loss, gradient, metrics = of_tokens(LossConfig("kl_cov", kl_cov_coefficient=0.5))
    assert loss == pytest.approx((-2 + 3 * 4 + 0.5 * math.log(3)) / 2)
    assert gradient == pytest.approx([-1.0, (3 * 4 + 0.5) / 2])
    assert metrics["held_back_fraction"] == 0.5


def test_missing_columns_are_named():
    sequences = with_log_probs(random_sequences())
    del sequences.tokens["old_log_probs"]
    with pytest.raises(DataError, match="old_log_probs"):
        held_back_of(sequences, CONFIGS["kl_cov"])


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_of_which_one_has_ranks_by_choice_are_refused(name: str) -> None:
    sequences = random_sequences()
    degree = torch.ones(len(sequences), dtype=torch.int64)
    by_choice = replace(sequences, columns=sequences.columns | {CONTEXT_DEGREE: degree})
    loss_function = make_policy_loss(CONFIGS[name])
    with refused("policy.parallel.context_parallel_degree=auto"):
        prepare(loss_function, [sequences, by_choice], Denominators.of(sequences))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_holds_back_over_the_whole_mini_batch(name, tmp_path):
    path, sequences = save_tiny_model(tmp_path), random_sequences()
    gradients, metrics = [], []
    for micro_batches in ([(0, 11)], [(0, 4), (4, 4), (4, 11)]):
        engine = TrainingEngine(
            ModelConfig(path=path, dtype="float64"),
            optimizer=OptimizerConfig(),
            total_steps=1,
            device="cpu",
        )
        passed = engine.forward_backward(
            sequences,
            micro_batches,
            make_policy_loss(CONFIGS[name]),
            Denominators.of(sequences),
        )
        metrics.append(results(passed))
        gradients.append(
            torch.cat([p.grad.full_tensor().flatten() for p in engine.module.parameters()])
        )
    assert metrics[0]["held_back_fraction"] > 0
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-9)
    assert relative_error(gradients[1], gradients[0]) < 1e-9
