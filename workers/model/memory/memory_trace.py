"""Peak memory of a run's training roles, measured without a GPU: the real engine on tensors without data.

    request (JSON, stdin) --> each role, a few layers: build | every pass on two full micro-batches --> ledger
                                peaks at a few layers --straight line--> peaks at all layers (JSON, stdout)

    echo '{...}' | python -m workers.model.memory.memory_trace

Every role and number of layers is built in a fork of this process, see `fake_gpu`. Not counted are
fragmentation and workspaces of kernels: cuBLAS, flash attention (in backward 4 bytes a token and query
channel) and NCCL.
"""

import gc
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image, PlacedImage
from workers.config.loss import DistillationConfig
from workers.config.model import RECOMPUTED
from workers.config.roles import (
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ValueLossConfig,
)
from workers.images.images import png_of
from workers.images.placeholders import Placeholders
from workers.model.checkpoint.lora import add_adapters, lower_base
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss, make_value_loss
from workers.model.losses.distillation import WholeLayer, as_numpy
from workers.model.low_bit_linear import narrow_frozen
from workers.model.memory.fake_gpu import DEVICE, FLASH, Ledger, fake_gpus
from workers.model.model import PackedModel, compute_dtype
from workers.model.optimizer.optimizer import optimizer_state
from workers.model.rules.layer_sizes import kv_bytes
from workers.model.sharding.stage_split import split_layers
from workers.model.skeleton import build_skeleton
from workers.model.stages.stage_pipeline import layer_costs
from workers.model.vision.tower import Vision
from workers.user_code.process import end_with_parent

SMALLEST = 28  # pixels of a side


@dataclass(frozen=True)
class Role:
    """Describe a role.

    description: its config.json. tokens: of a full micro-batch of ranks that share sequences, by pass:
    `update`, `log_probs`, `values`, `scores`. optimizer: settings that its memory depends on. Others: see
    `TrainingEngine`.
    images: empty, or the `folder` of the processor, `pixels` of the largest image, tokens of the longest
    `prompt`, and by pass a cap on the tokens of a micro-batch's images, 0 for none.
    """

    description: dict[str, Any]
    model: ModelConfig
    head: str
    trains: bool
    tokens: dict[str, int]
    cpu_offload: bool
    optimizer_offload: bool
    optimizer: dict[str, Any]
    images: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Role":
        """From JSON."""
        model = dict(fields["model"])
        return cls(
            **{
                **fields,
                "model": ModelConfig(**{**model, "lora": LoraConfig(**model["lora"])}),
            }
        )


