"""Compare the engine with the model's own forward pass on a few random sequences at load.

    Probe --one sequence after the other, own attention, float32--> expected   rank 0, the whole model
          --in rows, as the run lays out its micro-batches--> Outputs               every rank, its shards
    expected, Outputs --compare--> Difference --> nothing, or UnsupportedModelError

Lists of families cannot keep up with transformers: a state that leaks between sequences, ignored positions,
or a factor on the logits change log-probs silently. The first sequence of a row shows none of this, so there
are three. Policy and reference are compared by log-probs, critic and reward model by values and the value
head's inputs, and trained policies also by gradients. Models that see images get sequences with images, see
`image_probe`.

Shapes: N predicted tokens of the probe, C columns: 1 for log-probs, 1 + H (hidden size) for a value head.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.batch.metrics import TOLERANCE
from workers.config.roles import ModelConfig, ParallelConfig
from workers.errors import BallastError, ConfigError, UnsupportedModelError
from workers.model.attention.attention import ATTENTION_NAME
from workers.model.forward_backward import EnginePass
from workers.model.layout import RowLayout
from workers.model.model import PackedModel, described, use_attention
from workers.model.numerics_probe import Probe, make_probe
from workers.model.rows.packing import ModelInput
from workers.model.sharding.parallel import full_tensor, reshard
from workers.model.sharding.stage_layers import Passing
from workers.model.value_head import HEAD, PackedValueModel

LENGTH = re.compile(
    r"(window(_size)?|attention_chunk_size|floor(_scale)?|local_attention|original_max_position_embeddings"
    r"|index_topk)$"
)
"""Names, in configurations and modules, of lengths beyond which a model computes something else. Beyond
`index_topk` it selects tokens.
"""
SHORT = 8  # these lengths, in tokens, for the probe

GRADIENT_TOLERANCE = 1e-2
"""Relative, in the L2 norm. Exact models reach 1e-6 in float32. A sequence or a rank that is left out gives
0.1.
"""
TIMES_ROUNDING, HALF_TOLERANCE, HALF_GRADIENT = 4.0, 2e-2, 1e-1
"""Limits in half precision: a multiple of the change by rounding activations in the model's own pass, and an
absolute difference that is always allowed, since kernels sum in another order. Rounding in the own pass also
moves which tokens an indexer selects, so the limit includes these jumps.
"""

CPU = torch.device("cpu")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outputs:
    """Hold values, float32 [N, C] on the CPU. gradients: of their sum by the probed parameters, flat, or
    None.
    """

    values: Tensor
    gradients: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Mean and largest absolute difference of an output, nats for log-probs, and the relative one of
    gradients (L2).

    Hidden states and values are in units of their root mean square. gradient: 0 if not compared.
    """

    mean: float = 0.0
    largest: float = 0.0
    gradient: float = 0.0


Expected = tuple[Outputs, Difference]
"""Outputs of the model's own forward pass, and their change when activations are rounded to the engine's
dtype.
"""


def check_numerics(packed: PackedModel, config: ModelConfig) -> Difference:
    """Check a model from `LOADERS` in this process: on the CPU, in float32, unsharded. The model is
    unchanged.

    Raises as `check_against_reference` and `own_outputs` do.
    """
    layout = RowLayout(config, None, packed, CPU, torch.float32)
    probe = make_probe(packed, torch.float32, prefix=layout.shared_from)
    settings = _settings(config, ParallelConfig())
    expected, rounding = own_outputs(packed, probe)

    def compute() -> Outputs:
        values = _row_values(packed, layout.lay_out(probe.sequences), probe.temperature)
        return _outputs(values, packed, probe)

    with _as_probed(packed, probe):
        difference = compare(_translated(packed, settings, compute), expected)
    _raise_if_different(difference, rounding, probe, packed, settings, layout.shared_from)
    return difference


