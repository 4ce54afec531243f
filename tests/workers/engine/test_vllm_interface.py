"""Our settings in vLLM's words, its output in ours, and what the trainer's side of a transfer tells the
engines.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.numpy import save_file
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import AsyncEngineArgs

from tests.benchmarks.families.shrinking import tiny_config
from tests.refusals import refused
from workers.config.roles import LoraConfig, ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.adapters import adapter_arguments
from workers.engine.placement import check_placement
from workers.engine.vllm_interface import (
    as_response,
    build_engine,
    check_prompt,
    engine_arguments,
    prepare_environment,
    sampling_parameters,
)
from workers.engine.weights.gpu_transfer import EngineClient
from workers.engine.weights.weight_transfer import FROZEN_VISION
from workers.errors import LostError, RolloutError
from workers.rollout.engine_actor import VllmEngineActor

HUGE_PAGES, IN_A_PROCESS = "THP_MEM_ALLOC_ENABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"
OF_THE_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("placement", ["colocated", "apart", "shared_memory", "nearby"])
def test_a_placement_that_cannot_move_weights_is_refused(
    placement: str, has_gpu: bool
) -> None:
    if placement != "nearby" and (placement == "shared_memory") != has_gpu:
        check_placement(placement, has_gpu=has_gpu)
        return
    with refused(f"rollout.placement={placement}"):
        check_placement(placement, has_gpu=has_gpu)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the process environment after the test."""
    for name in (
        "OMP_NUM_THREADS",
        "TORCHDYNAMO_DISABLE",
        "OMP_WAIT_POLICY",
        HUGE_PAGES,
        IN_A_PROCESS,
    ):
        monkeypatch.setenv(name, "before")
    for name in (HUGE_PAGES, IN_A_PROCESS):
        monkeypatch.delenv(name)


def test_an_engine_on_cpu_gets_its_threads_and_shares_them_among_its_processes(
    environment: None,
) -> None:
    prepare_environment(RolloutConfig(threads=3), "apart")
    assert os.environ["OMP_NUM_THREADS"] == "before"
    prepare_environment(RolloutConfig(threads=3), "shared_memory")
    assert os.environ["OMP_NUM_THREADS"] == "3"
    cores = len(os.sched_getaffinity(0))
    prepare_environment(RolloutConfig(tensor_parallel=2), "shared_memory")
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert os.environ[IN_A_PROCESS] == "1"


@pytest.mark.parametrize("asked", [None, "0", "1"])
@pytest.mark.parametrize(("name", "default"), [(IN_A_PROCESS, "0"), (HUGE_PAGES, "1")])
def test_an_engine_on_cpu_is_a_thread_and_has_huge_pages_unless_asked_otherwise(
    environment: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    default: str,
    asked: str | None,
) -> None:
    if asked is not None:
        monkeypatch.setenv(name, asked)
    prepare_environment(RolloutConfig(), "shared_memory")
    assert os.environ[name] == (asked or default)


