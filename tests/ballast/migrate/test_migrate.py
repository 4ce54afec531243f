"""Another system's configuration becomes settings that pass the checks; nothing of it disappears
in silence.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ballast.commands import main
from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import KNOWN, ROWS, migrate
from controller.config import load
from controller.config.aliases import answer, counterparts
from controller.preflight.checks import check_settings

SCRIPT = r"""
#!/usr/bin/env bash
# it isn't run
set -xeuo pipefail
NNODES=${NNODES:-2}
prompts=64; mini=16
longest=$((1024 * (2 + 1)))
HOME_OF_DATA=${DATA:-"${HOME}/data"}
save_contents="['model', 'optimizer']"
ray job submit --working-dir "${PWD}" -- python3 -m recipe.dapo.main_dapo --config-name='ppo_trainer.yaml' \
    data.train_files="['${HOME_OF_DATA}/a.parquet', '${HOME_OF_DATA}/b.parquet']" \
    data.val_files="${HOME_OF_DATA}/c.parquet" data.truncation='left' \
    data.train_batch_size=${prompts} data.max_prompt_length=1024 data.max_response_length=$((longest - 1024)) \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((longest) * 2)) \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.fsdp_config.fsdp_size=8 \
    actor_rollout_ref.actor.checkpoint.save_contents="${save_contents}" \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.max_num_batched_tokens=4096 \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.5 \
    algorithm.filter_groups.enable=True reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \
    trainer.logger='["console","wandb"]' trainer.project_name=mine trainer.experiment_name="$(basename x)" \
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" trainer.resume_mode=disable trainer.total_training_steps=200 \
    trainer.made_up=3 trainer.total_epochs=10 $@