def check_against_reference(engine: Any, probe: Probe, expected: Expected) -> None:
    """Compute the probe as a TrainingEngine computes its micro-batches, and compare. Collective, changes
    nothing.

    Raises UnsupportedModelError on every rank if the difference exceeds rounding or a pass raises.
    """
    config = engine.model_config
    for forward in (False, True)[: 1 + (config.rows(forward=True)[0] != config.layout)]:
        settings = _settings(
            replace(config, layout=config.rows(forward=forward)[0]), engine.parallel.config
        )
        outputs = _translated(
            engine.module, settings, partial(_engine_outputs, engine, probe, forward)
        )
        difference = compare(outputs, expected[0])
        worst = torch.tensor(
            [difference.mean, difference.largest, difference.gradient], device=engine.device
        )
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        difference = Difference(*worst.tolist())
        _raise_if_different(
            difference,
            expected[1],
            probe,
            engine.module,
            settings,
            engine.layout.shared_from,
        )


def _engine_outputs(engine: Any, probe: Probe, forward: bool) -> Outputs:
    trains = bool(probe.parameters)
    gradients = [None] * len(probe.parameters)
    outputs: list[Tensor] = []

    def compute(rows: ModelInput, passing: Passing) -> Tensor:
        return _row_values(engine.module, rows, probe.temperature, passing)

    def finish(_: int, rows: ModelInput, values: Tensor) -> Tensor | None:
        outputs.append(values.detach().float().cpu())
        # All ranks have the same sequences, and their gradients are summed.
        return (
            values.sum() * (rows.degree / engine.parallel.counted_ranks) if trains else None
        )

    with _as_probed(engine.module, probe, engine.device):
        rounds = engine.stage.whole_rounds([(0, len(probe.sequences))])
        slices = [probe.sequences.slice(*rows) for rows in rounds]
        engine.runner.run(EnginePass("numerics", slices, compute, finish, trains, forward))
        if trains and engine.stage.is_first:
            summed = [engine.module.get_parameter(name).grad for name in probe.parameters]
            gradients = [
                None if gradient is None else full_tensor(gradient.to(engine.device))
                for gradient in summed
            ]
    for parameter in engine.module.parameters():
        parameter.grad = None
    reshard(engine.module)
    engine.clock.take()  # keep the probe out of the run's times and router metrics
    engine.routing.take()
    values = engine.stage.from_last(outputs[0] if outputs else None)
    return Outputs(
        values, tuple(engine.stage.from_stage(0, _flat(gradient)) for gradient in gradients)
    )


def own_outputs(packed: PackedModel, probe: Probe) -> Expected:
    """Return transformers' outputs for each sequence by itself: its own forward pass, attention and output
    layer.

    packed: whole, on the CPU, in float32 or float64. Raises ConfigError for weights with NaN or infinity,
    UnsupportedModelError if the forward pass raises or returns NaN or infinity.
    """
    _check_weights(packed)
    with _own_attention(packed.model), _as_probed(packed, probe):
        outputs = _translated(
            packed, "its own forward pass", lambda: _own_forward(packed, probe)
        )
        if not outputs.values.isfinite().all():
            raise UnsupportedModelError(
                f"{packed.name}: its own forward pass gives NaN or infinity"
            )
        if probe.dtype in (torch.float32, torch.float64):
            return outputs, Difference()
        with _rounded(packed.model, probe.dtype):
            return outputs, compare(_own_forward(packed, probe), outputs)