@pytest.mark.skipif(
    not OF_THE_SYSTEM.exists() or "[never]" in OF_THE_SYSTEM.read_text(),
    reason="this system has no huge pages",
)
def test_torch_takes_huge_pages_for_tensors_where_it_is_told_to() -> None:
    program = "import torch; x = torch.ones(2**24); print(open('/proc/self/smaps').read())"
    told = os.environ | {HUGE_PAGES: "1"}
    pages = subprocess.run(
        [sys.executable, "-c", program],
        env=told,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kib = sum(
        int(line.split()[1])
        for line in pages.splitlines()
        if line.startswith("AnonHugePages")
    )
    assert kib >= 2**11  # a page at least: the system may be short of them


def arguments_of(
    model: ModelConfig, placement: str, config: RolloutConfig | None = None
) -> AsyncEngineArgs:
    return engine_arguments(
        model,
        config or RolloutConfig(),
        placement=placement,
        max_model_tokens=99,
        seed=1,
    )


@pytest.mark.parametrize(
    ("placement", "dtype", "expected", "backend"),
    [
        ("shared_memory", "auto", "float32", "shared_memory"),
        ("apart", "auto", "bfloat16", "complete_nccl"),
        ("colocated", "float32", "float32", "complete_ipc"),
    ],
)
def test_type_and_weight_transfer_follow_the_placement(
    placement: str, dtype: str, expected: str, backend: str
) -> None:
    model = ModelConfig(path="model", dtype=dtype)
    arguments = arguments_of(model, placement, RolloutConfig(gpu_memory_utilization=0.3))
    assert (arguments.dtype, arguments.weight_transfer_config.backend) == (
        expected,
        backend,
    )
    assert arguments.enable_sleep_mode == (placement == "colocated")
    assert arguments.enforce_eager == (placement == "shared_memory")
    assert arguments.logprobs_mode == "processed_logprobs"
    assert arguments.max_model_len == 99
    assert arguments.trust_remote_code is False
    if placement != "shared_memory":
        assert arguments.gpu_memory_utilization == 0.3
        default = arguments_of(model, placement)
        assert default.gpu_memory_utilization == (0.9 if placement == "apart" else 0.5)


@pytest.mark.parametrize("nested", [False, True])
def test_an_engine_of_a_quantized_checkpoint_waits_for_plain_weights(
    tmp_path: Path, nested: bool
) -> None:
    quantized = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    config = tiny_config("qwen2").to_dict() | (
        {"text_config": quantized} if nested else quantized
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = RolloutConfig(engine={"load_format": "safetensors"})
    arguments = arguments_of(ModelConfig(path=str(tmp_path)), "apart", config)
    assert arguments.load_format == "dummy"
    read = PreTrainedConfig(**quantized)
    assert not hasattr(arguments.hf_overrides(read), "quantization_config")


STATES = [
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
]


@pytest.mark.parametrize("family", [*STATES, "qwen2", "gemma3_text"])
def test_an_engine_on_a_cpu_caches_prefixes_where_no_layer_carries_a_state(
    family: str, tmp_path: Path
) -> None:
    """With both, vLLM asks for chunked prefill."""
    config = tiny_config(family)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    on_cpu = arguments_of(model, "shared_memory")
    assert (on_cpu.enable_chunked_prefill, on_cpu.enable_prefix_caching) == (
        False,
        family not in STATES,
    )
    assert arguments_of(model, "apart").enable_prefix_caching


def config_without(field: str) -> PreTrainedConfig:
    config = tiny_config("lfm2")
    vars(config).pop(field, None)
    return config


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (lambda: config_without("conv_dim").conv_dim, "conv_dim"),
        (lambda: {}["layers.1.mlp.gate.e_score_correction_bias"], "topk_method"),
        (lambda: object().conv_dim, ""),
        (lambda: {}["layers.1.mlp.gate.weight"], ""),
    ],
)
def test_a_field_that_config_json_lacks_is_named_when_an_engine_starts(
    read: Callable[[], Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "workers.engine.vllm_interface._build_engine", lambda arguments: read()
    )
    arguments = SimpleNamespace(model="a model")
    if field:
        with refused(
            f"model.path=a model: its config.json has no {field}, which vLLM reads"
        ):
            build_engine(arguments)
        return
    with pytest.raises((AttributeError, KeyError)):
        build_engine(arguments)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("size", "installed", "placement", "engine", "expected"),
    [
        (128, True, "colocated", {}, None),
        (128, False, "colocated", {}, "triton"),
        (64, True, "apart", {}, "triton"),
        (64, True, "shared_memory", {}, None),
        (64, True, "apart", {"gdn_prefill_backend": "cutedsl"}, "cutedsl"),
        (None, False, "apart", {}, None),
    ],
)
def test_gated_delta_nets_prefill_by_a_kernel_that_takes_their_heads(
    size: int | None,
    installed: bool,
    placement: str,
    engine: dict[str, str],
    expected: str | None,
    nested: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {} if size is None else {"linear_key_head_dim": size}
    description = (
        {"model_type": "qwen3_5", "text_config": sizes}
        if nested
        else {"model_type": "qwen3_next"} | sizes
    )
    (tmp_path / "config.json").write_text(json.dumps(description))
    found = {"flashinfer": object() if installed else None}
    monkeypatch.setattr("workers.engine.vllm_interface.find_spec", found.get)
    model = ModelConfig(path=str(tmp_path))
    arguments = arguments_of(model, placement, RolloutConfig(engine=engine))
    assert arguments.gdn_prefill_backend == expected


@pytest.mark.parametrize("train_vision", [True, False])
@pytest.mark.parametrize("placement", ["colocated", "apart", "shared_memory"])
def test_an_engine_that_sleeps_needs_the_tower_in_every_update(
    placement: str, train_vision: bool
) -> None:
    model = ModelConfig(path="model", train_vision=train_vision)
    arguments = arguments_of(model, placement)
    left_out = not train_vision and placement != "colocated"
    assert arguments.additional_config[FROZEN_VISION] == left_out


@pytest.mark.parametrize("setting", ["none", "compare", "replay"])
def test_an_engine_returns_the_experts_of_each_token_where_routers_are_to_follow_them(
    setting: str,
) -> None:
    arguments = arguments_of(ModelConfig(path="model", router_replay=setting), "apart")
    assert arguments.enable_return_routed_experts == (setting != "none")
    assert arguments.enable_prefix_caching, "vLLM returns them with prefix caching only"


@pytest.mark.parametrize(
    ("weights", "settings", "expected"),
    [
        ({"mlp.down_proj": (8, 8)}, {}, None),
        ({"mlp.experts.0.w1": (8, 8)}, {}, ["q_proj"]),
        ({"mlp.experts.gate_up_proj": (2, 8, 8)}, {}, ["q_proj"]),
        (
            {"mlp.experts.0.w1": (8, 8), "mlp.norm": (8,)},
            {"target_modules": "o_proj,v_proj"},
            ["o_proj", "v_proj"],
        ),
        (
            {"mlp.experts.0.w1": (8, 8), "mlp.shared_expert_gate": (1, 8)},
            {},
            ["expert_gate", "q_proj", "shared_expert_gate"],
        ),
        (
            {"mlp.experts.0.w1": (8, 8)},
            {"target_parameters": "experts.gate_up_proj,experts.down_proj"},
            ["q_proj", "experts"],
        ),
    ],
)
def test_an_engine_with_experts_adapts_the_modules_that_are_trained(
    tmp_path: Path,
    weights: dict[str, tuple[int, ...]],
    settings: dict[str, str],
    expected: list[str] | None,
) -> None:
    common = {"self_attn.q_proj": (8, 8), "embed_tokens": (9, 8), "lm_head": (9, 8)}
    tensors = {
        f"model.{name}.weight": np.zeros(shape)
        for name, shape in (common | weights).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    lora = LoraConfig(rank=9, sync="adapters", **settings)
    arguments = adapter_arguments(ModelConfig(path=str(tmp_path), lora=lora))
    assert (
        arguments["enable_lora"],
        arguments["max_loras"],
        arguments["max_lora_rank"],
    ) == (True, 1, 16)
    assert arguments.get("lora_target_modules") == expected
    assert arguments.get("enable_mixed_moe_lora_format", False) == (
        "target_parameters" in settings
    )


def test_vllms_output_becomes_a_response() -> None:
    """Its own output class, with an array of experts as its connector makes them: uint8, without the last
    token.
    """
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    logprobs = FlatLogprobs(logprobs=[-1.0, -2.0])
    spans = [WeightVersionSpan("3", 0, 1), WeightVersionSpan("4", 1, 2)]
    read = np.array([[[0, 3]], [[1, 2]], [[255, 2]]], np.uint8)
    facts = {"routed_experts": read, "weight_versions": spans}
    stopped, aborted = (
        CompletionOutput(0, "", [7, 8], None, logprobs, finish_reason=reason, **facts)
        for reason in ("stop", "abort")
    )
    found = as_response(
        RequestOutput("a/0/1", None, [5, 6], None, [stopped], finished=True)
    )
    assert (found.ids.tolist(), found.log_probs.tolist(), found.versions.tolist()) == (
        [7, 8],
        [-1, -2],
        [3, 4],
    )
    assert found.routed_experts is not None
    assert (found.routed_experts.dtype, found.routed_experts.tolist()) == (
        np.int16,
        read.tolist(),
    )
    assert (found.finish_reason, found.read_tokens, found.cached_tokens) == ("stop", 2, 0)
    with pytest.raises(RolloutError):
        as_response(RequestOutput("a/0/1", None, [5, 6], None, [aborted], finished=True))


def test_sampling_settings_reach_vllm() -> None:
    settings = SamplingConfig(temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=11)
    parameters = sampling_parameters(settings, seed=2**63 - 1)
    found = (
        parameters.temperature,
        parameters.top_p,
        parameters.top_k,
        parameters.max_tokens,
        parameters.seed,
    )
    assert found == (0.5, 0.9, 7, 11, 2**63 - 1)
    assert parameters.logprobs == 0 and not parameters.detokenize


def test_a_prompt_that_fits_is_not_refused() -> None:
    check_prompt(np.array([0, 31], dtype=np.int32), vocab_size=32, max_model_tokens=3)


@ray.remote(num_cpus=0, max_concurrency=3)
class FailingEngine:
    """A replica on a GPU that goes wrong in the middle of an update."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.is_told = threading.Event()

    def leave_group(self) -> None:
        self.is_told.set()

    def receive_update(self, update_info: dict) -> None:
        if self.how == "refuses":
            raise RolloutError("could not load the weights: nothing for a.weight")
        if self.how == "breaks":
            raise ValueError("something")
        if self.how == "dies late":
            self.is_told.wait(1)
            os._exit(1)
        if self.how == "dies":
            os._exit(1)
        self.is_told.wait(600)  # for the one that is gone

    def leaves(self) -> bool:
        return self.is_told.wait(60)


@pytest.mark.parametrize(
    ("hows", "named", "lost"),
    [
        (("waits", "refuses"), "nothing for a.weight", set()),
        (("waits", "breaks"), "rollout replica 1", set()),
        (("waits", "dies"), "", {1}),
        # The broadcast breaks at once for the one, and Ray needs time to say that the other is dead.
        (("breaks", "dies late"), "", {1}),
    ],
)
def test_a_replica_that_fails_ends_the_update_and_one_that_dies_is_left_out(
    ray_session: None, hows: tuple[str, str], named: str, lost: set[int]
) -> None:
    """Without an abort, the broadcast would wait for ever."""
    engines = [FailingEngine.remote(how) for how in hows]
    client, aborts = EngineClient(engines, tensor_parallel=1, together=True), []
    client.abort = lambda: aborts.append(True)
    with pytest.raises(RolloutError, match=named) if named else nullcontext():
        client.update_weights({"names": ["a"]})
    assert (client.lost, isinstance(client.failure, RolloutError)) == (lost, bool(named))
    assert aborts == [True]
    assert ray.get(engines[0].leaves.remote())
    for engine in engines:
        ray.kill(engine)


class SilentEngine:
    """What `VllmEngineActor` asks of vLLM, whose process died without an answer; at the last of `looks` it is
    seen.
    """

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def errored(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    async def update_weights(self, request: object) -> None:
        await asyncio.sleep(600)


def test_an_engine_that_died_in_a_collective_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.rollout.engine_life.ALIVE_SECONDS", 0.01)
    worker = VllmEngineActor.__new__(VllmEngineActor)
    worker.index, worker._engine = 3, SilentEngine(looks=2)
    with pytest.raises(LostError, match="rollout replica 3 died"):
        asyncio.run(worker.receive_update({"names": ["a"]}))
