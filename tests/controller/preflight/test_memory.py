"""The memory of a described cluster's GPUs: the real engine on tensors without numbers, and what is made of
it.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from controller.config import Config, load
from controller.preflight.cluster import Cluster
from controller.preflight.describe_cluster import print_cluster
from controller.preflight.memory import (
    GIB,
    Engine,
    Memory,
    check_memory,
    fit_checkpointing,
    host_memory,
    measure,
    memory_lines,
)
from controller.preflight.page import Page
from tests.controller.config_workspace import write_model
from tests.examples.test_launch import LAUNCH
from tests.refusals import refused
from workers.config.model import ROUNDED
from workers.errors import ConfigError
from workers.model.memory.memory_trace import full_micro_batches

CONFIGURATIONS = [
    f"launch/{path.name}"
    for path in sorted(LAUNCH.glob("*.yaml"))
    if "\npolicy:" in path.read_text()
]
CONFIGURATIONS += ["gsm8k/config.yaml"]
SMALL = (
    "resources.device=cuda",
    "rollout.replicas=1",
    "policy.max_tokens_per_micro_batch=8192",
    "model.gradient_checkpointing=full",
)
SIZES = {
    "parameters": 8 * 10**9,
    "trained": 8 * 10**9,
    "layers": 32,
    "hidden": 4096,
    "kv_bytes": 2**17,
}
EIGHT = Cluster(nodes=1, cpus=64, gpus=8, gpu_gib=80)


def of_role(parameters: int = 8 * 10**9, **gib: float) -> dict[str, Any]:
    """A role that is trained, in one stage."""
    counts = {"parameters": parameters, "trained": parameters * ("update" in gib)}
    sizes = SIZES | counts | {"weight_bytes": 4 * parameters}
    return {"sizes": sizes, "stages": [{name: size * GIB for name, size in gib.items()}]}


POLICY = of_role(states=12, update=32, log_probs=20)


def eight_gpus(*overrides: str) -> Config:
    gpus = (
        "resources.device=cuda",
        "policy.data_parallel=8",
        "rollout.replicas=8",
        "model.gradient_checkpointing=full",
    )
    return load((), ("run.name=a", "model.path=a", "data.train=a", *gpus, *overrides))


def refuse(
    named: str, config: Config, cluster: Cluster = EIGHT, **roles: dict[str, Any]
) -> None:
    memory = Memory({"policy": POLICY} | roles)
    with refused(named):
        check_memory(config, memory, host_memory(config, memory, ranks=8), cluster)


def test_a_pass_has_what_the_other_roles_keep_and_generation_all_of_it() -> None:
    memory, config = (
        Memory({"policy": POLICY, "critic": of_role(states=3, update=10, values=5)}),
        eight_gpus(),
    )
    assert memory.passes == {
        "policy.update": {"policy": 12, "critic": 3, "the pass": 20},
        "policy.log_probs": {"policy": 12, "critic": 3, "the pass": 8},
        "critic.update": {"policy": 12, "critic": 3, "the pass": 7},
        "critic.values": {"policy": 12, "critic": 3, "the pass": 2},
    }
    lines = memory_lines(
        config, memory, {"model as it is read": 30.0}, replace(EIGHT, memory_gib=512)
    )
    assert (
        lines[0]
        == "policy update: policy 12.0 + critic 3.0 + the pass 20.0 = 35.0 of 72.0 usable"
    )
    assert (
        lines[4]
        == "generation: policy 12.0 + critic 3.0 + engine 40.0 = 55.0 of 72.0 usable"
    )
    assert lines[6] == "host memory of node 0: model as it is read 30.0 = 30.0 of 512"
    apart = memory_lines(eight_gpus("rollout.placement=apart"), memory, {}, EIGHT)
    assert apart[4] == "generation: engine 72.0 = 72.0 of 72.0 usable"


def test_of_the_stages_of_a_pipeline_the_fullest_counts() -> None:
    stages = [
        {"states": 5 * GIB, "update": 9 * GIB},
        {"states": 2 * GIB, "update": 10 * GIB},
    ]
    memory = Memory({"policy": POLICY | {"stages": stages}})
    assert memory.passes == {"policy.update": {"policy": 2, "the pass": 8}}
    assert memory.kept == {"policy": 5}


def test_an_engine_has_its_share_of_a_gpu_less_half_precision_weights() -> None:
    engine = Engine.of(
        eight_gpus("rollout.tensor_parallel=2"), Memory({"policy": POLICY}), 80.0
    )
    assert (engine.share, engine.weights) == (40.0, 8e9 / GIB)
    assert engine.kv_tokens == int((40 * GIB - 8e9) / 2**16)


@pytest.mark.parametrize(
    ("overrides", "requests"),
    [
        (("rollout.max_concurrent=300",), 300),
        (
            (
                "rollout.max_concurrent=300",
                "batch.prompts_per_step=320",
                "rollout.samples_per_prompt=7",
            ),
            280,
        ),
        (("rollout.max_concurrent=200",), 0),
        # So few of a step's samples.
        (("rollout.max_concurrent=300", "batch.prompts_per_step=8"), 0),
    ],
)
def test_more_requests_than_fit_into_an_engines_cache_are_said(
    overrides: tuple[str, ...], requests: int
) -> None:
    """The cache holds 205,567 tokens, 200 sequences of 1,024."""
    lengths = ("data.max_prompt_tokens=512", "rollout.sampling.max_new_tokens=512")
    many = ("batch.prompts_per_step=512", "rollout.samples_per_prompt=8")
    lines = memory_lines(
        eight_gpus(*lengths, *many, *overrides), Memory({"policy": POLICY}), {}, EIGHT
    )
    notes = [line for line in lines if line.startswith("note: ")]
    assert bool(notes) == bool(requests)
    if requests:
        assert (
            f"up to {requests} requests" in notes[0]
            and "holds 200 of the longest" in notes[0]
        )


def test_what_does_not_fit_says_what_to_change() -> None:
    tight = replace(EIGHT, gpu_gib=20.0)
    refuse("lower policy.max_tokens_per_micro_batch", eight_gpus(), tight)
    refuse(
        "model.gradient_checkpointing=auto",
        eight_gpus("model.gradient_checkpointing=none"),
        tight,
    )
    refuse(
        "policy.cpu_offload=optimizer", eight_gpus(), policy=of_role(states=60, update=75)
    )
    refuse(
        "policy.cpu_offload=all",
        eight_gpus("policy.cpu_offload=optimizer"),
        policy=of_role(states=60, update=75),
    )
    scorer = {"reward_model": of_role(states=65, scores=70)}
    refuse("reward.model.cpu_offload=true", eight_gpus(), **scorer)
    taught = eight_gpus(
        "algorithm.loss.distillation.coefficient=1", "teacher.paths={math: a, code: a}"
    )
    refuse(
        "teacher.cpu_offload=true",
        taught,
        **{"teacher math": of_role(states=65, log_probs=70)},
    )
    refuse(
        "lower teacher.forward_max",
        taught,
        **{"teacher math": of_role(states=5, log_probs=70)},
    )
    refuse(
        "rollout.gpu_memory_utilization=0.1",
        eight_gpus("rollout.gpu_memory_utilization=0.1"),
    )
    refuse("generation needs 64.0 GiB", eight_gpus("rollout.gpu_memory_utilization=0.8"))
    refuse("node 0 needs", eight_gpus(), replace(EIGHT, memory_gib=20.0))


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ((), "policy.cpu_offload=optimizer or policy.optimizer.state_dtype=int8"),
        (
            ("policy.optimizer.state_dtype=bfloat16",),
            "policy.cpu_offload=all or policy.optimizer.state_dtype=int8",
        ),
        (("policy.optimizer.state_dtype=int8",), "policy.cpu_offload=all"),
        (("policy.cpu_offload=optimizer",), "policy.cpu_offload=all"),
        (("policy.optimizer.name=muon",), "policy.optimizer.state_dtype=int8"),
        (("policy.optimizer.name=sgd",), "policy.cpu_offload=all"),
        (("model.lora.rank=8", "policy.cpu_offload=all"), "model.base_dtype=nf4"),
        (("model.lora.rank=8", "policy.cpu_offload=all", "model.base_dtype=nf4"), ""),
        (("model.lora.rank=8", "policy.cpu_offload=all", "model.lora.sync=adapters"), ""),
    ],
)
def test_settings_with_smaller_states_are_named_unless_they_are_set(
    overrides: tuple[str, ...], settings: str
) -> None:
    memory = Memory({"policy": of_role(states=60, update=75)})
    with pytest.raises(ConfigError) as refusal:
        check_memory(eight_gpus(*overrides), memory, {}, EIGHT)
    advice = str(refusal.value).partition("raise policy.data_parallel")[2]
    assert advice == (f", or set {settings}." if settings else ".")


@pytest.mark.parametrize(
    ("gpu_gib", "overrides", "expected"),
    [
        (0, (), ("none", 0)),
        (80, (), ("none", 0)),
        (60, (), ("selective", 18)),  # 54 GiB usable: 14 of 32 layers may take 1 GiB more
        (44.5, (), ("selective", 0)),  # room for less than a layer
        (30, (), ("full", 21)),
        (10, (), ("full", 0)),
        (80, ("model.activation_offload=true",), ("selective", 0)),
        (80, ("critic",), ("none", 0)),
        (60, ("critic",), ("selective", 0)),  # of another depth: all layers alike
    ],
)
def test_auto_recomputes_as_little_as_fits(
    monkeypatch: pytest.MonkeyPatch,
    gpu_gib: float,
    overrides: tuple[str, ...],
    expected: tuple[str, int],
) -> None:
    needed = {"none": 71.9, "selective": 40.0, "full": 20.0}

    def traced(config: Config, layers: tuple[int, ...]) -> Memory:
        policy = of_role(states=0, update=needed[config.model.gradient_checkpointing])
        critic = (
            {"critic": policy | {"sizes": SIZES | {"layers": 8}}}
            if "critic" in overrides
            else {}
        )
        return Memory({"policy": policy} | critic)

    monkeypatch.setattr("controller.preflight.memory._measure", traced)
    given = [each for each in overrides if "=" in each]
    fitted = fit_checkpointing(
        eight_gpus("model.gradient_checkpointing=auto", *given), gpu_gib
    )
    assert (
        fitted.model.gradient_checkpointing,
        fitted.model.recompute_num_layers,
    ) == expected
    (needs, *_) = (sum(parts.values()) for parts in measure(fitted).passes.values())
    assert needs <= 0.9 * gpu_gib or expected == ("full", 0) or not gpu_gib


@pytest.mark.parametrize(
    ("gpu_gib", "fits"),
    [(80.0, "yes (memory of a GPU: 52.0 of 72.0"), (20.0, "no (memory of a GPU")],
)
def test_the_page_of_a_cluster_says_whether_the_run_fits(
    gpu_gib: float,
    fits: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "controller.preflight.describe_cluster.measure",
        lambda config: Memory({"policy": POLICY}),
    )
    with nullcontext() if fits.startswith("yes") else refused("training needs about"):
        print_cluster(eight_gpus(), replace(EIGHT, gpu_gib=gpu_gib), Page())
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"fits: {fits}")


def test_host_memory_has_what_is_read_offloaded_and_written() -> None:
    memory = Memory(
        {"policy": POLICY, "reference": of_role(2 * 10**9, states=1, log_probs=2)}
    )
    billion = 10**9 / GIB
    read = {"model as it is read": pytest.approx(32 * billion)}
    assert host_memory(eight_gpus(), memory, ranks=8) == read | {"sleeping engines": 8.0}
    assert host_memory(
        eight_gpus("rollout.enforce_eager=true"), memory, ranks=8
    ) == read | {"sleeping engines": 2.0}
    assert host_memory(eight_gpus("rollout.placement=apart"), memory, ranks=8) == read
    offload = (
        "policy.cpu_offload=all",
        "reference.cpu_offload=true",
        "run.checkpoint_every=10",
    )
    config = eight_gpus(
        *offload, "policy.parallel.replicate=2", "model.activation_offload=true"
    )
    assert host_memory(config, memory, ranks=4) == pytest.approx(
        {
            "model as it is read": 32 * billion,
            "policy": 16 * 8 * billion,  # half of the ranks have one of two copies
            "reference": 4 * 2 * billion,
            "checkpoint": 12 * 8 * billion + 4,
            "sleeping engines": 4.0,
            "activations": 4
            * 2
            * 4096
            * 32
            * config.policy.max_tokens_per_micro_batch
            / GIB,
        }
    )
    assert (
        host_memory(eight_gpus("policy.cpu_offload=optimizer"), memory, ranks=8)["policy"]
        == 8 * 8 * billion
    )


def test_host_memory_has_offloaded_states_and_weights_in_their_types() -> None:
    """Weights of 0.53 bytes, and trained parameters with gradients of 4 and states of 4 or 2.01 bytes."""
    billion = 10**9 / GIB
    policy = of_role(states=0, update=2)
    offload = ("policy.cpu_offload=all", "run.checkpoint_every=10")
    halves = eight_gpus(*offload, "policy.optimizer.state_dtype=bfloat16")
    parts = host_memory(halves, Memory({"policy": policy}), ranks=8)
    assert parts["policy"] == pytest.approx((4 + 4 + 4) * 8 * billion)
    assert parts["checkpoint"] == pytest.approx((4 + 4) * 8 * billion + 8)
    adapters = {"trained": 10**9, "weight_bytes": int(0.53 * 8 * 10**9)}
    lora = (
        "model.lora.rank=8",
        "model.base_dtype=nf4",
        "policy.optimizer.state_dtype=int8",
    )
    memory = Memory({"policy": policy | {"sizes": policy["sizes"] | adapters}})
    parts = host_memory(eight_gpus(*offload, *lora), memory, ranks=8)
    assert parts["policy"] == pytest.approx((0.53 * 8 + 4 + 2.01) * billion)


def small(*overrides: str) -> Config:
    return load(
        Path("config.yaml"), (*SMALL, "model.path=Qwen/Qwen2.5-0.5B-Instruct", *overrides)
    )


def gib_of(
    config: Config, name: str = "policy.update", layers: tuple[int, ...] = (3, 4)
) -> float:
    memory = measure(config, layers)
    assert not memory.problem
    return sum(memory.passes[name].values())


def test_a_dry_run_measures_every_role_once(
    workspace: Path, dry_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 12 CPU seconds: only here does a dry run measure by the real engine, in its own process.

    A second cluster asks the cache. States are 4 bytes of weights a parameter, and 8 of AdamW if it is
    trained.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    write_model(workspace / "scorer", architectures=["Qwen2ForSequenceClassification"])
    roles = ["algorithm.advantage=gae", "reward.model.path=scorer", "resources.device=auto"]
    whole = dry_run(*roles, "--cluster", "nodes=1,gpus=2,gpu_gib=80,cpus=8")
    page = whole.partition("== memory, measured on a simulated GPU; GiB ==\n")[2]
    lines = [line for line in page.splitlines() if "measuring" not in line]
    passes = [
        "policy update",
        "policy log probs",
        "critic update",
        "critic values",
        "reward model scores",
    ]
    assert [line.partition(":")[0] for line in lines[1:6]] == passes
    (kept,) = (workspace / "cache").rglob("*.json")
    for role in json.loads(kept.read_text()).values():
        states = (4 * role["sizes"]["parameters"] + 8 * role["sizes"]["trained"]) / 2
        assert role["stages"][0]["states"] == pytest.approx(states, rel=0.01)
    monkeypatch.setattr(
        "controller.config.cached_process.sys", SimpleNamespace(executable="/no/python")
    )
    small = ("--cluster", "nodes=1,gpus=2,gpu_gib=0.001,cpus=8")
    assert "training needs about" in dry_run(*roles, *small, code=2)


@pytest.mark.slow  # two measurements of 15 CPU s. test_a_dry_run_measures_every_role_once has one
def test_an_update_holds_what_distillation_adds(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the vocabulary: the teacher's output layer, and rows of logits of both models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    given = (
        "resources.device=cuda",
        "teacher.path=model",
        "algorithm.loss.distillation.coefficient=1",
    )
    chosen = [
        f"algorithm.loss.distillation.over={over}" for over in ("token", "vocabulary")
    ]
    found = [
        measure(load(Path("config.yaml"), (*given, over)), layers=(4,)) for over in chosen
    ]
    assert [memory.problem for memory in found] == ["", ""]
    token, vocabulary = (memory.passes["policy.update"]["the pass"] for memory in found)
    text = json.loads((workspace / "model" / "config.json").read_text())
    layer = 2 * text["vocab_size"] * text["hidden_size"] / 2**30
    assert token < vocabulary - layer
    assert {"teacher.log_probs", "policy.update"} <= found[0].passes.keys()


def test_what_is_not_measured_says_why(dry_run: Callable[..., str]) -> None:
    unmeasured = ("resources.device=auto", "--no-measure")
    assert "Add --dry-run --cluster" in dry_run(*unmeasured, code=2)
    page = dry_run(*unmeasured, "--cluster", "nodes=1,gpus=2,gpu_gib=80,cpus=8")
    assert "\nnot measured: --no-measure\n" in page
    memory = Memory({"policy": {"sizes": SIZES, "problem": "no"}}, "policy: no")
    assert (
        memory_lines(eight_gpus(), memory, {}, EIGHT)[0]
        == "training was not measured: policy: no"
    )


def test_a_measuring_process_that_ends_is_no_refusal(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "python").write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    (workspace / "python").chmod(0o755)
    monkeypatch.setattr(
        "controller.config.cached_process.sys.executable", str(workspace / "python")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    memory = measure(load(Path("config.yaml"), ("resources.device=cuda",)))
    assert memory == Memory({}, "the measuring process ended with 1: no such module")
    assert not list(workspace.glob("cache/**/*.json"))


def test_no_two_sequences_that_are_measured_begin_alike() -> None:
    """What they share would be computed, and measured, once."""
    sequences, micro_batches = full_micro_batches(1024, 16, 32_000, 2, padded=False)
    assert [int(sequences.lengths[start:stop].sum()) for start, stop in micro_batches] == [
        1024,
        1024,
    ]
    beginnings = {
        tuple(row[:2].tolist())
        for row in sequences.tokens["input_ids"].split(sequences.lengths.tolist())
    }
    assert len(beginnings) == len(sequences) == 128


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGURATIONS)
def test_the_page_on_placement_has_the_figures_of_the_examples(
    documentation_workspace: Path, path: str
) -> None:
    page = (LAUNCH.parents[1] / "docs" / "placement.md").read_text()
    (section,) = [
        part
        for part in page.partition("| file | pass |")[2].split("| `examples/")
        if part.startswith(path)
    ]
    memory = measure(load(Path("examples", path), ("resources.device=cuda",)))
    for name, parts in memory.passes.items():
        assert (
            f"| {name.replace('_', ' ').replace('.', ' ')} | {sum(parts.values()):.1f} |"
            in section
        )


@pytest.mark.slow  # tests/workers/model/test_exactness.py has the reductions
def test_whole_gradients_are_measured_where_their_reduction_is_put_off(
    documentation_workspace: Path,
) -> None:
    """4 bytes a parameter more, less the shards; the failure that a reduction in every micro-step mends."""
    each, last = (
        gib_of(
            small(
                "policy.data_parallel=8",
                f"policy.parallel.defer_gradient_reduction={deferred}",
            )
        )
        for deferred in (False, True)
    )
    assert last - each == pytest.approx(4 * 494_032_768 / GIB * 7 / 8, rel=0.35)


@pytest.mark.slow
def test_one_gpu_frees_the_casts_of_each_layer(documentation_workspace: Path) -> None:
    """2 bytes for each parameter of the layers, less those of the layers that are in use."""
    freed, gathered = (
        gib_of(small("policy.data_parallel=1", f"policy.reshard_after_forward={reshard}"))
        for reshard in (True, False)
    )
    in_layers = 494_032_768 - 151_936 * 896
    assert gathered - freed == pytest.approx(2 * in_layers / GIB, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "at_least"),
    [
        (("policy.parallel.replicate=2",), 1.1),
        (("policy.parallel.tensor_parallel=2", "policy.data_parallel=4"), 0.3),
        (
            (
                "policy.parallel.pipeline_parallel=2",
                "policy.parallel.virtual_stages=2",
                "policy.data_parallel=4",
            ),
            0.3,
        ),
        (
            (
                "policy.parallel.context_parallel=4",
                "policy.parallel.context_parallel_method=ring",
            ),
            0.3,
        ),
        (("policy.reshard_after_forward=false",), 1.01),
        (("model.gradient_checkpointing=none",), 1.5),
        (("model.gradient_checkpointing=selective", "model.compile=never"), 1.2),
        (("model.gradient_checkpointing=selective",), 1.01),
        (("policy.max_tokens_per_micro_batch=32768",), 1.2),
    ],
    ids=lambda given: given[0].partition("=")[0] if isinstance(given, tuple) else "",
)
def test_every_layout_is_measured(
    documentation_workspace: Path, overrides: tuple[str, ...], at_least: float
) -> None:
    """at_least: times what the plain layout takes."""
    plain = gib_of(small("policy.data_parallel=8"))
    assert gib_of(small("policy.data_parallel=8", *overrides)) > at_least * plain
    assert plain > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    ["model.lora.rank=16", "policy.cpu_offload=optimizer", "policy.cpu_offload=all"],
)
def test_less_is_kept_on_a_gpu(documentation_workspace: Path, overrides: str) -> None:
    memory, plain = (
        measure(small("policy.data_parallel=4", overrides)),
        measure(small("policy.data_parallel=4")),
    )
    assert memory.kept.get("policy", 0.0) < 0.4 * plain.kept["policy"]
    assert sum(memory.passes["policy.update"].values()) < sum(
        plain.passes["policy.update"].values()
    )


@pytest.mark.slow
def test_low_bit_weights_are_counted_as_a_gpu_holds_them(
    documentation_workspace: Path,
) -> None:
    """The host's memory takes this count where weights are offloaded."""
    low_bit = (
        "model.lora.rank=16",
        "model.base_dtype=nf4",
        "policy.optimizer.state_dtype=int8",
    )
    memory = measure(small("policy.data_parallel=1", *low_bit))
    assert not memory.problem
    sizes = memory.roles["policy"]["sizes"]
    assert sizes["weight_bytes"] < 1.5 * sizes["parameters"]
    states = sizes["weight_bytes"] + 2.01 * sizes["trained"]
    assert memory.kept["policy"] == pytest.approx(states / GIB, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ROUNDED)
