"""The promise of the engine: how a mini-batch is cut, packed and spread over ranks changes nothing beyond rounding.

Reference: transformers' own forward pass, one unpadded sequence at a time, and the loss written out again. Against it:
one rank packed, and two ranks (gloo processes, FSDP2) packed under a random plan in which one micro-batch is empty.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model, unpacked_log_probs
from workers.config import LossConfig, ModelConfig, OptimizerConfig
from workers.metrics import Metrics, merge, results
from workers.model.engine import Engine
from workers.model.losses import Denominators, make_policy_loss
from workers.model.packing import Sequences
from workers.model.parallel import full_tensor

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.1, warmup_steps=1, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One model, loss and way to compute it."""

    family: str = "qwen2"
    tied: bool = True
    dtype: str = "float64"
    aggregation: str = "token_mean"
    temperature: float = 1.0
    reshard_after_forward: bool = True
    gradient_checkpointing: bool = False

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.dtype == "float64" else 1e-5

    @property
    def loss(self) -> LossConfig:
        return LossConfig(aggregation=self.aggregation, clip_high=0.3, entropy_coefficient=0.02, kl_coefficient=0.1)


CASES = {
    "qwen2": Case(),
    "qwen2 float32": Case(dtype="float32", reshard_after_forward=False),
    "qwen2 gathered": Case(reshard_after_forward=False, aggregation="sequence_mean_token_mean"),
    "qwen3 untied": Case("qwen3", tied=False, aggregation="sequence_mean_token_mean", temperature=0.7),
    "llama checkpointed": Case("llama", aggregation="sequence_mean_token_sum", gradient_checkpointing=True),
}

# Rows of `random_sequences()` by rank, and each rank's micro-batches over its rows; the plan of the two-rank runs.
ROWS = ([7, 2, 10, 0, 5, 1], [3, 9, 6, 8, 4])
MICRO_BATCHES = ([(0, 2), (2, 5), (5, 6)], [(3, 5), (0, 3), (0, 0)])


def rows_of(sequences: Sequences, indices: list[int]) -> Sequences:
    parts = [sequences.slice(index, index + 1) for index in indices]
    return Sequences(
        torch.cat([part.lengths for part in parts]),
        {name: torch.cat([part.tokens[name] for part in parts]) for name in sequences.tokens},
        {name: torch.cat([part.columns[name] for part in parts]) for name in sequences.columns},
    )


def build_engine(case: Case, path: str) -> Engine:
    return Engine(
        ModelConfig(path=path, dtype=case.dtype, gradient_checkpointing=case.gradient_checkpointing),
        optimizer=OPTIMIZER,
        total_steps=10,
        device="cpu",
        reshard_after_forward=case.reshard_after_forward,
        temperature=case.temperature,
    )


