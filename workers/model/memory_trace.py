"""Peak memory of a run's training roles, measured without a GPU: the real engine on tensors without data.

    request (JSON, stdin) --> each role, with a few layers: build | every pass on two full micro-batches --> ledger
                                     peaks at a few layers --straight line--> peaks at all layers (JSON, stdout)

    echo '{...}' | python -m workers.model.memory_trace

Use a separate process for each request, see `fake_gpu`. Not counted are fragmentation and workspaces of kernels:
cuBLAS, flash attention (in backward 4 bytes a token and query channel) and NCCL.
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
from workers.dataproto import DataProto
from workers.model.engine import TrainingEngine
from workers.model.fake_gpu import DEVICE, Ledger, fake_gpus
from workers.model.losses import Denominators, make_policy_loss, make_value_loss
from workers.model.optimizer import optimizer_state

MICRO_BATCHES = 2
"""For each stage of a pipeline; the second finds the gradients of the first."""


@dataclass(frozen=True)
class Role:
    """Describe a role. description: its config.json. layers: of the measured stage. Others: see `TrainingEngine`.

    tokens: of a full micro-batch of ranks that share sequences, by pass: `update`, `log_probs`, `values`, `scores`.
    """

    description: dict[str, Any]
    layers: int
    model: ModelConfig
    head: str
    trains: bool
    tokens: dict[str, int]
    cpu_offload: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Role":
        model = dict(given["model"])
        return cls(**{**given, "model": ModelConfig(**{**model, "lora": LoraConfig(**model["lora"])})})


def trace(request: Mapping[str, Any], ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Return bytes by role and pass, at all layers; `states` is what the role keeps between passes.

    request: ranks, rank (of this process), layers (of a stage, as built: two numbers or all), longest (tokens of a
    sequence), parallel, reshard_after_forward, entropy_coefficient, roles (name -> fields of `Role`). A role that fails
    on fake tensors has `problem`, one line, instead of numbers.
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
    layers = role.layers
    points = {count: _bytes_at(role, count, request, ledger) for count in request["layers"] if count <= layers}
    if layers not in points and len(points) < 2:
        points[layers] = _bytes_at(role, layers, request, ledger)
    names = next(iter(points.values()))
    return {name: extrapolate({count: found[name] for count, found in points.items()}, layers) for name in names}


def extrapolate(points: Mapping[int, float], layers: int) -> float:
    if layers in points:
        return points[layers]
    (few, less), (many, more) = sorted(points.items())[-2:]
    return more + (more - less) / (many - few) * (layers - many)


def _bytes_at(role: Role, layers: int, request: Mapping[str, Any], ledger: Ledger) -> dict[str, float]:
    gc.collect()
    stages = request["parallel"]["pipeline_parallel"]
    before = ledger.current
    with _folder(role.description, layers * stages) as path:
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
        sequences, micro_batches = full_micro_batches(
            tokens, request["longest"], engine.vocabulary, MICRO_BATCHES * stages, padded=layout == "padded"
        )
        ledger.restart()
        run = _update if name == "update" else getattr(TrainingEngine, name)
        run(engine, sequences, micro_batches, **({"request": request} if name == "update" else {}))
        found[name] = ledger.peak - before
    return found


def _update(engine: TrainingEngine, sequences: DataProto, micro_batches: list[tuple[int, int]], request: Any) -> None:
    loss: Callable[..., Any] = make_value_loss(ValueLossConfig())
    if engine.head == "lm":
        loss = make_policy_loss(LossConfig(kl_coefficient=1.0, entropy_coefficient=request["entropy_coefficient"]))
    engine.forward_backward(sequences, micro_batches, loss, Denominators.of(sequences))
    engine.optimizer_step()


def full_micro_batches(
    tokens: int, longest: int, vocabulary: int, count: int, *, padded: bool
) -> tuple[DataProto, list[tuple[int, int]]]:
    """Build `count` micro-batches of `tokens` tokens each, in sequences as long as possible; all but the first tokens
    learn.

    Ids are random, so that sequences share no prefix.
    """
    lengths = [longest] * (tokens // longest)
    if not padded and tokens % longest > 1:
        lengths.append(tokens % longest)
    generator = torch.Generator().manual_seed(0)
    rows = [_row(torch.randint(vocabulary, (length,), generator=generator)) for _ in range(count) for length in lengths]
    size = len(lengths)
    bounds = [(index * size, (index + 1) * size) for index in range(count)]
    return DataProto.from_list(rows, {"advantages": torch.zeros(len(rows))}), bounds


def _row(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    length = len(input_ids)
    names = ("old_log_probs", "reference_log_probs", "rollout_log_probs", "old_values", "returns")
    ids = {"input_ids": input_ids, "loss_mask": torch.arange(length) > 0}
    return ids | {name: torch.zeros(length) for name in names}


@contextmanager
def _folder(description: dict[str, Any], layers: int) -> Iterator[str]:
    kinds = description.get("layer_types")
    of_layers = {"layer_types": [kinds[layer % len(kinds)] for layer in range(layers)]} if kinds else {}
    shorter = description | {"num_hidden_layers": layers} | of_layers
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shorter))
        yield folder


def main() -> None:
    request = json.load(sys.stdin)
    with fake_gpus(request["ranks"], request["rank"]) as gpu:
        found = trace(request, gpu.ledger)
    print(json.dumps(found), flush=True)
    os._exit(0)  # autograd's threads for a device in Python crash when the interpreter ends


if __name__ == "__main__":
    main()
