"""What we ask of vLLM, torch, transformers and flash-attn, held against what is installed: an upgrade that
would break a run, on GPUs too, breaks a test here first.

The calls are read from our source (`tests.library_calls`), so that none is forgotten. flash-attn is not
installed: its part is held against the signature that it publishes, below.
"""

import asyncio
import inspect
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.library_calls import (
    Call,
    Found,
    Tables,
    bind,
    calls_on,
    check_file,
    check_source,
    module_of,
    overrides,
    strings,
)

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).parents[1]
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "workers").rglob("*.py"))]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """As flash-attn publishes it, 2.7 to 2.8 (flash_attn/flash_attn_interface.py)."""


@cache
def tables(folder: str) -> Tables:
    """Of what class the objects are that a folder's modules call."""
    sampling = ("workers/rollout", "workers/engine", "workers/agents")
    rooms = dict.fromkeys(sampling, _rollout_tables)
    rooms["workers/model"] = _model_tables
    return next(
        (table() for room, table in rooms.items() if folder.startswith(room)), Tables()
    )


def _rollout_tables() -> Tables:
    from vllm import RequestOutput
    from vllm.distributed.weight_transfer import (
        ParamMeta,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
    )
    from vllm.outputs import CompletionOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient

    return Tables(
        receivers={
            "asyncio": asyncio,
            "self.engine": AsyncLLM,
            "engine": AsyncLLM,
            "engine.engine_core": AsyncMPClient,
            "self._engine": AsyncLLM,
            "output": RequestOutput,
            "completion": CompletionOutput,
            "meta": ParamMeta,
            "self._core": EngineCore,
            "self._core.scheduler": Scheduler,
            "self._trainer_side": TrainerWeightTransferEngine,
        },
        stars={"self._core.preprocess_add_request(request)": 2},
        watched=(AsyncLLM, EngineCore, TrainerWeightTransferEngine, WeightTransferEngine),
        passes_on=("self._call",),
    )


def _model_tables() -> Tables:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module

    sharded = type("ShardedModule", (FSDPModule, Module), {})
    meshes = (
        "mesh",
        "mesh[]",
        "self.mesh",
        "self.mesh[]",
        "context",
        "parallel.context",
        "parallel.tensor",
        "self._parallel.context",
        "self.context",
        "self.tensor",
        "self.parallel.mesh[]",
        "self.parallel.tensor",
        "pipeline",
        "parallel.pipeline",
        "self.parallel.pipeline",
        "stage.parallel.pipeline",
        "self.pipeline",
        "parallel.mesh[]",
        "parallel.mesh",
    )
    return Tables(
        receivers={"module": sharded} | dict.fromkeys(meshes, DeviceMesh),
        stars={"_tokens_first(query, key, value)": 3, "cuda_arguments": 4, "inputs": 6},
        watched=(FSDPModule, DeviceMesh),
        published={"flash_attn.flash_attn_varlen_func": flash_attn_varlen_func},
    )


@cache
def found_in(file: Path) -> Found:
    return check_file(ROOT / file, ROOT, tables(str(file.parent)))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_call_into_a_library_fits_what_is_installed(file: Path) -> None:
    assert found_in(file).problems == []


def all_bound() -> dict[str, list[tuple[str, ...]]]:
    """Every call of ours: the names that its positional arguments were bound to, by what is called."""
    bound: dict[str, list[tuple[str, ...]]] = {}
    for file in FILES:
        for target, calls in found_in(file).bound.items():
            bound.setdefault(target, []).extend(calls)
    return bound