@dataclass
class Outcome:
    """What one way of computing gives: values by row of `random_sequences()`, then gradients and weights by name."""

    log_probs: dict[int, Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference_outcome(case: Case, path: str) -> Outcome:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    sequences = random_sequences()
    outputs = unpacked_log_probs(model, sequences, case.temperature)
    loss, metrics = reference_loss(outputs, sequences, case.loss)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    reference_update(model)
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    return Outcome(
        {index: (outputs[index][0] * masks[index]).detach() for index in range(len(sequences))},
        {**metrics, "loss": loss.item(), "grad_norm": float(norm), "skipped_steps": 0.0, "learning_rate": 0.5e-2},
        gradients,
        {name: weight.detach() for name, weight in model.state_dict().items()},
    )


def reference_loss(outputs: list, sequences: Sequences, config: LossConfig) -> tuple[Tensor, dict[str, float]]:
    """Sequence by sequence; metrics are plain means over all loss tokens."""
    by_sequence, watched = [], []
    for index, (log_probs, entropy) in enumerate(outputs):
        part = sequences.slice(index, index + 1)
        mask = part.tokens["loss_mask"]
        if not mask.any():
            continue
        log_probs, entropy = log_probs[mask], entropy[mask]
        old, reference, rollout = (part.tokens[f"{name}_log_probs"][mask] for name in ("old", "reference", "rollout"))
        advantage = part.columns["advantages"]
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        kl = (reference - log_probs).exp() - 1 - (reference - log_probs)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        by_sequence.append(-surrogate - config.entropy_coefficient * entropy + config.kl_coefficient * kl)
        approximate_kl = ratio.log() - 1 + 1 / ratio
        was_clipped = (clipped * advantage < ratio * advantage).double()
        watched.append(torch.stack([was_clipped, approximate_kl, entropy, kl, (rollout - log_probs).abs()]).detach())
    every = torch.cat(watched, dim=1)
    names = ["clip_fraction", "approximate_kl", "entropy", "reference_kl", "rollout_mismatch_mean"]
    metrics = {**dict(zip(names, every.mean(1).tolist(), strict=True)), "rollout_mismatch_max": float(every[4].max())}
    aggregate = {
        "token_mean": lambda: torch.cat(by_sequence).mean(),
        "sequence_mean_token_mean": lambda: torch.stack([losses.mean() for losses in by_sequence]).mean(),
        "sequence_mean_token_sum": lambda: torch.stack([losses.sum() for losses in by_sequence]).mean(),
    }
    return aggregate[config.aggregation](), metrics


def reference_update(model: torch.nn.Module) -> None:
    """The first AdamW step by hand: corrected moments are the gradient and its square. Half the peak rate: warm-up."""
    rate = OPTIMIZER.learning_rate / 2
    with torch.no_grad():
        for parameter in model.parameters():
            decay = OPTIMIZER.weight_decay if parameter.ndim >= 2 else 0.0
            step = parameter.grad / (parameter.grad.abs() + OPTIMIZER.epsilon)
            parameter.mul_(1 - rate * decay).sub_(rate * step)


def engine_outcome(case: Case, path: str, rows: list[int], micro_batches: list[tuple[int, int]]) -> dict[str, Any]:
    """One optimiser step on this rank's rows; the whole gradients and weights, this rank's log-probs and metrics."""
    engine = build_engine(case, path)
    whole = random_sequences()
    mine = rows_of(whole, rows)
    log_probs, _ = engine.log_probs(mine, micro_batches)
    metrics = engine.forward_backward(mine, micro_batches, make_policy_loss(case.loss), Denominators.of(whole))
    gradients = {
        name: full_tensor(parameter.grad).clone() for name, parameter in engine.module.model.named_parameters()
    }
    metrics |= engine.optimizer_step()
    weights = {name: weight.clone() for name, weight in engine.named_weights()}
    by_row = dict(zip(rows, log_probs.split(mine.lengths.tolist()), strict=True))
    return {"log_probs": by_row, "metrics": metrics, "gradients": gradients, "weights": weights}


def join_ranks(parts: list[dict[str, Any]]) -> Outcome:
    """What the driver makes of the ranks' results."""
    metrics: Metrics = merge(part["metrics"] for part in parts)
    log_probs = {row: values for part in parts for row, values in part["log_probs"].items()}
    return Outcome(log_probs, results(metrics), parts[0]["gradients"], parts[0]["weights"])


def assert_same(actual: Outcome, expected: Outcome, tolerance: float) -> None:
    assert actual.metrics == pytest.approx(expected.metrics, rel=10 * tolerance)
    for row, log_probs in expected.log_probs.items():
        torch.testing.assert_close(actual.log_probs[row], log_probs.float(), rtol=1e-5, atol=1e-6)
    assert actual.gradients.keys() == expected.gradients.keys()
    assert actual.weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        assert relative_error(actual.gradients[name].double(), gradient) < tolerance, name


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny_model(folder / name.replace(" ", "-"), case.family, tie_word_embeddings=case.tied)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def two_ranks(paths, tmp_path_factory) -> dict[str, Outcome]:
    """Every case on two real ranks, within one start of the processes."""
    folder = tmp_path_factory.mktemp("two-ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(run_rank, args=(port, paths, str(folder)), nprocs=2)
    parts = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {name: join_ranks([part[name] for part in parts]) for name in CASES}


def run_rank(rank: int, port: int, paths: dict[str, str], folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    parts = {name: engine_outcome(case, paths[name], ROWS[rank], MICRO_BATCHES[rank]) for name, case in CASES.items()}
    torch.save(parts, Path(folder) / f"{rank}.pt")
    check_saving(paths["qwen2"], Path(folder) / "exported")
    check_skipping(paths["qwen2"], rank)
    dist.destroy_process_group()


def check_saving(path: str, target: Path) -> None:
    """On both ranks: what is written loads again, and equals what was gathered."""
    engine = build_engine(CASES["qwen2"], path)
    target.mkdir(exist_ok=True)  # an older folder under the same name is replaced
    (target / "stale").touch()
    dist.barrier()
    engine.save_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).state_dict()
    for name, weight in engine.named_weights():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
    # Only rank 0's folder was there for a moment under another name.
    left = sorted(entry.name for entry in target.parent.iterdir() if entry.is_dir())
    if left != ["exported"] or (target / "stale").exists() or not (target / "tokenizer.json").exists():
        raise AssertionError(f"unexpected files after saving: {left}")


def check_skipping(path: str, rank: int) -> None:
    """NaN on one rank alone makes both ranks skip the step, and count it once."""
    engine = build_engine(CASES["qwen2"], path)
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    sequences = rows_of(random_sequences(), ROWS[rank])
    if rank == 1:
        sequences.columns["advantages"].fill_(torch.nan)
    denominators = Denominators.of(random_sequences())
    engine.forward_backward(sequences, MICRO_BATCHES[rank], make_policy_loss(LossConfig()), denominators)
    metrics = engine.optimizer_step()
    if metrics["skipped_steps"].value != 0.5 or "grad_norm" in metrics:
        raise AssertionError(f"rank {rank} did not count its half of a skipped step: {metrics}")
    for name, weight in engine.named_weights():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_packed_equals_unpacked(name, paths):
    case = CASES[name]
    part = engine_outcome(case, paths[name], list(range(11)), [(0, 4), (4, 4), (4, 11)])
    assert_same(join_ranks([part]), reference_outcome(case, paths[name]), case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_packed_and_balanced_equal_unpacked(name, paths, two_ranks):
    case = CASES[name]
    assert_same(two_ranks[name], reference_outcome(case, paths[name]), case.tolerance)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float64"])
def test_weights_after_the_step_are_those_of_a_hand_written_one(name, paths, two_ranks):
    expected = reference_outcome(CASES[name], paths[name]).weights
    for weight_name, weight in expected.items():
        # Looser than the gradients: a first step of AdamW divides each by its own size, however small.
        assert relative_error(two_ranks[name].weights[weight_name], weight) < 1e-6, weight_name


@pytest.mark.parametrize("micro_batches", [[(0, 11)], [(0, 5), (5, 11)], [(index, index + 1) for index in range(11)]])
def test_token_mean_does_not_depend_on_the_number_of_micro_batches(micro_batches, paths):
    case = CASES["qwen2"]
    part = engine_outcome(case, paths["qwen2"], list(range(11)), micro_batches)
    assert_same(join_ranks([part]), reference_outcome(case, paths["qwen2"]), case.tolerance)
