import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.actors.layout import pools, role_requests, sum_reserved
from controller.config import Config, TrainingConfig, changed_yaml, load, load_as, training
from controller.config.conditions import effect_words
from controller.config.file import settings
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.preflight.automatic import CHOICES
from controller.preflight.cluster import parse_cluster, place, run_on
from controller.preflight.describe import describe, settings_page

SIZES_OF_32B = {
    "vocab_size": 152064,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
}


@pytest.fixture
def config(workspace: Path) -> Config:
    return load("config.yaml")


def page_of(*overrides: str) -> str:
    return describe(load("config.yaml", overrides))


def test_the_dry_run_says_what_runs_where_and_whether_it_fits(config: Config) -> None:
    page = describe(config)
    assert "max_tokens_per_micro_batch: 4096" in page
    assert "models run on CPUs; rollout.placement is shared_memory" in page
    assert "pool training: 2 x {CPU: 0.25}, strategy PACK" in page
    assert "policy: 2 actors, 0.25 CPU each, bundle 0..1 of pool training" in page
    assert "rollout: 1 actor, 0.25 CPU each, bundle 0 of pool rollout" in page
    assert "reserved in all: 1 CPUs, 0 GPUs" in page
    assert "\nfits: yes (engines: 1 on " in page
    assert "a step: 4 prompts x 8 samples = 32 sequences, at most 3,072 tokens" in page
    assert "a mini-batch: 16 sequences over 2 ranks; 2 a step" in page
    assert (
        "policy.max_tokens_per_micro_batch 4096 >= longest possible sequence 96: " in page
    )
    assert "a micro-batch has room for at least 42 such sequences" in page
    capped = page_of("policy.max_patches_per_micro_batch=5000").splitlines()
    (line,) = [
        line
        for line in capped
        if line.startswith("policy.max_tokens_per_micro_batch 4096 >=")
    ]
    assert line.endswith("Its images have at most 5,000 patches")


def test_kernels_that_a_gpu_run_lacks_for_layers_with_a_state_are_named_with_their_cost(
    workspace: Path,
) -> None:
    file = workspace / "model" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"linear_num_value_heads": 2})
    )
    note = "model.path=model: its layers with a state run without flash-linear-attention and causal-conv1d"
    assert note not in page_of()
    assert note in page_of("resources.device=cuda")


FORMULA = "memory of a GPU by a formula, not measured: "


def lines_after_fits(page: str) -> list[str]:
    lines = page.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("fits: ")]
    return [line for line in lines[start : start + 2] if line]