def _translated(
    packed: PackedModel, settings: str, compute: Callable[[], Result]
) -> Result:
    try:
        return compute()
    except (BallastError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise UnsupportedModelError(
            f"{packed.name}: {settings} raises {type(error).__name__}: {text}"
        ) from error


def _check_weights(packed: PackedModel) -> None:
    for name, parameter in packed.model.named_parameters():
        # A sum is read at the speed of memory and keeps NaN and infinity. It might overflow by itself.
        if (
            not parameter.detach().sum().isfinite()
            and not parameter.detach().isfinite().all()
        ):
            raise ConfigError(
                f"model.path={packed.model.name_or_path}: its weights contain NaN or infinity (first: "
                f"{name}). Fetch the model again."
            )


def _row_values(
    packed: PackedModel,
    rows: ModelInput,
    temperature: float,
    passing: Passing | None = None,
) -> Tensor:
    with _head_inputs(packed) as seen:
        outputs = packed(rows, temperature, passing)
    if passing is not None and not passing.part.last:
        return outputs
    if seen:
        return rows.whole(torch.cat([outputs[:, None], seen[0].to(outputs.dtype)], dim=1))
    return rows.whole(outputs[0])[:, None]


def _own_forward(packed: PackedModel, probe: Probe) -> Outputs:
    values = []
    rows = probe.sequences.tokens["input_ids"].split(probe.sequences.lengths.tolist())
    dtype = packed.model.dtype
    for ids, inputs in zip(rows, probe.inputs, strict=True):
        arguments = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in inputs.items()
        }
        with _head_inputs(packed) as seen:
            outputs = packed.model(input_ids=ids[None], use_cache=False, **arguments)
        if seen:
            hidden = seen[0][0, :-1]
            values.append(torch.cat([getattr(packed.model, HEAD)(hidden), hidden], dim=1))
        else:
            all_log_probs = (
                outputs.logits[0, :-1].float() / probe.temperature
            ).log_softmax(-1)
            values.append(all_log_probs.gather(-1, ids[1:, None]))
    return _outputs(torch.cat(values), packed, probe)


def _outputs(values: Tensor, packed: PackedModel, probe: Probe) -> Outputs:
    parameters = [packed.get_parameter(name) for name in probe.parameters]
    gradients = (
        torch.autograd.grad(values.sum(), parameters, allow_unused=True)
        if parameters
        else ()
    )
    return Outputs(values.detach().float(), tuple(map(_flat, gradients)))


def _flat(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().float().flatten().cpu()


def compare(actual: Outputs, expected: Outputs) -> Difference:
    """Return the difference of two outputs. NaN on either side counts as infinite."""
    scale = torch.ones(expected.values.shape[1])
    if len(scale) > 1:  # values and hidden states in their units, log-probs in nats
        scale[0], scale[1:] = _size(expected.values[:, :1]), _size(expected.values[:, 1:])
    distance = ((actual.values - expected.values).abs() / scale).nan_to_num(nan=torch.inf)
    relative = [
        1.0
        if actual_gradient is None
        else float(
            ((actual_gradient - gradient).norm() / gradient.norm()).nan_to_num(
                nan=torch.inf
            )
        )
        for actual_gradient, gradient in zip(
            actual.gradients, expected.gradients, strict=False
        )
        if gradient is not None and gradient.any()
    ]
    return Difference(
        float(distance.mean()), float(distance.max()), max(relative, default=0.0)
    )


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) or 1.0  # a new value head gives 0


