"""Sizes in sequences, lists, and systems with similar keys keep their meaning."""

from pathlib import Path
from typing import Any

import pytest

from ballast.commands import main
from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import migrate
from workers.errors import ConfigError

SLIME = "--hf-checkpoint m --rollout-batch-size 32 --n-samples-per-prompt 8 --colocate ${ARGS[@]} --global-batch-size"
NEMO = "grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=16 policy.train_global_batch_size"
OPENRLHF = (
    "--pretrain m --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size"
)
DOTTED = "--actor.model_name_or_path m --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size"
SKYRL = "trainer.policy.model.path=m generator.n_samples_per_prompt=5 trainer.train_batch_size=1024"
LORA = (
    "trl grpo --num_generations 4 --use_peft --lora_r 8 --lora_target_modules q_proj v_proj"
)
VERL = "actor_rollout_ref.model.path=m data.train_batch_size=64"
OPTIM = "actor_rollout_ref.actor.optim"
OFFLOAD = "actor_rollout_ref.actor.fsdp_config."
ROLL = """
rollout_batch_size: 64
prompt_length: 2048
response_length: 4096
num_return_sequences_in_group: 8
learning_rate_of_nothing: ${oc.env:NOT_SET_HERE}
actor_train:
  training_args: {learning_rate: 2.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 32}
"""
PEFT = (
    "GRPOConfig(num_generations=4)\nLoraConfig(r=16, target_modules=['q_proj', 'v_proj'])\n"
)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (f"{SLIME} 256", {"batch.prompts_per_step": 32, "batch.mini_batches": 1}),
        (
            f"{SLIME} 64 --lr 2e-6",
            {"batch.mini_batches": 4, "policy.optimizer.learning_rate": 2e-6},
        ),
        (f"{NEMO}=512", {"batch.mini_batches": 1, "batch.prompts_per_step": 32}),
        (f"{NEMO}=128", {"batch.mini_batches": 4}),
        (
            f"{NEMO}=512 policy.optimizer.kwargs.lr=5e-6 policy.generation.max_new_tokens=256 "
            "loss_fn.token_level_loss=true",
            {
                "policy.optimizer.learning_rate": 5e-6,
                "rollout.sampling.max_new_tokens": 256,
                "algorithm.loss.aggregation": "token_mean",
            },
        ),
        (f"{OPENRLHF} 1024", {"batch.mini_batches": 1}),
        (f"{OPENRLHF} 256", {"batch.mini_batches": 4}),
        (
            f"{DOTTED} 1024 --actor.adam.lr 5e-7",
            {"batch.mini_batches": 1, "policy.optimizer.learning_rate": 5e-7},
        ),
        (f"{SKYRL} trainer.policy_mini_batch_size=256", {"batch.mini_batches": 4}),
        (LORA, {"model.lora.rank": 8, "model.lora.target_modules": "q_proj,v_proj"}),
        (
            "trl grpo --num_generations 4 --vllm_mode server",
            {"rollout.placement": "apart", "rollout.replicas": 1},
        ),
        (
            f"{VERL} {OFFLOAD}param_offload=True {OFFLOAD}optimizer_offload=True",
            {"policy.cpu_offload": "all"},
        ),
        (
            f"{VERL} {OFFLOAD}optimizer_offload=True {OFFLOAD}param_offload=True",
            {"policy.cpu_offload": "all"},
        ),
        *(
            (
                f"trl grpo --num_generations 4 --optim {name}",
                {"policy.optimizer.state_dtype": "int8"},
            )
            for name in (
                "adamw_8bit",
                "adamw_bnb_8bit",
                "adamw_torch_8bit",
                "paged_adamw_8bit",
            )
        ),
        (
            f"{VERL} {OPTIM}.optimizer=AdamW8bit {OPTIM}.optimizer_impl=torchao.optim "
            "critic.optim.optimizer=AdamW8bit critic.optim.optimizer_impl=bitsandbytes.optim "
            "algorithm.adv_estimator=gae",
            {
                "policy.optimizer.state_dtype": "int8",
                "critic.optimizer.state_dtype": "int8",
            },
        ),
    ],
)
def test_sizes_and_lists_of_commands_keep_their_meaning(
    source: str, wanted: dict[str, Any]
) -> None:
    settings = migrate(read_recipe([source])).settings
    assert {key: settings.get(key) for key in wanted} == wanted


