"""Clip-Cov and KL-Cov: which tokens are held back, over any order, cut and number of ranks, and what it costs
them.
"""

import struct
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.refusals import refused
from tests.workers.model.cpu_engine import build_engine, gradients_of
from tests.workers.model.losses.loss_cases import ORDER, with_log_probs
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, relative_error
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.batch.metrics import results
from workers.config.roles import LossConfig
from workers.errors import DataError
from workers.model.losses import (
    Denominators,
    hold_back,
    make_policy_loss,
    prepare,
)

CONFIGS = {
    "kl_cov": LossConfig("kl_cov", covariance_fraction=0.1),
    "clip_cov": LossConfig(
        "clip_cov", covariance_fraction=0.1, clip_cov_low=0.1, clip_cov_high=2.0
    ),
}


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
def test_the_engine_holds_back_over_the_whole_mini_batch(name, model):
    sequences = random_sequences()
    gradients, metrics = [], []
    for micro_batches in ([(0, 11)], [(0, 4), (4, 4), (4, 11)]):
        engine = build_engine(model)
        passed = engine.forward_backward(
            sequences,
            micro_batches,
            make_policy_loss(CONFIGS[name]),
            Denominators.of(sequences),
        )
        metrics.append(results(passed))
        gradients.append(gradients_of(engine))
    assert metrics[0]["held_back_fraction"] > 0
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-9)
    assert relative_error(gradients[1], gradients[0]) < 1e-9