def _raise_if_different(
    difference: Difference,
    rounding: Difference,
    probe: Probe,
    packed: PackedModel,
    settings: str,
    shared_from: int,
) -> None:
    """Raise UnsupportedModelError if a difference exceeds rounding in the engine's dtype.

    In float32 the largest difference of a token counts. In half precision the mean counts, since rounding may
    send single tokens to another expert, or let an indexer select another token. settings: the engine's for
    the probe. shared_from: of `RowLayout`.
    """
    is_half = probe.dtype not in (torch.float32, torch.float64)
    dtype = str(probe.dtype).removeprefix("torch.")
    outputs = (
        max(HALF_TOLERANCE, TIMES_ROUNDING * rounding.mean) if is_half else TOLERANCE[dtype]
    )
    gradient = (
        max(HALF_GRADIENT, TIMES_ROUNDING * rounding.gradient)
        if is_half
        else GRADIENT_TOLERANCE
    )
    is_value = isinstance(packed, PackedValueModel)
    quantity, unit = (
        ("values", "of a hidden state's size") if is_value else ("log-probs", "nats")
    )
    if not (difference.mean if is_half else difference.largest) <= outputs:
        problem = f"{quantity} differ by up to {difference.largest:.2g} {unit} (mean {difference.mean:.2g})"
    elif not difference.gradient <= gradient:
        problem = f"the gradient of {' or '.join(probe.parameters)} differs by {difference.gradient:.1%}"
    else:
        return
    changes = ["model.share_prefixes=never"] * (shared_from > 0)
    if "parallel" in settings:
        changes.insert(0, "these to 1")
    elif "padded" not in settings:
        changes.insert(0, "model.layout=padded")
    advice = (
        f"Set {' or '.join(changes)}, or take another model"
        if changes
        else "Take another model"
    )
    raise UnsupportedModelError(
        f"{packed.name}: with {settings} {problem} from the model's own forward pass of one sequence at a "
        f"time, which is more than rounding in {dtype}. {advice}."
    )


def _settings(config: ModelConfig, parallel: ParallelConfig) -> str:
    names = ("context_parallel", "tensor_parallel", "pipeline_parallel")
    shared = [
        f"policy.parallel.{name}={size}"
        for name in names
        if (size := getattr(parallel, name)) > 1
    ]
    return ", ".join([f"model.layout={config.layout}", *shared])


@contextmanager
def _head_inputs(packed: PackedModel) -> Iterator[list[Tensor]]:
    """Collect a value head's inputs inside the block. A new head returns 0 for any input."""
    seen: list[Tensor] = []
    if not isinstance(packed, PackedValueModel):
        yield seen
        return
    handle = getattr(packed.model, HEAD).register_forward_pre_hook(
        lambda head, inputs: seen.append(inputs[0].detach())
    )
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    old_attention = model.config.get_text_config()._attn_implementation
    with suppress(ValueError):  # a family without `eager` keeps its attention
        use_attention(model, "eager")
    used = model.config.get_text_config()._attn_implementation
    if used == ATTENTION_NAME:  # our attention would be compared with itself
        raise UnsupportedModelError(
            f"{described(model)} has no attention to compare packed rows with. Set model.layout=padded."
        )
    try:
        yield
    finally:
        if used != old_attention:
            use_attention(model, old_attention)


@contextmanager
def _as_probed(
    packed: PackedModel, probe: Probe, device: torch.device = CPU
) -> Iterator[None]:
    """Inside, lengths that change the computation are `SHORT`, and random numbers come from a copy of the
    generators.
    """
    old_values = []
    towers = (
        [packed.model.get_submodule(name) for name in packed.vision.parts]
        if packed.vision
        else []
    )
    # Windows of vision towers are of pixels.
    parts = set(packed.modules()).difference(*(tower.modules() for tower in towers))
    for values in [values for part in parts for values in _values_of(part)]:
        for name, value in values.items():
            if LENGTH.search(name) and isinstance(value, int | float) and value > SHORT:
                old_values.append((values, name, value))
                values[name] = SHORT
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.set_grad_enabled(bool(probe.parameters)),
        ):
            yield
    finally:
        for values, name, value in old_values:
            values[name] = value


def _values_of(part: nn.Module) -> Iterator[dict[str, Any]]:
    yield vars(part)
    if isinstance(config := vars(part).get("config"), PreTrainedConfig):
        for one in (config, config.get_text_config()):
            yield vars(one)
            tables = vars(one).get("rope_parameters") or {}
            yield from (
                table for table in (tables, *tables.values()) if isinstance(table, dict)
            )


@contextmanager
def _rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    def rounded(part: nn.Module, inputs: Any, output: Any) -> Any:
        is_float = isinstance(output, Tensor) and output.is_floating_point()
        return output.to(dtype).to(output.dtype) if is_float else output

    handles = [part.register_forward_hook(rounded) for part in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