def test_sizes_in_samples_become_prompts_of_prime_rl() -> None:
    migration = migrate({"orchestrator.batch_size": 128, "orchestrator.group_size": 16})
    assert migration.settings["batch.prompts_per_step"] == 8


def test_a_size_without_its_other_factor_is_to_decide() -> None:
    migration = migrate(
        {"n-samples-per-prompt": 8, "global-batch-size": 256, "hf-checkpoint": "m"}
    )
    assert "batch.mini_batches" not in migration.settings
    assert any(
        "global-batch-size=256" in line and "rollout-batch-size" in line
        for line in migration.open
    )


REWARDS_IN_PYTHON = """
from mine.rewards import length
def exact(completions, answer): return [1.0] * len(completions)
def search(query: str) -> str: return query
args = GRPOConfig(num_generations=4{weights})
GRPOTrainer(model="m", args=args, reward_funcs={functions}, tools=[search])
"""


@pytest.mark.parametrize(
    ("functions", "weights", "wanted"),
    [
        ("exact", "", {"reward.function": "train.py:exact"}),
        (
            "[exact]",
            ", reward_weights=[0.5]",
            {"reward.functions": {"train.py:exact": 0.5}},
        ),
        (
            "[exact, length]",
            "",
            {"reward.functions": {"train.py:exact": 1.0, "mine.rewards:length": 1.0}},
        ),
        (
            "[exact, length]",
            ", reward_weights=[1.0, 0.2]",
            {"reward.functions": {"train.py:exact": 1.0, "mine.rewards:length": 0.2}},
        ),
        ("'some/reward-model'", "", {"reward.model.path": "some/reward-model"}),
        (
            "[length, 'some/reward-model']",
            "",
            {
                "reward.function": "mine.rewards:length",
                "reward.model.path": "some/reward-model",
            },
        ),
        ("[exact, length]", ", reward_weights=[1.0]", {}),
        ("[exact, lambda completions: 1.0]", "", {}),
    ],
)
def test_reward_functions_of_trl_keep_their_weights(
    functions: str,
    weights: str,
    wanted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        REWARDS_IN_PYTHON.format(functions=functions, weights=weights)
    )
    migration = migrate(read_recipe(["train.py"]))
    rewards = {
        key: value for key, value in migration.settings.items() if key.startswith("reward.")
    }
    assert rewards == (wanted or {"reward.function": "reward.py:reward"})
    assert (
        any(line.startswith("reward.function") for line in migration.open)
        or "reward.model.path" in wanted
    )
    assert any(
        line.startswith("rollout.tools: ") and "search" in line for line in migration.open
    )


def test_reward_functions_of_a_command_are_modules() -> None:
    source = "trl grpo --num_generations 4 --reward_funcs accuracy_reward my.lib.brief --reward_weights 1.0 0.25"
    migration = migrate(read_recipe([source]))
    assert migration.settings["reward.functions"] == {
        "trl.rewards:accuracy_reward": 1.0,
        "my.lib:brief": 0.25,
    }
    assert any("workers.reward_functions:math" in line for line in migration.open)


OPENRLHF_OFFLINE = (
    "--train.batch_size 256 --adam.lr 5e-7 --data.max_len 8192 --model.model_name_or_path m"
)


