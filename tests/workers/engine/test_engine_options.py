"""`rollout.engine`: what is passed through to vLLM, and what is refused and why."""

import asyncio
import dataclasses
import re

import pytest
from vllm import AsyncEngineArgs

from controller.config import load
from tests.refusals import refused
from workers.config.roles import ModelConfig, RolloutConfig
from workers.engine.engine_options import ALLOWED, OWNED, REFUSED, check_engine_options
from workers.engine.kept_caches import KeptCaches
from workers.engine.vllm_interface import PREFILL_TOKENS, engine_arguments
from workers.engine.weights.update_state import Update
from workers.rollout.engine_actor import VllmEngineActor

REQUIRED = [
    "model.path=model",
    "data.train=train.jsonl",
    "reward.function=reward.py:reward",
]


def arguments(config: RolloutConfig, placement: str = "apart") -> AsyncEngineArgs:
    return engine_arguments(
        ModelConfig(path="model"), config, placement=placement, max_model_tokens=64, seed=0
    )


FIELDS = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}


def test_the_names_that_we_list_are_vllms_and_listed_once() -> None:
    assert FIELDS.keys() >= OWNED.keys() | REFUSED.keys() | ALLOWED
    assert not (OWNED.keys() & REFUSED.keys()) | (ALLOWED & (OWNED.keys() | REFUSED.keys()))


def test_an_argument_that_names_code_a_file_or_an_address_is_refused() -> None:
    """Arguments whose values are classes, modules, paths, tokens or nested configurations, which have such in
    them.
    """
    telling = re.compile(
        r"cls|class|plugin|parser|path|addr|endpoint|token$|remote|_dir|format|_config|port$|overrides"
    )
    named = {name for name in FIELDS if telling.search(name)}
    assert {
        "worker_cls",
        "worker_extension_cls",
        "scheduler_cls",
        "kv_transfer_config",
        "logging_config",
    } <= named
    for name in named - {"speculative_config", "load_format"}:
        with refused(f"rollout.engine.{name}"):
            check_engine_options({name: "x"})


def test_every_argument_that_we_give_is_ours_or_may_be_changed() -> None:
    """What follows from a setting is refused; the others are defaults of ours that `rollout.engine`
    overrides.
    """
    for placement in ("shared_memory", "colocated", "apart"):
        plain = arguments(RolloutConfig(), placement)
        given = {
            field.name
            for field in dataclasses.fields(AsyncEngineArgs)
            if getattr(plain, field.name) != getattr(AsyncEngineArgs(), field.name)
        }
        assert given <= OWNED.keys() | REFUSED.keys() | ALLOWED | {"ir_op_priority"}, given


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_prefill_on_a_gpu_is_not_left_to_a_default_of_2048_tokens(placement: str) -> None:
    assert (
        arguments(RolloutConfig(), placement).max_num_batched_tokens
        == PREFILL_TOKENS
        == 8192
    )
    many = RolloutConfig(max_concurrent=10_000)
    # vLLM wants one a request at least.
    assert arguments(many, placement).max_num_batched_tokens == 10_000
    own = RolloutConfig(engine={"max_num_batched_tokens": 16384})
    assert arguments(own, placement).max_num_batched_tokens == 16384


def test_options_go_from_the_configuration_to_vllms_arguments() -> None:
    options = [
        "rollout.engine={kv_cache_dtype: fp8, quantization: fp8}",
        "rollout.engine.enable_expert_parallel=true",
    ]
    speculative = (
        "rollout.engine.speculative_config={method: ngram, num_speculative_tokens: 4}"
    )
    config = load(None, [*REQUIRED, *options, speculative])
    found = arguments(config.rollout)
    assert (found.kv_cache_dtype, found.quantization, found.enable_expert_parallel) == (
        "fp8",
        "fp8",
        True,
    )
    assert found.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}


class PausedEngine:
    """What an update first asks of vLLM; remembers how requests were held."""

    errored = False

    def __init__(self) -> None:
        self.held: list[tuple[str, bool]] = []
        self.engine_core = self

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.held.append((mode, clear_cache))

    async def start_weight_update(self) -> None:
        pass


@pytest.mark.parametrize(
    ("setting", "cleared"),
    [
        ("recompute", [1, 1, 1, 1, 1, 0]),
        ("keep", [0, 0, 0, 0, 0, 0]),
        ("auto", [0, 0, 1, 0, 0, 0]),
    ],
)
def test_an_update_keeps_keys_and_values_where_the_configuration_says_so(
    setting: str, cleared: list[int]
) -> None:
    """Six updates, of which five find a request under way that began before the first."""
    config = load(
        None,
        [*REQUIRED, "rollout.max_staleness=2", f"rollout.kv_cache_after_update={setting}"],
    )
    worker, engine = VllmEngineActor.__new__(VllmEngineActor), PausedEngine()
    worker.index, worker.model, worker.config, worker._engine = (
        0,
        config.model,
        config.rollout,
        engine,
    )
    worker._update = Update.NONE
    caches = worker._caches = KeptCaches(config.rollout)
    with caches.request(7) as begun:
        for _ in range(5):
            asyncio.run(worker.begin_update())
            with caches.request(8 + len(engine.held)) as later:
                assert later == str(len(engine.held)) != begun
    asyncio.run(worker.begin_update())
    with caches.request(7) as continued:  # after an update while nothing ran
        assert (continued == begun) == (setting == "keep")
    assert engine.held == [("keep", bool(each)) for each in cleared]


@pytest.mark.parametrize(
    "options",
    [
        {"quantisation": "fp8"},
        {"xyz": 1},
        {"max_model_len": 9},
        {"gpu_memory_utilization": 0.9},
        {"trust_remote_code": True},
        {"enable_eplb": True},
        {"quantization": "awq"},
        {"speculative_config": {"method": "eagle3", "model": "m"}},
        {"speculative_config": {"model": "m"}},
        {"speculative_config": {"method": "ngram", "model": "x"}},
        *({"load_format": name} for name in ("dummy", "pt", "tensorizer")),
        {"worker_extension_cls": "os.system"},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_by_name(options: dict) -> None:
    with refused(f"rollout.engine.{next(iter(options))}"):
        check_engine_options(options)
    with refused(f"rollout.engine.{next(iter(options))}"):
        arguments(RolloutConfig(engine=options))


def test_a_misspelled_option_is_told_the_right_one() -> None:
    with refused("quantization"):
        check_engine_options({"quantisation": "fp8"})