"""
TRL = """
args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=16, gradient_accumulation_steps=2,
                  steps_per_generation=4, max_steps=200, warmup_ratio=0.1, loss_type="dr_grpo", scale_rewards=False,
                  max_completion_length=256, epsilon=0.1, epsilon_high=0.28, report_to=["wandb"], seed=pick())
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=args, reward_funcs=[score], train_dataset=load())
"""


def settings_of(text: str) -> dict[str, Any]:
    """The settings of a printed YAML, which pass the checks that need no files."""
    path = Path("made.yaml")
    path.write_text(text)
    check_settings(load(path))
    found = OmegaConf.create(text)
    return {
        key: OmegaConf.select(found, key)
        for key in KNOWN
        if OmegaConf.select(found, key) is not None
    }


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tools.py").write_text("")  # the placeholders of episodes
    Path("environment.py").write_text("class Environment: ...\n")
    monkeypatch.setenv("HOME", "/home/me")


def test_a_verl_script_becomes_settings_with_the_same_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run.sh").write_text(SCRIPT)
    assert main(["migrate", "run.sh"]) == 0
    told = capsys.readouterr()
    found = settings_of(told.out)
    wanted = {
        "data.sources": {"/home/me/data/a.parquet": 1.0, "/home/me/data/b.parquet": 1.0},
        "data.validation": "/home/me/data/c.parquet",
        "data.overlong_prompts": "truncate",
        "rollout.sampling.max_new_tokens": 2048,
        "batch.mini_batches": 4,
        "policy.max_tokens_per_micro_batch": 6144,
        "policy.data_parallel": 8,
        "policy.parallel.context_parallel": 2,
        "policy.parallel.replicate": 2,
        "rollout.replicas": 0,
        "rollout.engine": {"max_num_batched_tokens": 4096},
        "algorithm.loss.kl_coefficient": 0.001,
        "algorithm.loss.kl_estimator": "k3",
        "algorithm.loss.aggregation": "token_mean",
        "algorithm.loss.dual_clip": 3.0,
        "algorithm.zero_variance_groups": "replace",
        "algorithm.kl_in_reward.coefficient": 0.0,
        "policy.optimizer.weight_decay": 0.01,
        "policy.optimizer.beta2": 0.999,
        "reward.overlong_tokens": 512,
        "reference.cpu_offload": True,
        "tracking.wandb": True,
        "run.resume": "never",
        "run.steps": 200,
    }
    assert {key: found.get(key) for key in wanted} == wanted
    comments = [line for line in told.out.splitlines() if line.startswith("#   ")]
    for there, listed in (
        ("algorithm.loss.dual_clip: 3.0", 1),  # a default
        ("max_position_embeddings=32768", 1),  # no counterpart
        ("trainer.made_up=3", 1),  # unknown
        ("experiment_name=$(basename x)", 1),  # only a shell knows it
        ("reward manager dapo", 1),
        ("run.resume", 0),  # was given
    ):
        assert sum(there in line for line in comments) == listed, (there, comments)


@pytest.mark.parametrize("kind", ["py", "yaml", "json", "command"])
def test_trl_arguments_become_settings_in_every_form(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(TRL)
    values = {
        key: value
        for key, value in read_recipe(["train.py"]).items()
        if "$" not in str(value)
    }
    words = [
        f"--{key}={json.dumps(value)}" if not isinstance(value, str) else f"--{key}={value}"
        for key, value in values.items()
    ]
    Path("train.json").write_text(json.dumps(values))
    Path("train.yaml").write_text(OmegaConf.to_yaml(values))
    source = f"trl grpo {shlex.join(words)}" if kind == "command" else f"train.{kind}"
    assert main(["migrate", source, "--output", "ours.yaml"]) == 0
    text = Path("ours.yaml").read_text()
    found = settings_of(text)
    wanted = {
        "model.path": "Qwen/Qwen3-0.6B",
        "batch.prompts_per_step": 16,  # 16 x 4 completions in groups of 4
        "batch.mini_batches": 2,
        "run.steps": 100,
        "policy.optimizer.warmup_ratio": 0.1,
        "algorithm.loss.aggregation": "sequence_mean_token_sum_norm",
        "algorithm.loss.constant_length": 256,
        "algorithm.loss.clip_low": 0.1,
        "algorithm.loss.clip_high": 0.28,
        "algorithm.normalize_by_std": False,
        "tracking.wandb": True,
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert ("seed=${pick()}: a value that only its own program knows" in text) == (
        kind == "py"
    )


def test_every_key_that_is_given_is_in_the_settings_or_in_a_list() -> None:
    """All rows of the table at once, each with a value that is right there, and one that nobody takes."""
    for system in dict.fromkeys(row.system for row in ROWS if row.here):
        rows = [
            row
            for row in counterparts()
            if row.system == system and row.is_of(KNOWN) and "*" not in row.key
        ]
        found = migrate(
            {row.key: next(iter(row.values), {"nobody": "takes this"}) for row in rows}
        )
        assert not found.unknown, found.unknown
        check_settings(
            load(
                None,
                [f"{key}={json.dumps(value)}" for key, value in found.settings.items()],
            )
        )


@pytest.mark.parametrize(
    "recipe",
    [
        {
            "data.apply_chat_template_kwargs.enable_thinking": False,
            "actor_rollout_ref.model.path": "x",
        },
        {"chat_template_kwargs": {"enable_thinking": False}, "num_generations": 8},
        {"chat_template_kwargs.enable_thinking": False, "num_generations": 8},
    ],
)
def test_arguments_of_chat_templates_keep_their_names(recipe: dict[str, Any]) -> None:
    assert migrate(recipe).settings["data.chat_template_arguments"] == {
        "enable_thinking": False
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.sh", "nowhere.sh cannot be read: "),
        ("echo 'no", "a quote is not closed"),
        ("nothing.sh", "nothing.sh: no key of a configuration found"),
        ("strange.key=1 other.key=2", "strange.key, other.key: not keys of a known system"),
        ("bad.yaml", "bad.yaml cannot be read: "),
        ("bad.py", "bad.py cannot be read: "),
        ("deep.json", "deep.json cannot be read: it is nested more than"),
        ("number.json", "number.json: no key of a configuration found"),
        ("loop.yaml", "loop.yaml cannot be read: Too many levels of symbolic links"),
        ("a\n\x1b[31m.sh", r"a\n\x1b[31m.sh"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    source: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("nothing.sh").write_text("echo hello\n")
    Path("bad.yaml").write_text("a: [1\n")
    Path("bad.py").write_text("GRPOConfig(\n")
    Path("deep.json").write_text("[" * 100_000 + "]" * 100_000)
    Path("number.json").write_text("7")
    Path("loop.yaml").symlink_to("loop.yaml")
    assert main(["migrate", source]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


# Keys of verl's trainers that had no answer before this table had them: one of every section.
VERL = """
actor.checkpoint.save_contents actor.entropy_checkpointing actor.fsdp_config.forward_prefetch actor.fsdp_config.dtype
actor.fsdp_config.use_orig_params actor.fsdp_config.wrap_policy.min_num_params actor.freeze_vision_tower actor.tau_pos
actor.fsdp_config.offload_policy actor.loss_scale_factor actor.megatron.grad_offload actor.megatron.use_mbridge
actor.optim.clip_grad actor.optim.lr_warmup_steps_ratio actor.optim.min_lr actor.optim.num_cycles actor.optim.optimizer
actor.policy_loss.clip_cov_ratio actor.policy_loss.ppo_kl_coef actor.profiler.enable actor.router_replay.mode
actor.use_fused_kernels actor.use_torch_compile model.custom_chat_template model.exclude_modules model.external_lib
model.lora.rank model.lora_adapter_path model.mtp.enable model.override_config.dropout model.tokenizer_path
model.tiled_mlp.enabled model.use_liger ref.megatron.tensor_model_parallel_size ref.ulysses_sequence_parallel_size
rollout.agent.num_workers rollout.calculate_log_probs rollout.checkpoint_engine.backend rollout.data_parallel_size
rollout.disable_log_stats rollout.do_sample rollout.dtype rollout.enable_chunked_prefill rollout.enable_prefix_caching
rollout.enable_rollout_routing_replay rollout.engine_kwargs.sglang.x rollout.expert_parallel_size
rollout.free_cache_engine rollout.ignore_eos rollout.layered_summon rollout.load_format rollout.multi_turn.format
rollout.over_sample_rate rollout.prometheus.enable rollout.prompt_length rollout.quantization rollout.skip_rollout
rollout.trace.backend
"""


def test_keys_of_verl_are_answered() -> None:
    keys = [f"actor_rollout_ref.{key}" for key in VERL.split()]
    assert [key for key in keys if not answer(key, KNOWN)] == []


PRIME = """
max_steps = 200
[model]
name = "some/model"
[orchestrator]
group_size = 8
[[orchestrator.train.source]]
env.taskset = {id = "wordle", split = "a b"}
env.player.harness.id = "null"
[[orchestrator.train.source]]
env.taskset.id = "other"
[orchestrator.train.sampling]
max_completion_tokens = 64
"""
WORDLE = "verifiers:wordle?taskset.split=a+b&player.harness.id=null"
EVAL = "vf-eval --env.taskset.id wordle --env.agent.harness.id null --select.limit 9 --model some/model"
SKYRL = """main generator.n_samples_per_prompt=3 generator.max_turns=4 environment.env_class=mine
    data.train_data="['a.parquet']" generator.sampling_params.top_k=-1 generator.step_wise_trajectories=true
    trainer.policy.model.path=some/model"""
AREAL = """rollout.agent.mode=online rollout.agent.session_timeout_seconds=60
    rollout.agent.turn_discount=0.9 gconfig.n_samples=4 actor.path=some/model train_dataset.path=a.parquet"""
MILES = """--hf-checkpoint some/model --custom-agent-function-path mine.run --use-session-server v2 --tito-model qwen3
    --max-seq-len 4096 --n-samples-per-prompt 4"""
GYM = """env.should_use_nemo_gym=true env.nemo_gym.config_paths="['a.yaml']" grpo.num_generations_per_prompt=4
    policy.model_name=some/model"""


@pytest.mark.parametrize(
    ("source", "wanted", "told"),
    [
        (
            "rl.toml",
            {"rollout.environment": WORDLE, "data.train": WORDLE, "run.steps": 200},
            ["other"],
        ),
        (
            EVAL,
            {
                "rollout.environment": "verifiers:wordle?agent.harness.id=null&select.limit=9"
            },
            [],
        ),
        (
            SKYRL,
            {"data.train": "a.parquet", "rollout.samples_per_prompt": 3},
            ["env_class", "step_wise_trajectories"],
        ),
        (
            SKYRL.replace("=mine", "=openenv"),
            {"data.train": "a.parquet"},
            ["rollout.environment=openenv:URL"],
        ),
        (
            f"{SKYRL} harbor_trial_config.trials_dir=a",
            {},
            ["rollout.environment=harbor:FOLDER"],
        ),
        (
            AREAL,
            {"rollout.agent": "http", "rollout.samples_per_prompt": 4},
            ["turn_discount"],
        ),
        (
            MILES,
            {"rollout.samples_per_prompt": 4},
            ["custom-agent-function-path", "use-session-server", "tito-model"],
        ),
        (GYM, {"rollout.samples_per_prompt": 4}, ["should_use_nemo_gym", "config_paths"]),
    ],
)
def test_agents_and_environments_of_other_systems_have_their_place(
    source: str,
    wanted: dict[str, Any],
    told: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BALLAST_GATEWAY_KEY", "a" * 64)
    Path("rl.toml").write_text(PRIME)
    assert main(["migrate", source]) == 0
    text = capsys.readouterr().out
    found = settings_of(text)
    assert {key: found.get(key) for key in wanted} == wanted and found[
        "model.path"
    ] == "some/model"
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert all(any(key in line for line in comments) for key in told), comments