@pytest.mark.parametrize(
    "target",
    [
        "vllm.v1.engine.async_llm.AsyncLLM.from_engine_args",
        "vllm.v1.engine.async_llm.AsyncLLM.update_weights",
        "vllm.v1.engine.core.EngineCore.preprocess_add_request",
        "vllm.v1.engine.core.EngineCore.pause_scheduler",
        "vllm.v1.engine.core_client.AsyncMPClient.pause_scheduler_async",
        "vllm.engine.arg_utils.AsyncEngineArgs",
        "vllm.sampling_params.SamplingParams",
        "vllm.distributed.weight_transfer.ipc_engine.IPCTrainerInitInfo",
        "vllm.distributed.weight_transfer.nccl_engine.NCCLTrainerInitInfo",
        "vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine.send_weights",
        "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload",
        "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule.set_requires_gradient_sync",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
    ],
)
def test_the_calls_that_matter_most_are_among_those_found(target: str) -> None:
    """The reading of our source cannot go blind without a word; where we no longer call one, take it out
    here.
    """
    assert target in all_bound()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "_flash_attention_forward",
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        ),
        (
            "_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "rng_state unused",
        ),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "query key value dropout_p is_causal",
        ),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "grad_out query key value out logsumexp dropout_p is_causal",
        ),
        ("varlen_attn", "query key value cu_seq_q cu_seq_k max_q max_k"),
        (
            "flash_attn_varlen_func",
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        ),
    ],
)
def test_positions_in_calls_of_attention_kernels_mean_what_we_take_them_for(
    name: str, expected: str
) -> None:
    """An argument put in between would shift the others, and their number alone would not say so."""
    calls = [
        names
        for target, found in all_bound().items()
        if target.endswith(f".{name}")
        for names in found
    ]
    assert calls
    assert {" ".join(names) for names in calls} == {expected}


def library_subclasses() -> list[type]:
    """Our classes that extend one of a library's."""
    found = {
        kind
        for file in FILES
        for kind in vars(module_of(ROOT / file, ROOT)).values()
        if inspect.isclass(kind)
        and kind.__module__.startswith("workers")
        and list(overrides(kind))
    }
    return sorted(found, key=lambda kind: kind.__qualname__)


def test_classes_that_extend_a_librarys_take_what_it_calls_them_with() -> None:
    kinds = library_subclasses()
    assert "EngineThread" in {kind.__name__ for kind in kinds}
    assert len(kinds) >= 4
    for kind in kinds:
        assert kind.__subclasses__() or not inspect.isabstract(kind), kind
        for name, call in overrides(kind):
            static = isinstance(
                inspect.getattr_static(kind, name), (staticmethod, classmethod)
            )
            bind(inspect.signature(getattr(kind, name)), call, with_self=not static)


def test_our_client_is_what_the_trainers_side_of_vllm_expects() -> None:
    from vllm.distributed.weight_transfer import VLLMWeightSyncClient

    from workers.engine.weights.gpu_transfer import EngineClient

    wanted = [name for name in vars(VLLMWeightSyncClient) if not name.startswith("_")]
    assert len(wanted) == 4
    for name in wanted:
        parameters = [
            name
            for name in inspect.signature(getattr(VLLMWeightSyncClient, name)).parameters
            if name != "self"
        ]
        bind(
            inspect.signature(getattr(EngineClient, name)),
            Call(0, name, len(parameters), (), {}),
            with_self=True,
        )
        bind(
            inspect.signature(getattr(EngineClient, name)),
            Call(0, name, 0, tuple(parameters), {}),
            with_self=True,
        )


def reached(kind: type, methods: set[str]) -> dict[str, str]:
    """Sources of the methods, and of all that they call on `self`, by name."""
    sources: dict[str, str] = {}
    waiting = list(methods)
    while waiting:
        name = waiting.pop()
        member = inspect.getattr_static(kind, name, None)
        function = (
            getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        )
        if name in sources or not inspect.isroutine(function):
            continue
        sources[name] = inspect.cleandoc("\n" + inspect.getsource(function))
        waiting += [attribute for attribute, _ in calls_on(sources[name], ("self", "cls"))]
    return sources


# There the engine is never a thread.
ON_GPUS_ALONE = {"sleep", "wake_up", "init_weight_transfer_engine"}


