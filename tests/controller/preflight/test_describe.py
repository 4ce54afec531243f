from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.actors.layout import pools, reserved, role_requests
from controller.config import Config, TrainingConfig, changed_yaml, load
from controller.config.conditions import effect_words
from controller.config.file import settings
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.preflight.automatic import CHOICES
from controller.preflight.describe import describe, settings_page


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
    assert "\nfits: no (GPUs: 2 of 0)" in page_of("resources.device=cuda")
    assert "a step: 4 prompts x 8 samples = 32 sequences, at most 3,072 tokens" in page
    assert "a mini-batch: 16 sequences over 2 ranks; 2 a step" in page
    assert "policy.max_tokens_per_micro_batch 4096 >= longest possible sequence 96: " in page
    assert "a micro-batch has room for at least 42 such sequences" in page
    capped = page_of("policy.max_patches_per_micro_batch=5000").splitlines()
    (line,) = [line for line in capped if line.startswith("policy.max_tokens_per_micro_batch 4096 >=")]
    assert line.endswith("Its images have at most 5,000 patches")


def test_the_dry_run_prints_what_differs_from_the_defaults_and_on_demand_everything(
    workspace: Path, config: Config
) -> None:
    page = describe(config)
    assert "== configuration, where it differs from the defaults (--all: everything) ==" in page
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
    gpus = ("resources.device=cuda", "policy.data_parallel=4", "rollout.replicas=2", "rollout.tensor_parallel=2")
    shared = page_of(*gpus)
    assert "pool training: 4 x {CPU: 0.5, GPU: 1}, strategy PACK" in shared
    assert "reserved in all: 2.25 CPUs, 4 GPUs" in shared
    apart = page_of(*gpus, "rollout.placement=apart")
    assert "pool rollout: 2 x {CPU: 0.25, GPU: 2}" in apart
    assert "reserved in all: 1.75 CPUs, 8 GPUs" in apart


@pytest.mark.parametrize(
    "override", ["model.dtype=bfloat16", "rollout.sampling.top_p=0.9", "policy.max_tokens_per_micro_batch=100"]
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
    gpus = page_of("resources.device=cuda", "rollout.max_staleness=2", "rollout.placement=apart").splitlines()
    assert "model.dtype=auto -> bfloat16" in gpus
    assert "rollout.kv_cache_after_update=auto -> keep, for 2 updates" in gpus
    assert not [line for line in gpus if line.startswith(("rollout.placement=auto", "resources.device=auto"))]


@pytest.mark.parametrize("schema", [Config, SftConfig, PreferencesConfig, RewardTrainingConfig])
def test_every_setting_that_may_be_automatic_has_a_choice(schema: type[TrainingConfig]) -> None:
    automatic = {each.key for each in settings(schema()) if "auto" in each.range.removeprefix("one of ").split(", ")}
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
        assert f"\n{setting.key}  ({setting.type.__name__}, " in page
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
    config.policy.data_parallel, config.rollout.replicas, config.reward.workers = ranks, replicas, rewards
    config.algorithm.loss.kl_coefficient, config.resources.device = kl, device
    if device == "cuda":
        config.rollout.replicas = min(replicas, ranks)  # colocated engines share the policy's GPUs
    requests = role_requests(config)
    for pool in pools(config):
        for resource, attribute in (("CPU", "cpus"), ("GPU", "gpus")):
            asked = sum(getattr(r, attribute) for r in requests if r.pool == pool.name)
            assert [bundle.get(resource, 0.0) for bundle in pool.bundles] == pytest.approx([asked] * len(pool.bundles))
    in_pools = sum(bundle["CPU"] for pool in pools(config) for bundle in pool.bundles)
    assert in_pools + rewards * config.resources.cpus_per_worker == pytest.approx(reserved(config, "CPU"))


@given(prompts=st.integers(1, 64), samples=st.integers(1, 16), mini_batches=st.integers(1, 64))
def test_mini_batch_sizes_are_those_of_an_even_split(prompts: int, samples: int, mini_batches: int) -> None:
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
    assert config.reference_model == config.model
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
    assert (told.reference_model.path, told.reference_model.dtype) == ("other", "auto")
