"""Peak memory of the training roles of a run, measured without a GPU: the real engine on tensors without numbers.

    request (JSON, stdin) --> each role, with a few layers: build | every pass on two full micro-batches --> ledger
                                     peaks at a few layers --straight line--> peaks at all layers (JSON, stdout)

    echo '{...}' | python -m workers.model.memory_trace

Run in a process of its own for each request, see `fake_gpu`. Workspaces of kernels are not counted: those of cuBLAS,
flash attention (in backward 4 bytes a token and query channel) and NCCL; nor is fragmentation.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.config import LoraConfig, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig, ValueLossConfig
from workers.model.engine import TrainingEngine
from workers.model.fake_gpu import DEVICE, Ledger, fake_gpus
from workers.model.losses import Denominators, make_policy_loss, make_value_loss
from workers.model.optimizer import optimizer_state
from workers.model.packing import Sequences

MICRO_BATCHES = 2  # the second finds the gradients of the first


@dataclass(frozen=True)
class Role:
    """description: its config.json. tokens: of a full micro-batch of a group of ranks that share sequences, by pass:
    `update`, `log_probs`, `values`, `scores`. model, optimizer and so on: see `TrainingEngine`."""

    description: dict[str, Any]
    model: ModelConfig
    head: str
    trains: bool
    tokens: dict[str, int]
    cpu_offload: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Role":
        """From JSON."""
        model = dict(given["model"])
        return cls(**{**given, "model": ModelConfig(**{**model, "lora": LoraConfig(**model["lora"])})})


def trace(request: Mapping[str, Any], ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Bytes by role and pass, at all layers, and under `states` what the role keeps between passes.

    request: ranks, layers (those that are built, two numbers or all), longest (tokens of a sequence), parallel,
    reshard_after_forward, entropy_coefficient, roles (name -> fields of `Role`). A role that fake tensors cannot
    compute has `problem`, one line, in place of numbers.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, given in request["roles"].items():
        try:
            found[name] = _trace_role(Role.read(given), request, ledger)
        except Exception as error:  # the other roles are still measured
            found[name] = {
                "problem": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            }
    return found


def _trace_role(role: Role, request: Mapping[str, Any], ledger: Ledger) -> dict[str, float]:
    layers = role.description["num_hidden_layers"]
    points = {count: _bytes_at(role, count, request, ledger) for count in request["layers"] if count <= layers}
    if layers not in points and len(points) < 2:
        points[layers] = _bytes_at(role, layers, request, ledger)
    names = next(iter(points.values()))
    return {name: extrapolate({count: found[name] for count, found in points.items()}, layers) for name in names}


def extrapolate(points: Mapping[int, float], layers: int) -> float:
    """The value at `layers`: a given point, or a straight line through the last two points."""
    if layers in points:
        return points[layers]
    (few, less), (many, more) = sorted(points.items())[-2:]
    return more + (more - less) / (many - few) * (layers - many)


def _bytes_at(role: Role, layers: int, request: Mapping[str, Any], ledger: Ledger) -> dict[str, float]:
    """Bytes by pass of the role with its first `layers` layers."""
    gc.collect()
    before = ledger.current
    with _folder(role.description, layers) as path:
        engine = TrainingEngine(
            ModelConfig(**{**vars(role.model), "path": path}),
            optimizer=OptimizerConfig() if role.trains else None,
            total_steps=1,
            device=f"{DEVICE}:0",
            cpu_offload=role.cpu_offload,
            reshard_after_forward=request["reshard_after_forward"],
            parallel=ParallelConfig(**request["parallel"]),
            head=role.head,
        )
    if role.trains:
        optimizer_state(engine.optimizer)
    found: dict[str, float] = {"states": ledger.current - before}
    for name, tokens in role.tokens.items():
        layout, _ = role.model.rows(forward=name != "update")
        sequences, micro_batches = full_micro_batches(tokens, request["longest"], padded=layout == "padded")
        ledger.restart()
        run = _update if name == "update" else getattr(TrainingEngine, name)
        run(engine, sequences, micro_batches, **({"request": request} if name == "update" else {}))
        found[name] = ledger.peak - before
    return found


def _update(engine: TrainingEngine, sequences: Sequences, micro_batches: list[tuple[int, int]], request: Any) -> None:
    loss: Callable[..., Any] = make_value_loss(ValueLossConfig())
    if engine.head == "lm":
        loss = make_policy_loss(LossConfig(kl_coefficient=1.0, entropy_coefficient=request["entropy_coefficient"]))
    engine.forward_backward(sequences, micro_batches, loss, Denominators.of(sequences))
    engine.optimizer_step()


def full_micro_batches(tokens: int, longest: int, *, padded: bool) -> tuple[Sequences, list[tuple[int, int]]]:
    """Micro-batches of `tokens` tokens each, in sequences as long as possible; all tokens but the first are learned."""
    lengths = [longest] * (tokens // longest)
    if not padded and tokens % longest > 1:
        lengths.append(tokens % longest)
    rows = [_row(length) for _ in range(MICRO_BATCHES) for length in lengths]
    size = len(lengths)
    bounds = [(index * size, (index + 1) * size) for index in range(MICRO_BATCHES)]
    return Sequences.from_list(rows, {"advantages": torch.zeros(len(rows))}), bounds


def _row(length: int) -> dict[str, torch.Tensor]:
    names = ("old_log_probs", "reference_log_probs", "rollout_log_probs", "old_values", "returns")
    ids = {"input_ids": torch.zeros(length, dtype=torch.int64), "loss_mask": torch.arange(length) > 0}
    return ids | {name: torch.zeros(length) for name in names}


@contextmanager
def _folder(description: dict[str, Any], layers: int) -> Iterator[str]:
    """A folder with the config.json of the same model with fewer layers."""
    kinds = description.get("layer_types")
    shorter = description | {"num_hidden_layers": layers} | ({"layer_types": kinds[:layers]} if kinds else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shorter))
        yield folder


def main() -> None:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    with fake_gpus(request["ranks"]) as gpu:
        found = trace(request, gpu.ledger)
    print(json.dumps(found), flush=True)
    os._exit(0)  # autograd's threads for a device in Python crash when the interpreter ends


if __name__ == "__main__":
    main()
