"""One family on the ranks of a process group: a tiny model saved, loaded as a run loads it, and compared.

    tiny configuration --> folder --> transformers, a sequence at a time         --> log-probs, gradient --> Outcome
                                  `-> engine that checks itself, on 1 or 2 ranks --> log-probs, gradient --^

The engine refuses by itself what it computes wrongly (`workers.model.numerics_check`). This is measured
again, with other sequences and another parameter's gradient: `wrong` is what that check has missed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.benchmarks.families.shrinking import VOCABULARY, tiny_config
from tests.workers.model.tiny import save_tokenizer
from workers.batch.dataproto import DataProto
from workers.config.roles import ModelConfig, OptimizerConfig, ParallelConfig
from workers.errors import BallastError
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators
from workers.model.losses.supervised import sft

LENGTHS = (19, 5, 26, 2, 12)
EXPECTED = "expected.pt"  # in the model's folder: sequences, and transformers' own answers
TOLERANCE = 1e-3
"""Nats, in float32: two ways to sum differ by some 1e-6 in these models, a leak by 0.01 at least."""


@dataclass(frozen=True)
class Outcome:
    """verdict: `exact`, `wrong`, `refused`, `crash`, `not built` or `not there`. difference: of the
    log-probs, nats, where there is one. reason: of a refusal or an error.
    """

    verdict: str
    difference: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Run:
    """A way to compute log-probs. method: of context parallelism, on two ranks; empty is one rank."""

    layout: str
    method: str = ""

    @property
    def ranks(self) -> int:
        return 2 if self.method else 1


RUNS = {
    "packed": Run("packed"),
    "padded": Run("padded"),
    "Ulysses": Run("packed", "ulysses"),
    "ring": Run("packed", "ring"),
}


def build(model_type: str, folder: Path, **changes: Any) -> str:
    """Save a random model of the family and its own answers in `folder`; returns why it could not, or
    nothing.

    changes: of the configuration.
    """
    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        config.update(changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fill_zeros(model)
        model.save_pretrained(folder)
        save_tokenizer(folder, VOCABULARY)
        read = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        torch.save((sequences(), *own_answers(read)), folder / EXPECTED)
    except Exception as error:
        return named(error)
    return ""


def compare(folder: Path, run: Run, **settings: Any) -> Outcome:
    """What the engine makes of the model in `folder`, against the answers beside it; collective.

    settings: more of `ModelConfig`.
    """
    batch, expected, expected_gradient = torch.load(folder / EXPECTED, weights_only=False)
    try:
        engine = _engine(folder, run, settings)
        log_probs, _ = engine.log_probs(batch, [(0, len(batch))])
        engine.forward_backward(batch, [(0, len(batch))], sft, Denominators.of(batch))
        gradient = _embedding_gradient(engine)
    except BallastError as error:
        return Outcome("refused", reason=str(error))
    except Exception as error:
        return Outcome("crash", reason=named(error))
    difference = float((log_probs - expected).abs().max())
    slope = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    exact = difference < TOLERANCE and slope < TOLERANCE
    return Outcome(
        "exact" if exact else "wrong",
        difference,
        "" if exact else f"its gradient differs by {slope:.0%}",
    )


def sequences() -> DataProto:
    """Some, of several lengths; all tokens but the first of each are predicted."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(4, VOCABULARY, (length,), generator=generator) for length in LENGTHS
    ]
    return DataProto.from_list(
        [{"input_ids": row, "loss_mask": torch.arange(len(row)) > 0} for row in rows]
    )


def _engine(folder: Path, run: Run, settings: dict[str, Any]) -> TrainingEngine:
    parallel = ParallelConfig(
        context_parallel=run.ranks, context_parallel_method=run.method or "ulysses"
    )
    config = ModelConfig(path=str(folder), dtype="float32", layout=run.layout, **settings)
    options = {
        "optimizer": OptimizerConfig(),
        "total_steps": 1,
        "device": "cpu",
        "parallel": parallel,
    }
    return TrainingEngine(config, **options, check_numerics=True)


def _embedding_gradient(engine: TrainingEngine) -> Tensor:
    gradient = engine.module.model.get_input_embeddings().weight.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def own_answers(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return (log-probs of all tokens, gradient of their mean at the embedding), by transformers alone."""
    ids = sequences().tokens["input_ids"].split(LENGTHS)
    parts = []
    for row in ids:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, row[1:, None]).squeeze(1)
        parts.append(torch.cat([logits.new_zeros(1), picked]))
    log_probs = torch.cat(parts)
    (-log_probs.sum() / (len(log_probs) - len(LENGTHS))).backward()
    return log_probs.detach(), model.get_input_embeddings().weight.grad


def fill_zeros(model: PreTrainedModel) -> None:
    """transformers starts biases, gates and sinks at 0, where one that is left out goes unnoticed."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)


def named(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
