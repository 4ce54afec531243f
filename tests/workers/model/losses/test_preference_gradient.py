"""DPO's loss and gradient do not depend on ranks, sharing and micro-batches: in float64, against unpacked
sequences.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from controller.config.offline import PreferenceLossConfig
from controller.offline.preference_losses import pair_loss
from tests.workers.model.cases import Way, random_plan, way
from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.exact import whole_gradients
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    unpacked_log_probs,
)
from workers.batch.dataproto import DataProto
from workers.model.losses import Denominators, weighted_log_probs

BETA = 0.3
COUNT = 10
REFERENCE = np.linspace(-60, -20, COUNT)


def pairs() -> DataProto:
    """Ten sequences, of which every second one is rejected; all have tokens to learn."""
    sequences = random_sequences(COUNT + 2)
    parts = [sequences.slice(i, i + 1) for i in range(2, COUNT + 2)]
    rows = [
        {name: part.tokens[name] for name in ("input_ids", "loss_mask")} for part in parts
    ]
    return DataProto.from_list(rows)


def expected(path: str) -> tuple[float, dict[str, Tensor]]:
    """Rafailov et al. 2023, eq. 7, one unpadded sequence at a time through transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    sequences = pairs()
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    found = unpacked_log_probs(model, sequences)
    summed = torch.stack(
        [log_probs[mask].sum() for (log_probs, _), mask in zip(found, masks, strict=True)]
    )
    ratio = summed - torch.from_numpy(REFERENCE)
    loss = -logsigmoid(BETA * (ratio[0::2] - ratio[1::2])).mean()
    loss.backward()
    return loss.item(), {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def on_a_rank(
    path: str, way: Way, seed: int, layout: str
) -> tuple[float, dict[str, Tensor]]:
    """What the trainer does, with the driver's part on every rank: (loss, whole gradients)."""
    engine = build_engine(path, layout=layout, parallel=way.parallel)
    every, share = pairs(), random_plan(way.dp, seed, COUNT)[dp_rank(engine.parallel)]
    mine = every.select_idxs(share.rows)
    log_probs = torch.zeros(COUNT, dtype=torch.float64)
    log_probs[share.rows] = engine.sequence_log_probs(mine, share.micro_batches)
    for group in engine.data_parallel_groups:
        torch.distributed.all_reduce(log_probs, group=group)
    found = pair_loss(
        PreferenceLossConfig(beta=BETA), log_probs.numpy(), REFERENCE, np.ones(COUNT)
    )
    coefficient = torch.from_numpy(found.coefficients)[share.rows]
    weighted = DataProto(mine.lengths, mine.tokens, {"coefficient": coefficient})
    engine.forward_backward(
        weighted, share.micro_batches, weighted_log_probs, Denominators.of(every)
    )
    return found.loss, whole_gradients(engine)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("dp 1", "padded"),
        *((text, "packed") for text in ("ring 2", "tp 2", "dp 2, ulysses 2")),
    ],
)
def test_dpo_is_that_of_unpacked_sequences(
    ranks: RankPool, model: str, text: str, layout: str
) -> None:
    loss, gradients = expected(model)
    for found_loss, found in ranks.run(
        on_a_rank, way(text).ranks, model, way(text), 3, layout
    ):
        assert found_loss == pytest.approx(loss, rel=1e-9)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < 1e-9, name