def test_offloaded_low_bit_weights_are_on_a_gpu_only_while_a_pass_needs_them(
    documentation_workspace: Path, base_dtype: str
) -> None:
    settings = (
        "policy.data_parallel=1",
        "model.lora.rank=16",
        f"model.base_dtype={base_dtype}",
    )
    memory = measure(small(*settings))
    offloaded = measure(small(*settings, "policy.cpu_offload=all"))
    assert not offloaded.problem
    assert offloaded.kept.get("policy", 0.0) < 0.01 * memory.kept["policy"]
    on_gpu = sum(memory.passes["policy.update"].values())
    assert 0 < sum(offloaded.passes["policy.update"].values()) < on_gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fewest", "most"), [("sgd", 7.9, 8.1), ("muon", 8.5, 9.5)]
)
def test_an_optimizer_keeps_its_own_state(
    documentation_workspace: Path, name: str, fewest: float, most: float
) -> None:
    """Bytes a parameter with the weights. Muon keeps AdamW's for the embedding, a quarter of this model."""
    policy = measure(
        small("policy.data_parallel=4", f"policy.optimizer.name={name}")
    ).roles["policy"]
    assert fewest < 4 * policy["stages"][0]["states"] / policy["sizes"]["trained"] < most


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of a mixture of experts without weights."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 8,
        "vocab_size": 32_000,
    }
    config = Qwen3MoeConfig(
        num_experts=16, num_experts_per_tok=4, num_attention_heads=16, head_dim=64, **sizes
    )
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4)])
def test_shared_experts_are_measured(
    documentation_workspace: Path, experts: Path, tensor: int, expert: int
) -> None:
    """States are divided by all ranks, whoever computes an expert."""
    shared = (
        f"policy.parallel.tensor_parallel={tensor}",
        f"policy.parallel.expert_parallel={expert}",
    )
    memory = measure(
        small(*shared, f"policy.data_parallel={4 // tensor}", f"model.path={experts}")
    )
    parameters = memory.roles["policy"]["sizes"]["parameters"]
    assert memory.kept["policy"] == pytest.approx(12 * parameters / 4 / GIB, rel=0.01)
    assert sum(memory.passes["policy.update"].values()) > memory.kept["policy"]