@pytest.mark.parametrize(
    ("overrides", "available", "verdict"),
    [
        ((), 0, "unknown, because this machine has no GPUs and the run uses 2"),
        (
            ("policy.data_parallel=12",),
            0,
            "unknown, because this machine has no GPUs and the run uses 12",
        ),
        ((), 4, "GPUs yes (2 of 4), memory not measured"),
        ((), 1, "no (GPUs: 2 of 1)"),
        (
            ("resources.ray_address=auto",),
            0,
            "unknown until the run asks Ray's cluster for 2 GPUs",
        ),
    ],
)
def test_a_dry_run_for_gpus_gives_a_verdict_or_the_way_to_one(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    available: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(training, "visible_gpus", lambda: available)
    settings_of_gpus = ("resources.device=cuda", "rollout.replicas=1", *overrides)
    fits, *memory = lines_after_fits(page_of(*settings_of_gpus))
    assert fits.startswith(f"fits: {verdict}")
    if "fits: no" in fits:
        return
    assert memory[0].startswith(FORMULA)
    (described,) = re.findall(r"--cluster (\S+),gpu=H100", fits)
    cluster, config = (
        parse_cluster(f"{described},gpu=H100"),
        load("config.yaml", settings_of_gpus),
    )
    run_on(config, cluster)
    assert place(config, cluster)


@pytest.mark.parametrize(
    ("sizes", "overrides", "verdict"),
    [
        (
            {},
            (),
            "takes 0.2 GiB, 0.0 of them between passes. It fits H100, H200, B200, A100, L40S, MI300X",
        ),
        (
            SIZES_OF_32B,
            ("policy.data_parallel=8",),
            "It fits B200, MI300X, not H100, H200, A100, L40S",
        ),
        (
            SIZES_OF_32B,
            ("policy.data_parallel=8", "model.gradient_checkpointing=auto"),
            "It fits H200, B200, MI300X, not H100, A100, L40S",
        ),
        (SIZES_OF_32B, (), "It fits no GPU that Ballast knows"),
        (SIZES_OF_32B, ("policy.cpu_offload=optimizer",), ""),
        ({"model_type": "unheard_of", "hidden_size": None}, (), ""),
    ],
)
def test_the_memory_of_a_gpu_is_estimated_where_the_formula_has_all_parts(
    workspace: Path, sizes: dict[str, object], overrides: tuple[str, ...], verdict: str
) -> None:
    description = workspace / "model" / "config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | sizes))
    lines = lines_after_fits(
        page_of("resources.device=cuda", "rollout.replicas=1", *overrides)
    )
    estimate = [line for line in lines if line.startswith(FORMULA)]
    assert estimate[0].endswith(verdict) if verdict else not estimate
    assert not estimate or ("takes at least" in estimate[0]) is (
        "model.gradient_checkpointing=auto" in overrides
    )


def test_training_without_engines_has_no_cluster_to_describe_and_an_estimate(
    workspace: Path,
) -> None:
    overrides = [
        "run.name=a",
        "model.path=model",
        "data.train=train.jsonl",
        "resources.device=cuda",
    ]
    fits, memory = lines_after_fits(describe(load_as(SftConfig, None, overrides)))
    assert fits.endswith("the run uses 1") and memory.startswith(FORMULA)


def test_the_dry_run_prints_what_differs_from_the_defaults_and_on_demand_everything(
    workspace: Path, config: Config
) -> None:
    page = describe(config)
    assert (
        "== configuration, where it differs from the defaults (--all: everything) =="
        in page
    )
    assert "learning_rate" not in page and "overlong_prompts" not in page
    everything = describe(config, everything=True)
    assert "learning_rate" in everything and "overlong_prompts" in everything
    assert len(changed_yaml(config).splitlines()) < 30
    (workspace / "changed.yaml").write_text(changed_yaml(config))
    assert load(workspace / "changed.yaml") == config
    follows = load("config.yaml", ["validation.sampling.max_new_tokens=7"])
    assert "validation:\n  sampling:\n    max_new_tokens: 7" in changed_yaml(follows)
    assert "validation:\n  sampling" not in changed_yaml(config)


def test_the_dry_run_shows_the_reference_only_where_there_is_one(workspace: Path) -> None:
    without = page_of()
    with_kl = page_of("algorithm.loss.kl_coefficient=0.1")
    assert "reference: 2 actors" in with_kl
    assert "reference.forward_max_tokens_per_micro_batch 4096 >=" in with_kl
    assert "reference: 2 actors" not in without
    assert "reference.forward_max_tokens_per_micro_batch 4096 >=" not in without


def test_the_dry_run_counts_gpus_by_placement(workspace: Path) -> None:
    gpus = (
        "resources.device=cuda",
        "policy.data_parallel=4",
        "rollout.replicas=2",
        "rollout.tensor_parallel=2",
    )
    shared = page_of(*gpus)
    assert "pool training: 4 x {CPU: 0.5, GPU: 1}, strategy PACK" in shared
    assert "reserved in all: 2.25 CPUs, 4 GPUs" in shared
    apart = page_of(*gpus, "rollout.placement=apart")
    assert "pool rollout: 2 x {CPU: 0.25, GPU: 2}" in apart
    assert "reserved in all: 1.75 CPUs, 8 GPUs" in apart


@pytest.mark.parametrize(
    "override",
    [
        "model.dtype=bfloat16",
        "rollout.sampling.top_p=0.9",
        "policy.max_tokens_per_micro_batch=100",
    ],
)
def test_the_dry_run_notes_what_is_allowed_but_costs(config: Config, override: str) -> None:
    assert "== notes ==" not in describe(config)
    assert "== notes ==" in page_of(override)


def test_the_dry_run_says_what_every_automatic_setting_chose(workspace: Path) -> None:
    lines = page_of().splitlines()
    for line in (
        "model.dtype=auto -> float32",
        "model.attention=auto -> sdpa",
        "rollout.placement=auto -> shared_memory",
        "algorithm.loss.aggregation=auto -> token_mean",
        "balance.fit_cost_model=auto -> never",
    ):
        assert line in lines
    gpus = page_of(
        "resources.device=cuda", "rollout.max_staleness=2", "rollout.placement=apart"
    ).splitlines()
    assert "model.dtype=auto -> bfloat16" in gpus
    assert "rollout.kv_cache_after_update=auto -> keep, for 2 updates" in gpus
    assert not [
        line
        for line in gpus
        if line.startswith(("rollout.placement=auto", "resources.device=auto"))
    ]


@pytest.mark.parametrize(
    "schema", [Config, SftConfig, PreferencesConfig, RewardTrainingConfig]
)
def test_every_setting_that_may_be_automatic_has_a_choice(
    schema: type[TrainingConfig],
) -> None:
    automatic = {
        each.key
        for each in settings(schema())
        if "auto" in each.range.removeprefix("one of ").split(", ")
    }
    assert automatic <= CHOICES.keys()


def test_a_cap_on_sequences_bounds_the_room_of_a_micro_batch(workspace: Path) -> None:
    assert "room for at least 3 such" in page_of("policy.max_sequences_per_micro_batch=3")


def test_every_epoch_is_counted_in_the_optimiser_steps_of_a_run(workspace: Path) -> None:
    page = page_of("run.steps=10", "batch.mini_batches=2", "batch.epochs=3")
    assert "; 2 a step, in each of 3 epochs" in page
    assert "the run: 10 steps, 60 optimiser steps" in page


def test_the_settings_page_has_every_key() -> None:
    page = settings_page()
    for setting in settings(Config()):
        assert f"\n{setting.key}  ({setting.type_name}, " in page
        assert setting.range in page
        assert effect_words(Config.conditions, setting.only_with) in " ".join(page.split())


@given(
    ranks=st.integers(1, 8),
    replicas=st.integers(1, 8),
    rewards=st.integers(1, 4),
    kl=st.sampled_from([0.0, 0.1]),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_an_actor_of_every_role_of_a_pool_fits_exactly_into_each_bundle(
    ranks: int, replicas: int, rewards: int, kl: float, device: str
) -> None:
    config = Config()
    config.policy.data_parallel, config.rollout.replicas, config.reward.workers = (
        ranks,
        replicas,
        rewards,
    )
    config.algorithm.loss.kl_coefficient, config.resources.device = kl, device
    if device == "cuda":
        # Colocated engines share the policy's GPUs.
        config.rollout.replicas = min(replicas, ranks)
    requests = role_requests(config)
    for pool in pools(config):
        for resource, attribute in (("CPU", "cpus"), ("GPU", "gpus")):
            asked = sum(getattr(r, attribute) for r in requests if r.pool == pool.name)
            assert [bundle.get(resource, 0.0) for bundle in pool.bundles] == pytest.approx(
                [asked] * len(pool.bundles)
            )
    in_pools = sum(bundle["CPU"] for pool in pools(config) for bundle in pool.bundles)
    assert in_pools + rewards * config.resources.cpus_per_worker == pytest.approx(
        sum_reserved(config, "CPU")
    )


@given(
    prompts=st.integers(1, 64), samples=st.integers(1, 16), mini_batches=st.integers(1, 64)
)
def test_mini_batch_sizes_are_those_of_an_even_split(
    prompts: int, samples: int, mini_batches: int
) -> None:
    config = Config()
    config.batch.prompts_per_step, config.batch.mini_batches = prompts, mini_batches
    config.rollout.samples_per_prompt = samples
    parts = np.array_split(np.arange(config.sequences_per_step), mini_batches)
    assert config.mini_batch_sizes == tuple(len(part) for part in parts)


def test_sizes_left_at_zero_follow_other_settings(workspace: Path) -> None:
    kl = "algorithm.loss.kl_coefficient=0.1"
    config = load("config.yaml", [kl])
    assert {limits.max_tokens for limits in config.limits.values()} == {4096}
    assert config.max_model_tokens == 96
    assert config.total_optimizer_steps == 20
    assert config.model_of("reference") == config.model
    overrides = [
        kl,
        "policy.forward_max_tokens_per_micro_batch=5000",
        "reference.forward_max_tokens_per_micro_batch=6000",
        "rollout.max_model_tokens=128",
        "policy.optimizer.total_steps=7",
        "reference.path=other",
    ]
    told = load("config.yaml", overrides)
    assert [limits.max_tokens for limits in told.limits.values()] == [4096, 5000, 6000]
    assert told.max_model_tokens == 128
    assert told.total_optimizer_steps == 7
    assert (told.model_of("reference").path, told.model_of("reference").dtype) == (
        "other",
        "auto",
    )


def test_the_dry_run_says_what_batch_invariance_chooses(workspace: Path) -> None:
    gpu = "resources.device=cuda"
    page = page_of(gpu, "model.batch_invariant=true")
    lines = page.splitlines()
    assert "model.attention=auto -> that of the engines (vLLM's Triton kernel)" in lines
    assert "model.share_prefixes=auto -> never" in lines
    assert "model.compile=auto -> never" in lines
    assert any(line.startswith("model.batch_invariant=true: ") for line in lines)
    ordinary = page_of(gpu).splitlines()
    assert "model.share_prefixes=auto -> always" in ordinary
    assert not any(line.startswith("model.batch_invariant=true: ") for line in ordinary)
