"""The names that prime-rl's recipes have now become settings, or say why there is none."""

from pathlib import Path
from typing import Any

import pytest

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import Migration, migrate

BASE = """
max_steps = 20
seq_len = 2048
[deployment]
num_train_gpus = 2
num_infer_gpus = 4
[model]
name = "m"
[orchestrator]
batch_size = 128
group_size = 8
"""


def migrated(text: str, folder: Path) -> Migration:
    path = folder / "rl.toml"
    path.write_text(text)
    return migrate(read_recipe([str(path)]))


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        (
            '[monitors.wandb]\nproject = "p"\nname = "n"',
            {"tracking.project": "p", "run.name": "n", "tracking.wandb": True},
        ),
        ("[orchestrator.concurrency]\nmax_inflight = 128", {"rollout.max_concurrent": 32}),
        (
            '[trainer.model]\nattn = "flash_attention_3"\nfused_lm_head_token_chunk_size = 1024',
            {"model.attention": "flash3", "model.logprob_chunk_tokens": 1024},
        ),
        (
            '[trainer.model]\nfused_lm_head_token_chunk_size = "disabled"\ncompile = "None"',
            {"model.logprob_chunk_tokens": 0, "model.compile": "never"},
        ),
        (
            "[trainer.model.ac_offloading]\nmax_inflight_activations = 5",
            {"model.activation_offload": True},
        ),
        ("[trainer.model]\nfull_offload = true", {"policy.cpu_offload": "all"}),
        ("[trainer.model]\noptim_cpu_offload = true", {"policy.cpu_offload": "optimizer"}),
        (
            "[inference.vllm]\nenable_expert_parallel = true\nquantization = 'fp8'",
            {"rollout.engine": {"enable_expert_parallel": True, "quantization": "fp8"}},
        ),
        ("[trainer]\nenable_router_replay = true", {"model.router_replay": "replay"}),
    ],
)
def test_names_of_prime_rl_become_settings(
    section: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    migration = migrated(f"{BASE}{section}", tmp_path)
    assert not migration.unknown
    assert {key: migration.settings.get(key) for key in wanted} == wanted


def test_validation_samples_as_the_source_says(tmp_path: Path) -> None:
    section = """
[orchestrator.eval]
interval = 5
[orchestrator.eval.sampling]
max_completion_tokens = 64
temperature = 0.5
[[orchestrator.eval.source]]
name = "reverse-text"
[orchestrator.eval.source.env.taskset]
id = "reverse-text"
"""
    settings = migrated(f"{BASE}{section}", tmp_path).settings
    assert settings["validation.sampling.max_new_tokens"] == 64
    assert settings["validation.sampling.temperature"] == 0.5


@pytest.mark.parametrize(
    "section",
    [
        "[orchestrator.algo.length_penalty]\ntype = 'linear'\nnum_turns_weight = 0.1",
        "[slurm]\njob_name = 'j'\npartition = 'all'",
        "[trainer]\ndist_timeout_seconds = 1800",
        "[trainer.ckpt]\nskip_optimizer = true",
        "[inference.vllm]\ntool_call_parser = 'hermes'",
        "[inference.deployment]\ntype = 'disaggregated'\nprefill_nodes_per_replica = 2",
        "[env_vars]\nTRITON_CACHE_DIR = '/tmp/t'",
        "[model.vlm]\nvision_encoder_attr = 'model.visual'",
        "[resume]\nstep = 5",
        "[log]\nlevel = 'debug'",
    ],
)
def test_a_key_without_a_counterpart_is_named_with_the_reason(
    section: str, tmp_path: Path
) -> None:
    before = migrated(BASE, tmp_path)
    migration = migrated(f"{BASE}{section}", tmp_path)
    assert not migration.unknown
    assert len(migration.without) > len(before.without)
    assert migration.settings == before.settings


def test_a_launchers_module_is_not_a_key_of_openrlhf(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(
        "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n"
        "   --data.max_len 2048 --data.dataset d --train.batch_size 256 --model.model_name_or_path m\nEOF\n"
        "deepspeed --module $training_commands\n"
    )
    migration = migrate(read_recipe([str(script)]))
    assert migration.unknown == []
    assert migration.settings["batch.sequences_per_step"] == 256
