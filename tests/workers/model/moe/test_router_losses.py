"""Losses of routers against transformers' own, family by family. How they add up over ranks and
micro-batches: `test_exactness.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.exact import whole_gradients
from tests.workers.model.ranks import RankError, RankPool
from tests.workers.model.tiny import (
    compute_in_float64,
    random_sequences,
    relative_error,
    save_tiny_model,
)
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.model.losses import Denominators
from workers.model.rules.families import ROUTER_LOSS_FAMILIES


def nothing_to_learn(
    predictions: Any, denominators: Denominators
) -> tuple[Tensor, dict[str, Any]]:
    return 0.0 * predictions.log_probs.sum(), {}


def of_the_engine(
    sequences: DataProto, path: str, **settings: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    engine = build_engine(path, **settings)
    compute_in_float64(engine.module.model)
    whole = [(0, len(sequences))]
    metrics = engine.forward_backward(
        sequences, whole, nothing_to_learn, Denominators.of(sequences)
    )
    return results(metrics), whole_gradients(engine)


@pytest.mark.parametrize("family", ROUTER_LOSS_FAMILIES)
def test_the_balance_of_one_sequence_in_one_layer_is_transformers_own_per_chosen_expert(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """transformers adds up the experts of a token, of which the paper takes the mean: half of it for two a
    token.
    """
    path = save_tiny_model(tmp_path / "model", family, num_hidden_layers=1)
    sequences = random_sequences(1, seed=3)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation=attention
    )
    compute_in_float64(model)
    outputs = model(
        input_ids=sequences.tokens["input_ids"][None], output_router_logits=True
    )
    (outputs.aux_loss / 2).backward()
    weight = {"router_aux_loss_coefficient": 1.0}
    ((metrics, found),) = ranks.run(partial(of_the_engine, **weight), 1, sequences, path)
    assert metrics["router_aux_loss"] == pytest.approx(
        outputs.aux_loss.item() / 2, rel=1e-6
    )
    routers = [name for name in found if name.endswith((".gate.weight", ".router.weight"))]
    assert routers
    for name in routers:
        expected = model.get_parameter(name).grad
        assert expected is not None and relative_error(found[name], expected) < 1e-5


def test_a_model_without_routed_experts_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    path = save_tiny_model(
        tmp_path / "model", "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[0]
    )
    with pytest.raises(RankError, match=r"model.router_aux_loss_coefficient"):
        ranks.run(
            partial(of_the_engine, router_z_loss_coefficient=1.0),
            1,
            random_sequences(1),
            path,
        )