@pytest.mark.slow
def test_c8_the_activation_memory_that_context_parallelism_saves_is_measured(
    documentation_workspace: Path,
) -> None:
    """The same sequences on one rank, or on two of which each holds half; parameters over eight ranks in
    both.
    """
    whole, halves = (
        gib_of(
            small(
                f"policy.data_parallel={8 // size}",
                f"policy.parallel.context_parallel={size}",
                f"policy.max_tokens_per_micro_batch={32768 // size}",
            )
        )
        for size in (1, 2)
    )
    assert whole - halves > 0.5


@pytest.mark.slow
def test_degrees_by_micro_step_need_the_memory_of_the_largest(
    documentation_workspace: Path,
) -> None:
    shared = ("policy.parallel.context_parallel=2", "policy.data_parallel=4")
    fixed, chosen = (
        gib_of(small(*shared, f"policy.parallel.context_parallel_degree={degree}"))
        for degree in ("fixed", "auto")
    )
    assert chosen == pytest.approx(fixed, rel=1e-3)


@pytest.mark.slow
def test_a_few_layers_tell_of_all(documentation_workspace: Path) -> None:
    config = small("policy.data_parallel=8")
    few, every = (
        measure(config, layers).roles["policy"]["stages"] for layers in ((3, 4), (23, 24))
    )
    assert few[0] == pytest.approx(every[0], rel=0.01)