def test_an_engine_in_a_thread_answers_all_that_vllm_asks_of_its_client() -> None:
    """On the ways from the methods that VllmEngineActor calls; vLLM's own client has many more."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.library_calls import has
    from workers.engine.engine_thread import EngineThread

    prefix = "vllm.v1.engine.async_llm.AsyncLLM."
    used = {
        target.removeprefix(prefix) for target in all_bound() if target.startswith(prefix)
    } - ON_GPUS_ALONE
    asked = [
        found
        for source in reached(AsyncLLM, used | {"__init__"}).values()
        for found in calls_on(source, ("self.engine_core", "engine_core"))
    ]
    assert {"add_request_async", "get_output_async", "collective_rpc_async"} <= {
        name for name, _ in asked
    }
    for name, call in asked:
        own = name in vars(EngineThread) or (call is None and has(EngineThread, name))
        assert own, (
            f"AsyncLLM asks engine_core.{name}, which EngineThread leaves to vLLM's base class"
        )
        if call is not None:
            bind(inspect.signature(getattr(EngineThread, name)), call, with_self=True)
    (made,) = [
        call
        for _, call in calls_on(
            reached(AsyncLLM, {"__init__"})["__init__"], ("EngineCoreClient",)
        )
        if call
    ]
    bind(inspect.signature(EngineThread), made)


def test_environment_variables_that_we_set_or_read_are_vllms() -> None:
    """It takes no notice of one that it does not know."""
    from vllm import envs

    ours = {
        text
        for folder in ("workers", "controller")
        for path in (ROOT / folder).rglob("*.py")
        for text in strings(path.read_text())
        if re.fullmatch(r"VLLM_[A-Z0-9_]+", text)
    }
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in ours
    assert ours - set(envs.environment_variables) == set()


@pytest.mark.parametrize("placement", ["colocated", "apart", "shared_memory"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_engine_arguments_of_every_placement_can_be_made(
    placement: str, tensor_parallel: int
) -> None:
    """Those that come from a `**mapping` are not in the source by name."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from workers.config.roles import ModelConfig, RolloutConfig
    from workers.engine.vllm_interface import engine_arguments
    from workers.engine.weights.weight_transfer import register

    register()
    config = RolloutConfig(tensor_parallel=tensor_parallel)
    made = engine_arguments(
        ModelConfig(path="model"), config, placement=placement, max_model_tokens=64, seed=0
    )
    assert made.weight_transfer_config.backend in WeightTransferEngineFactory._registry


def problems_of(source: str, **known: Any) -> str:
    return "\n".join(check_source(source, Tables(**known)).problems)


class Library:
    """Stands for a class of a library's."""

    __module__ = "torch.imagined"

    def pause(self, mode: str, *, clear: bool = True) -> None: ...


Library.pause.__module__ = "torch.imagined"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import torch\ntorch.nn.no_such_function()",
            "torch.nn.no_such_function is not there",
        ),
        ("from torch import no_such_name", "torch has no no_such_name"),
        (
            "import torch\ntorch.nn.Linear(1, 2, no_such=3)",
            "unexpected keyword argument 'no_such'",
        ),
        (
            "import torch\nf = torch.nn.Linear\nf(1)",
            "missing a required argument: 'out_features'",
        ),
        ("import torch\ntorch.ops.aten.mm(1, 2, 3)", "too many positional arguments"),
        ("import torch\ntorch.nn.Linear(*sizes)", "*sizes: say how many arguments that is"),
        (
            "def f(engine):\n    engine.pause('keep')",
            "a method of Library? name the class of engine",
        ),
        ("def f(known):\n    known.pause()", "missing a required argument: 'mode'"),
        ("def f(known):\n    known.resume()", "Library has no resume"),
        (
            "def f(known):\n    call(known.pause, 'keep', 1)",
            "too many positional arguments",
        ),
    ],
)
def test_a_call_that_does_not_fit_is_told(source: str, expected: str) -> None:
    known = {"receivers": {"known": Library}, "watched": (Library,), "passes_on": ("call",)}
    assert expected in problems_of(source, **known)


def test_a_constant_outside_of_a_literal_type_is_told() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {"receivers": {"engine": AsyncLLM}}
    assert problems_of("engine.pause_generation(mode='keep')", **known) == ""
    assert "mode='hold' is none of" in problems_of(
        "engine.pause_generation(mode='hold')", **known
    )


def test_ray_prints_the_output_of_actors_in_threads_of_these_names() -> None:
    from ray._private import worker

    from controller.observability.run_log import RAYS_THREADS

    source = inspect.getsource(worker.connect)
    assert [name for name in RAYS_THREADS if f'name="{name}"' not in source] == []
    # Looked up when it prints.
    assert "sys.stdout" in inspect.getsource(worker.print_to_stdstream)