@pytest.mark.parametrize(
    ("source", "module", "wanted"),
    [
        (
            "trl sft --model_name_or_path m --learning_rate 2e-4 --per_device_train_batch_size 4 "
            "--gradient_accumulation_steps 8 --max_length 4096 --num_train_epochs 2 --use_peft --lora_r 16 "
            "--packing",
            "controller.sft",
            {
                "policy.optimizer.learning_rate": 2e-4,
                "batch.sequences_per_step": 32,
                "data.max_tokens": 4096,
                "run.epochs": 2,
                "model.lora.rank": 16,
            },
        ),
        (
            "trl dpo --model_name_or_path m --beta 0.2 --loss_type ipo --learning_rate 5e-7",
            "controller.preferences",
            {
                "policy.optimizer.learning_rate": 5e-7,
                "batch.pairs_per_step": 8,
                "loss.beta": 0.2,
                "loss.name": "ipo",
            },
        ),
        (
            "trl reward --model_name_or_path m --center_rewards_coefficient 0.01",
            "controller.reward_model",
            {
                "policy.optimizer.learning_rate": 1e-4,
                "loss.center_rewards_coefficient": 0.01,
                "data.max_tokens": 1024,
            },
        ),
        (
            "torchrun -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 optim.lr=1e-4 "
            "data.max_length=512 model.partial_pretrain=m model.lora_rank=32 trainer.total_epochs=3",
            "controller.sft",
            {
                "batch.sequences_per_step": 64,
                "policy.optimizer.learning_rate": 1e-4,
                "data.max_tokens": 512,
                "model.lora.rank": 32,
                "run.epochs": 3,
            },
        ),
        (
            f"openrlhf.cli.train_sft {OPENRLHF_OFFLINE} --data.output_key answer",
            "controller.sft",
            {
                "batch.sequences_per_step": 256,
                "data.max_tokens": 8192,
                "run.epochs": 2,
                "data.response_key": "answer",
            },
        ),
        (
            f"openrlhf.cli.train_dpo {OPENRLHF_OFFLINE} --model.beta 0.3",
            "controller.preferences",
            {
                "batch.pairs_per_step": 256,
                "loss.beta": 0.3,
                "policy.optimizer.learning_rate": 5e-7,
            },
        ),
        (
            "openrlhf.cli.train_rm --pretrain m --train_batch_size 64 --learning_rate 9e-6 --max_len 2048",
            "controller.reward_model",
            {
                "batch.records_per_step": 64,
                "data.max_tokens": 2048,
                "policy.optimizer.learning_rate": 9e-6,
            },
        ),
    ],
)
def test_recipes_for_given_sequences_become_their_own_command(
    source: str, module: str, wanted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    migration = migrate(read_recipe([source]))
    assert migration.command.module == module
    assert {key: migration.settings.get(key) for key in wanted} == wanted
    assert main(["migrate", source]) == 0
    comments = capsys.readouterr().out
    assert module in comments and f"# Recognised by {migration.evidence}." in comments


@pytest.mark.parametrize(
    ("name", "text", "module"),
    [
        ("a.py", "SFTTrainer(model='m', args=SFTConfig(max_length=512))", "controller.sft"),
        ("a.py", "DPOTrainer('m', args=DPOConfig(beta=0.1))", "controller.preferences"),
        (
            "a.py",
            "RewardTrainer(model='m', args=RewardConfig(learning_rate=1e-5))",
            "controller.reward_model",
        ),
        (
            "a.py",
            "GRPOTrainer(model='m', args=GRPOConfig(num_generations=4))",
            "controller.fit",
        ),
        (
            "a.yaml",
            "model_name_or_path: m\npacking: true\nlearning_rate: 2.0e-5",
            "controller.sft",
        ),
        (
            "a.yaml",
            "model_name_or_path: m\nloss_type: sigmoid\nbeta: 0.1",
            "controller.preferences",
        ),
        (
            "a.yaml",
            "model_name_or_path: m\nnum_generations: 8\nbeta: 0.1",
            "controller.fit",
        ),
    ],
)
def test_files_are_for_the_command_that_their_names_tell(
    tmp_path: Path, name: str, text: str, module: str
) -> None:
    (tmp_path / name).write_text(text)
    assert migrate(read_recipe([str(tmp_path / name)])).command.module == module


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        (
            {"distillation.num_prompts_per_step": 60, "policy.model_name": "m"},
            "controller.fit",
        ),
        ({"ppo.num_prompts_per_step": 60, "policy.model_name": "m"}, "controller.fit"),
        ({"student_pretrain": "m", "teacher_pretrain": "n"}, "controller.fit"),
        ({"data.chosen_key": "chosen", "adam.lr": 1e-6}, "controller.reward_model"),
    ],
)
def test_a_recipe_that_is_not_translated_names_the_command(
    recipe: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        migrate(recipe)


def test_files_of_verl_are_weighted_by_their_records(tmp_path: Path) -> None:
    names = []
    for records in (3, 1):
        path = tmp_path / f"{records}.jsonl"
        path.write_text('{"prompt": "a"}\n' * records)
        names.append(str(path))
    recipe = {"actor_rollout_ref.model.path": "m", "data.train_files": names}
    assert migrate(recipe).settings["data.sources"] == {names[0]: 3.0, names[1]: 1.0}
    migration = migrate(recipe | {"data.train_files": [*names, "elsewhere.parquet"]})
    assert any(line.startswith("data.sources: ") for line in migration.open)


def test_files_are_recognised_by_their_most_specific_keys(tmp_path: Path) -> None:
    (tmp_path / "roll.yaml").write_text(ROLL)
    migration = migrate(read_recipe([str(tmp_path / "roll.yaml")]))
    wanted = {
        "batch.prompts_per_step": 64,
        "rollout.samples_per_prompt": 8,
        "data.max_prompt_tokens": 2048,
        "rollout.sampling.max_new_tokens": 4096,
        "policy.optimizer.learning_rate": 2e-6,
    }
    assert migration.system == "ROLL"
    assert {key: migration.settings.get(key) for key in wanted} == wanted
    assert "batch.mini_batches" not in migration.settings
    assert any(line.startswith("batch.mini_batches: ") for line in migration.open)
    assert any("NOT_SET_HERE" in line for line in migration.unknown)


def test_a_parent_file_is_read_and_lora_keeps_its_modules(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 2}\n"
    )
    (tmp_path / "child.yaml").write_text(
        "defaults: parent.yaml\ngrpo: {num_generations_per_prompt: 8}\n"
    )
    settings = migrate(read_recipe([str(tmp_path / "child.yaml")])).settings
    assert (settings["batch.prompts_per_step"], settings["rollout.samples_per_prompt"]) == (
        64,
        8,
    )
    (tmp_path / "train.py").write_text(PEFT)
    settings = migrate(read_recipe([str(tmp_path / "train.py")])).settings
    assert settings["model.lora.rank"] == 16
    assert settings["model.lora.target_modules"] == "q_proj,v_proj"