def trace(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Measure every role of `request`, see `controller.preflight.memory.request`.

    Returns, by role, `sizes`, see `_sizes`, and `stages`: of the first and the last stage, bytes by pass, and
    `states` between passes. A role that fails on fake tensors has `problem`, one line, in place of `stages`.
    """
    roles = {name: Role.read(fields) for name, fields in request["roles"].items()}
    parallel = ParallelConfig(**request["parallel"])
    sizes = {
        name: _sizes(role, parallel, request["longest"]) for name, role in roles.items()
    }
    points = {
        name: _points(request["layers"], roles[name], role_sizes["layers"], parallel)
        for name, role_sizes in sizes.items()
    }
    stages = sorted({0, parallel.pipeline_parallel - 1})
    with _pools(
        request["ranks"], parallel, stages, sum(map(len, points.values()))
    ) as pools:
        jobs = {}
        for name, role in roles.items():
            jobs[name] = [_submit(pool, role, points[name], request) for pool in pools]
        return {
            name: {"sizes": sizes[name]} | _result(jobs[name], sizes[name]["layers"])
            for name in roles
        }


def _submit(
    pool: ProcessPoolExecutor, role: Role, counts: Iterable[int], request: Mapping[str, Any]
) -> dict[int, Future[dict[str, float]]]:
    return {count: pool.submit(_bytes_at, role, count, request) for count in counts}


def _result(jobs: list[dict[int, Future[dict[str, float]]]], layers: int) -> dict[str, Any]:
    stages = []
    try:
        for stage_jobs in jobs:
            stages.append({count: job.result() for count, job in stage_jobs.items()})
    except Exception as error:  # the other roles are still measured
        return {
            "problem": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        }
    return {"stages": [_extrapolate_stage(points, layers) for points in stages]}


def _extrapolate_stage(
    points: dict[int, dict[str, float]], layers: int
) -> dict[str, float]:
    stage = {}
    for name in points[min(points)]:
        stage[name] = extrapolate({count: at[name] for count, at in points.items()}, layers)
    return stage


@contextmanager
def _pools(
    ranks: int, parallel: ParallelConfig, stages: list[int], jobs: int
) -> Iterator[list[ProcessPoolExecutor]]:
    """Yield for each stage processes that act as its first rank."""
    workers = min(jobs, len(os.sched_getaffinity(0)))
    fork = multiprocessing.get_context("fork")
    # A collection in a fork would walk through everything that this process has imported.
    gc.collect()
    gc.freeze()
    of_a_stage = ranks // parallel.pipeline_parallel
    pools = [
        ProcessPoolExecutor(workers, fork, _become, (ranks, stage * of_a_stage))
        for stage in stages
    ]
    yield pools
    for pool in pools:
        pool.shutdown()


_entered = ExitStack()  # until the process ends
_ledgers: list[Ledger] = []


def _become(ranks: int, rank: int) -> None:
    """Make this process a rank with a simulated GPU."""
    # Its own end of the pool's pipes keeps it waiting for jobs after a killed owner.
    end_with_parent()
    _ledgers.append(_entered.enter_context(fake_gpus(ranks, rank)).ledger)


def _sizes(role: Role, parallel: ParallelConfig, longest: int) -> dict[str, Any]:
    """Count parameters, those trained, bytes of all weights as they are stored, layers of the fullest stage,
    hidden size, bytes that an engine keeps of a token, on average of the longest sequence.
    """
    with _folder(role.description, 0, role.images.get("folder", "")) as path:
        packed = build_skeleton(
            role.model, Path(path), role.head, trained=True, weights=False
        )
    text = packed.model.config.get_text_config()
    layers = len(packed.layers)
    stages = parallel.pipeline_parallel
    if stages > 1:
        costs = layer_costs(
            packed, recomputed=RECOMPUTED[role.model.gradient_checkpointing]
        )
        parts = [
            len(part) for part in split_layers(*costs, stages * parallel.virtual_stages)
        ]
        layers = max(sum(parts[stage::stages]) for stage in range(stages))
    parameters = sum(parameter.numel() for parameter in packed.model.parameters())
    packed.set_trained(role.trains, role.model.train_vision)
    if role.model.lora.rank:
        add_adapters(packed.model, role.model.lora)
        _lower_base(packed, role.model, parallel.tensor_parallel)
    trained = sum(
        parameter.numel()
        for parameter in packed.model.parameters()
        if parameter.requires_grad
    )
    return {
        "parameters": parameters,
        "trained": trained * role.trains,
        "weight_bytes": sum(weight.nbytes for weight in packed.model.parameters()),
        "layers": layers,
        "hidden": text.hidden_size,
        "kv_bytes": kv_bytes(text, longest) / longest,
    }


def _lower_base(packed: PackedModel, model: ModelConfig, tensor_parallel: int) -> None:
    """Keep frozen weights in the types in which a run keeps them."""
    lower_base(packed.model, model.base_dtype, tensor_parallel)
    if model.base_dtype != "float32":
        narrow_frozen(
            packed.model, compute_dtype(model.dtype, torch.device("cpu")), packed.tower
        )


def _points(
    layer_counts: list[int], role: Role, layers: int, parallel: ParallelConfig
) -> list[int]:
    """Return the numbers of layers to build: two, with as many in each part of a stage, or all of a small
    model.

    All with images: with few layers the peak may be the tower's, which other layers do not raise.
    """
    virtual = parallel.virtual_stages
    if role.images:
        return [-(-layers // virtual) * virtual]
    fewest = -(-layer_counts[0] // virtual) * virtual
    points = [fewest + virtual * (count - layer_counts[0]) for count in layer_counts]
    return points if points[-1] < layers else [layers]


def extrapolate(points: Mapping[int, float], layers: int) -> float:
    if layers in points:
        return points[layers]
    (few, less), (many, more) = sorted(points.items())[-2:]
    return more + (more - less) / (many - few) * (layers - many)


def _bytes_at(role: Role, layers: int, request: Mapping[str, Any]) -> dict[str, float]:
    gc.collect()
    (ledger,) = _ledgers
    stages = request["parallel"]["pipeline_parallel"]
    base_bytes = ledger.current
    with _folder(role.description, layers * stages, role.images.get("folder", "")) as path:
        engine = TrainingEngine(
            ModelConfig(**{**vars(role.model), "path": path}),
            optimizer=OptimizerConfig(**role.optimizer) if role.trains else None,
            total_steps=1,
            device=f"{DEVICE}:0",
            cpu_offload=role.cpu_offload,
            optimizer_offload=role.optimizer_offload,
            reshard_after_forward=request["reshard_after_forward"],
            parallel=ParallelConfig(**request["parallel"]),
            head=role.head,
        )
        vision = engine.module.vision
        image = largest_image(vision, role.images) if role.images and vision else None
    if role.trains:
        optimizer_state(engine.optimizer)
    bytes_by_pass: dict[str, float] = {"states": ledger.current - base_bytes}
    for name, tokens in role.tokens.items():
        layout, _ = role.model.rows(forward=name != "update")
        count = (
            _micro_batches(ParallelConfig(**request["parallel"]), engine.stage.index)
            if name == "update"
            else 2
        )
        sequences, micro_batches = full_micro_batches(
            tokens, request["longest"], engine.vocabulary, count, padded=layout == "padded"
        )
        if image:
            sequences = with_images(
                sequences,
                micro_batches,
                image,
                role.images["prompt"],
                role.images.get(name, 0),
            )
        ledger.restart()
        run = _update if name == "update" else getattr(TrainingEngine, name)
        run(
            engine,
            sequences,
            micro_batches,
            **({"request": request} if name == "update" else {}),
        )
        bytes_by_pass[name] = ledger.peak - base_bytes
    return bytes_by_pass


def _micro_batches(parallel: ParallelConfig, stage: int) -> int:
    """Count those in flight on a stage, plus one that finds the gradients of the first. Interleaved: whole
    rounds.
    """
    stages = parallel.pipeline_parallel
    return stages - stage + 1 if parallel.virtual_stages == 1 else 2 * stages


def _update(
    engine: TrainingEngine,
    sequences: DataProto,
    micro_batches: list[tuple[int, int]],
    request: Any,
) -> None:
    loss: Callable[..., Any] = make_value_loss(ValueLossConfig())
    if engine.head == "lm":
        taught = DistillationConfig(**request["distillation"])
        options = {name: request[name] for name in ("entropy_coefficient", "hidden_states")}
        loss = make_policy_loss(
            LossConfig(kl_coefficient=1.0, distillation=taught, **options)
        )
        sequences = _with_teacher(engine, sequences, taught, request)
    engine.forward_backward(sequences, micro_batches, loss, Denominators.of(sequences))
    engine.optimizer_step()


def _with_teacher(
    engine: TrainingEngine,
    sequences: DataProto,
    taught: DistillationConfig,
    request: Mapping[str, Any],
) -> DataProto:
    """Add the columns that the policy reads of a teacher, and give it the teacher's output layer."""
    tokens = sequences.num_tokens
    top = taught.top_k
    if not taught.coefficient:
        return sequences
    columns = {"teacher_log_probs": torch.zeros(tokens)}
    if taught.over == "top_k":
        columns = {
            "teacher_top_ids": torch.zeros(tokens, top, dtype=torch.int64),
            "teacher_top_log_probs": torch.zeros(tokens, top + 1),
        }
    if taught.over == "vocabulary":
        text = (request["roles"].get("teacher") or request["roles"]["policy"])[
            "description"
        ]
        text = text.get("text_config") or text
        layer = torch.zeros(text["vocab_size"], text["hidden_size"], dtype=engine.dtype)
        engine.teacher_layer = WholeLayer(as_numpy(layer), None, None, 1.0, engine.dtype)
        columns = {
            "teacher_hidden": torch.zeros(tokens, text["hidden_size"], dtype=engine.dtype)
        }
    return replace(sequences, tokens=sequences.tokens | columns)


def full_micro_batches(
    tokens: int, longest: int, vocabulary: int, count: int, *, padded: bool
) -> tuple[DataProto, list[tuple[int, int]]]:
    """Build `count` micro-batches of `tokens` tokens each, in sequences as long as possible. All but the
    first tokens learn.

    Ids are random, so that sequences share no prefix.
    """
    lengths = [longest] * (tokens // longest)
    if not padded and tokens % longest > 1:
        lengths.append(tokens % longest)
    generator = torch.Generator().manual_seed(0)
    rows = [
        _row(torch.randint(vocabulary, (length,), generator=generator))
        for _ in range(count)
        for length in lengths
    ]
    size = len(lengths)
    bounds = [(index * size, (index + 1) * size) for index in range(count)]
    return DataProto.from_list(rows, {"advantages": torch.zeros(len(rows))}), bounds


def _row(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    length = len(input_ids)
    names = (
        "old_log_probs",
        "reference_log_probs",
        "rollout_log_probs",
        "old_values",
        "returns",
    )
    ids = {"input_ids": input_ids, "loss_mask": torch.arange(length) > 0}
    return ids | {name: torch.zeros(length) for name in names}


def largest_image(vision: Vision, limits: Mapping[str, Any]) -> tuple[Image, np.ndarray]:
    """Return a square image of at most `pixels`, and of at most `prompt` tokens, and its tokens."""
    import PIL.Image

    vision.model.config.vision_config._attn_implementation = FLASH
    placeholders = Placeholders(vision.processor, "", compared=0)
    side = math.isqrt(limits["pixels"])
    while True:
        picture = PIL.Image.new("RGB", (side, side), "gray")
        image = Image(0, side, side, png_of(picture))
        ids, _ = placeholders.expand(
            np.array([placeholders.id]), [image], "the memory estimate"
        )
        if len(ids) <= limits["prompt"] or side < SMALLEST:
            return image, ids
        side = side * 9 // 10


def with_images(
    sequences: DataProto,
    micro_batches: list[tuple[int, int]],
    image: tuple[Image, np.ndarray],
    prompt: int,
    most: int,
) -> DataProto:
    """Let sequences begin with different images: as many as prompts hold or, unless 0, `most` tokens a
    micro-batch.
    """
    picture, ids = image
    placed: list[list[PlacedImage]] = [[] for _ in range(len(sequences))]
    for start, stop in micro_batches:
        image_budget = most // len(ids) if most else len(sequences) * prompt
        stride = len(ids) + 1
        for row in range(start, stop):
            first = int(sequences.offsets[row])
            length = int(sequences.lengths[row])
            count = min(image_budget, (length if most else min(length, prompt)) // stride)
            image_budget -= count
            for index in range(count):
                place = index * stride + 1
                sequences.tokens["input_ids"][first + place : first + place + len(ids)] = (
                    torch.from_numpy(ids)
                )
                placed[row].append(
                    PlacedImage(replace(picture, digest=first + place), place, len(ids))
                )
    return replace(sequences, objects={"images": object_column(list(map(tuple, placed)))})


@contextmanager
def _folder(
    description: dict[str, Any], layers: int = 0, processor: str = ""
) -> Iterator[str]:
    """Hold config.json, and the files of the folder `processor`. layers: replaces its number of layers."""
    if layers:
        text = description.get("text_config") or description
        kinds = text.get("layer_types")
        of_layers = (
            {"layer_types": [kinds[layer % len(kinds)] for layer in range(layers)]}
            if kinds
            else {}
        )
        shorter = text | {"num_hidden_layers": layers} | of_layers
        description = (
            shorter if text is description else description | {"text_config": shorter}
        )
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(processor).absolute().iterdir() if processor else ():
            if file.suffix != ".safetensors" and file.name != "config.json":
                (Path(folder) / file.name).symlink_to(file)
        (Path(folder) / "config.json").write_text(json.dumps(description))
        yield folder


if __name__ == "__main__":
    print(json.dumps(trace(json.load(sys.stdin))), flush=True)
