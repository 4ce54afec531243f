"""P: sequence packing, from a configuration."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.controller.config_workspace import refusal
from tests.designs.configured import (
    SMALL,
    compute,
    configuration,
    micro_batches,
    plan_of,
    up_to,
)
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, unpacked_log_probs
from workers.batch.dataproto import DataProto

PUBLISHED_LENGTHS = (2, 4, 6, 1)
CP = (
    "policy.parallel.context_parallel=2",
    "policy.parallel.context_parallel_method=ring",
    "policy.data_parallel=1",
)
P = 0  # what padding holds


def worked_example() -> DataProto:
    """Sequences of ids 5, 6, 7, 8; the last, of one token, has nothing to learn from."""
    rows = []
    for number, length in zip((5, 6, 7, 8), PUBLISHED_LENGTHS, strict=True):
        mask = torch.arange(length) > 0
        noise = torch.zeros(length, dtype=torch.float64)
        logs = {
            f"{name}_log_probs": noise - 3.0 for name in ("old", "reference", "rollout")
        }
        rows.append({"input_ids": torch.full((length,), number), "loss_mask": mask} | logs)
    return DataProto.from_list(rows, {"advantages": torch.ones(4, dtype=torch.float64)})


def test_p1_a_kernel_that_cannot_pack_is_refused_by_name(file: str) -> None:
    said = refusal(*SMALL, "model.attention=eager")
    assert "model.attention=eager is for padded rows" in said


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        ((), 1),
        (CP, 4),
        (("policy.parallel.tensor_parallel=2",), 2),
        ((*CP, "policy.parallel.tensor_parallel=2"), 8),
        (("model.length_multiple=16",), 16),
    ],
)
def test_p2_sequences_are_padded_to_a_multiple_of_2_cp_tp(
    file: str, overrides: tuple[str, ...], multiple: int
) -> None:
    assert configuration(file, *SMALL, *overrides).length_multiple == multiple


def test_p3_p4_ranks_hold_the_published_rows(ranks: RankPool, file: str) -> None:
    """The worked example: segments r and 2 cp - 1 - r of every padded sequence."""
    cells = compute(
        ranks, file, *up_to(8), *CP, "batch.mini_batches=1", sequences=worked_example()
    ).cells
    assert cells == [[[5, P, 6, 6, 7, 7, P, P, 8, P]], [[5, P, 6, 6, 7, 7, 7, 7, P, P]]]


WAYS = {
    "2 ranks, small caps": (
        "policy.data_parallel=2",
        "policy.max_tokens_per_micro_batch=40",
    ),
    "cp 2, tp 2, packed": (*CP, "policy.parallel.tensor_parallel=2"),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("way", WAYS)
def test_p7_loss_gradients_and_updates_equal_the_unpacked_ones(
    ranks: RankPool, file: str, way: str
) -> None:
    unpacked = compute(
        ranks,
        file,
        *SMALL,
        "policy.data_parallel=1",
        "model.layout=padded",
        "policy.max_sequences_per_micro_batch=1",
    )
    assert max(map(len, unpacked.cells[0])) <= 40
    packed = compute(ranks, file, *SMALL, *WAYS[way])
    for name in ("loss", "grad_norm"):
        assert packed.metrics[name] == pytest.approx(unpacked.metrics[name], rel=1e-9)
    for name, weight in unpacked.weights.items():
        torch.testing.assert_close(packed.weights[name], weight, rtol=1e-6, atol=1e-8)


def test_p14_no_token_sees_another_sequence(ranks: RankPool, file: str) -> None:
    """Log-probs of a packed row are those of each sequence alone, in transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    sequences = random_sequences()
    with torch.no_grad():
        alone = unpacked_log_probs(model, sequences)
    packed = compute(ranks, file, *SMALL, "policy.data_parallel=1")
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    for row, log_probs in packed.log_probs.items():
        np.testing.assert_allclose(
            log_probs, (alone[row][0] * masks[row]).numpy(), atol=1e-6
        )


def test_p10_balancing_leaves_the_random_mini_batches_as_drawn(file: str) -> None:
    lengths = np.random.default_rng(1).integers(2, 40, 24).tolist()
    members = []
    for algorithm in ("none", "load_balance"):
        config = configuration(
            file, *SMALL, "batch.mini_batches=3", f"balance.algorithm={algorithm}"
        )
        members.append(
            [sorted(part.rows.tolist()) for part in plan_of(config, lengths).mini_batches]
        )
    assert members[0] == members[1]
    other_step = plan_of(config, lengths, step=2)
    assert [sorted(part.rows.tolist()) for part in other_step.mini_batches] != members[0]


def test_p11_none_keeps_the_given_order(file: str) -> None:
    config = configuration(
        file,
        *SMALL,
        "balance.algorithm=none",
        "policy.max_tokens_per_micro_batch=40",
        "batch.mini_batches=1",
    )
    groups = [
        rows
        for step in zip(
            *micro_batches(plan_of(config, [20, 10, 20, 30, 5, 5])), strict=True
        )
        for rows in step
    ]
    assert [row for rows in groups for row in rows] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_p12_no_micro_batch_exceeds_its_cap(
    ranks: RankPool, file: str, layout: str
) -> None:
    """What the model read: the forward pass has a cap of its own."""
    caps = (
        "policy.max_tokens_per_micro_batch=64",
        "policy.forward_max_tokens_per_micro_batch=44",
        "policy.data_parallel=1",
    )
    result = compute(ranks, file, *SMALL, *caps, f"model.layout={layout}")
    assert len(result.cells[0]) > 2 and max(map(len, result.cells[0])) <= 44


def test_p6_a_custom_loss_sees_the_row_or_whole_sequences_and_says_its_normaliser(
    ranks: RankPool, file: str
) -> None:
    """Both forms give one loss; another normaliser gives another."""
    custom = ("policy.data_parallel=1", "algorithm.loss.name=custom")
    row, by_sequence, mean_of_means = (
        compute(
            ranks, file, *SMALL, *custom, f"algorithm.loss.function=designs_losses:{name}"
        ).metrics["loss"]
        for name in ("whole_row", "by_sequence", "mean_of_means")
    )
    assert by_sequence == pytest.approx(row, rel=1e-9)
    assert mean_of_means != pytest.approx(row, rel=1e-3)


def test_p13_minimum_counts_are_separate_for_training_and_forward_passes(
    ranks: RankPool, file: str
) -> None:
    """Caps alone need one micro-batch; what the model read in the forward pass are three."""
    counts = (
        "policy.data_parallel=1",
        "batch.mini_batches=2",
        "policy.min_micro_batches=2",
    )
    config = configuration(file, *SMALL, *counts, "policy.forward_min_micro_batches=3")
    lengths = [5] * 24
    assert [len(part.micro_steps) for part in plan_of(config, lengths).mini_batches] == [
        2,
        2,
    ]
    (plain,) = plan_of(
        configuration(file, *SMALL, "policy.data_parallel=1", "batch.mini_batches=1"),
        lengths,
    ).mini_batches
    assert len(plain.micro_steps) == 1
    assert (
        len(
            compute(
                ranks, file, *SMALL, *counts, "policy.forward_min_micro_batches=3"
            ).cells[0]
        )
        == 3
    )