def test_files_are_neither_overwritten_nor_read_without_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    output = tmp_path / "ours.yaml"
    script.write_text(f"python main.py {VERL}\n")
    output.write_text("mine\n")
    refused = [
        ([str(script), "--output", str(output)], f"--output={output}"),
        ([str(script), "--output", str(script), "--overwrite"], f"--output={script}"),
        (["/dev/zero"], "/dev/zero"),
    ]
    for arguments, named in refused:
        assert main(["migrate", *arguments]) == 2
        assert named in capsys.readouterr().err
    assert output.read_text() == "mine\n"
    assert main(["migrate", str(script), "--output", str(output), "--overwrite"]) == 0
    assert "batch:" in output.read_text()


def test_a_default_in_another_unit_is_told_in_ours() -> None:
    """TRL saves every 500 optimiser steps, of which a step here has four."""
    source = "trl grpo --num_generations 4 --per_device_train_batch_size 4 --steps_per_generation 4"
    migration = migrate(read_recipe([source]))
    assert migration.settings["batch.mini_batches"] == 4
    assert migration.defaults["run.checkpoint_every"].startswith("125 ")


def test_keys_that_another_key_switches_off_are_named() -> None:
    recipe = {
        "rollout_batch_size": 8,
        "actor_train.training_args.learning_rate": 1e-6,
        "kl_loss_coef": 0.3,
    }
    assert any(
        "kl_loss_coef" in line and "switch" in line for line in migrate(recipe).without
    )
    assert not any(
        "switch" in line for line in migrate(recipe | {"use_kl_loss": True}).without
    )


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            "r=64, lora_alpha=16, use_rslora=True, target_modules='all-linear'",
            {"rslora": True, "alpha": 16},
        ),
        (
            "r=64, target_modules=['q_proj'], bias='none', use_dora=False",
            {"rank": 64, "alpha": 8},
        ),
        ("r=4, target_modules=r'model\\.layers\\.\\d+\\.q_proj'", {"rank": 4}),
        (
            "r=4, target_modules=['q_proj'], modules_to_save=['lm_head'], use_dora=True",
            {"rank": 4},
        ),
    ],
)
def test_adapters_of_python_keep_their_scale_and_name_what_is_left_out(
    arguments: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"SFTTrainer('m', args=SFTConfig(), peft_config=LoraConfig({arguments}))\n"
    )
    migration = migrate(read_recipe([str(script)]))
    assert {name: migration.settings[f"model.lora.{name}"] for name in wanted} == wanted
    text = " ".join([*migration.open, *migration.without])
    left_out = [
        name
        for name in ("modules_to_save=[", "use_dora=True", "layers")
        if name in arguments
    ]
    assert all(name.removesuffix("True") in text for name in left_out), text
    assert not migration.unknown


def test_an_adapter_to_begin_with_has_a_setting() -> None:
    key = "actor_rollout_ref.model.lora_adapter_path"
    migration = migrate(
        {"actor_rollout_ref.model.lora_rank": 8, key: "a", "data.train_batch_size": 8}
    )
    assert migration.settings["model.lora.path"] == "a"
