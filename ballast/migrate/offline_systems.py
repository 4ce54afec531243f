"""Keys and derived settings of six systems' recipes for SFT, preferences and reward models.

recipe --prepare--> keys that the tables have --rows--> settings --derive--> settings, open questions
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ballast.migrate.commands import PREFERENCES, SFT, Command
from ballast.migrate.offline_data import (
    NAMES_OF_DATA,
    ask_for_length,
    name_data_of_nemo_rl,
    name_data_of_skyrl,
)
from ballast.migrate.rules import (
    JOB_FLAGS,
    Recipe,
    Settings,
    above_0,
    count,
    decay_all,
    is_on,
    number,
    paths_of,
    ranks_of_a_model,
    set_data_parallel,
    set_validation,
)
from ballast.migrate.systems import areal, nemo_rl, prime_rl, roll, skyrl

Derive = Callable[[Command, Recipe, Settings, list[str]], None]
SECTIONS_OF_SKYRL = {
    "optimizer_config.": "trainer.policy.optimizer_config.",
    "model.": "trainer.policy.model.",
    "megatron_config.": "trainer.policy.megatron_config.",
    "fsdp_config.": "trainer.policy.fsdp_config.",
    "sequence_parallel_size": "trainer.policy.sequence_parallel_size",
    "placement.num_": "trainer.placement.policy_num_",
    "use_sample_packing": "trainer.remove_microbatch_padding",
}
KEYS_OF_SKYRL = (
    "strategy",
    "seed",
    "run_name",
    "project_name",
    "logger",
    "eval_before_train",
    "ckpt_interval",
    "hf_save_interval",
    "max_ckpts_to_keep",
    "micro_train_batch_size_per_gpu",
    "remove_microbatch_padding",
    "max_training_steps",
)
SECTIONS_OF_PRIME_RL = re.compile(r"^(optim|scheduler|model\.(?!name$|vlm\b)\w+)(?=\.|$)")
TEMPLATE = "policy.tokenizer.chat_template"


def _as_it_is(recipe: Recipe) -> dict[str, Any]:
    return dict(recipe)


@dataclass(frozen=True)
class OfflineSystem:
    """table: its name, of the rows that come before the system's own. defaults: by their keys, for each
    command.

    size: the key of a step's records, where one key says it. keys: whose values do not become a setting
    directly.
    """

    table: str
    derive: Derive
    prepare: Callable[[Recipe], dict[str, Any]] = _as_it_is
    defaults: Mapping[str, Any] = field(default_factory=dict)
    of_commands: Mapping[Command, Mapping[str, Any]] = field(default_factory=dict)
    size: str = ""
    keys: tuple[str, ...] = ()


def _prepare_nemo_rl(recipe: Recipe) -> dict[str, Any]:
    return dict(nemo_rl.prepare(recipe, []))


def _derive_nemo_rl(
    command: Command, theirs: Recipe, ours: Settings, to_decide: list[str]
) -> None:
    nemo_rl.set_optimizer(theirs, ours, to_decide)
    nemo_rl.set_ranks(theirs, ours)
    template = theirs.get(TEMPLATE)
    if isinstance(template, str) and "{" in template:
        to_decide.append(
            f"model.chat_template: the recipe has its own. Write {TEMPLATE} to a file and name it."
        )
    elif isinstance(template, str) and template.endswith(".jinja"):
        ours["model.chat_template"] = template
    for part, key in (("train", "data.train"), ("validation", "data.validation")):
        name_data_of_nemo_rl(theirs, part, key, ours, to_decide)
    values = {
        key.rpartition(".")[2]: value
        for key, value in theirs.items()
        if key.startswith(("sft.", "dpo.", "rm."))
    }
    if records := above_0(values.get("val_batches")) * above_0(
        values.get("val_global_batch_size")
    ):
        names = f"val_batches {values['val_batches']} x val_global_batch_size"
        ours.compute(
            "validation.records", records, f"{names} {values['val_global_batch_size']}"
        )
    if above_0(values.get("max_num_steps")) and above_0(values.get("max_num_epochs")):
        to_decide.append(
            f"run.steps={values['max_num_steps']}: fewer there, if {values['max_num_epochs']} epochs are."
        )


def _prepare_areal(recipe: Recipe) -> dict[str, Any]:
    return dict(areal.prepare(recipe, []))


def _derive_areal(
    command: Command, theirs: Recipe, ours: Settings, to_decide: list[str]
) -> None:
    areal.set_ranks(theirs, ours, to_decide)
    if not str(theirs.get("actor.backend", "")).startswith("megatron"):
        decay_all(ours)
    if ours.get("reference.path") == ours.get("model.path"):
        ours.pop("reference.path", None)
    for key, split in (("data.train", "train"), ("data.validation", "test")):
        name = str(ours.get(key, ""))
        if name.count("/") == 1 and not name.startswith((".", "/")):
            ours[key] = (
                f"{name}:main@{split}" if name == "openai/gsm8k" else f"{name}@{split}"
            )
    if str(theirs.get("train_dataset.path")) == "openai/gsm8k" and command == SFT:
        ours["data.prompt_key"] = "question"
        ours["data.response_key"] = "answer"
        to_decide.append(
            "data.train: question and answer as plain text there, here by the model's chat template."
        )
    if command != SFT:
        to_decide.append(
            "data.prompt_key=prompt: chosen and rejected are whole texts there, and their common beginning "
            "is the prompt. Set data.prompt_key='' for such records."
        )
    if "train_dataset.max_length" not in theirs:
        ask_for_length(to_decide)
    if epochs := above_0(theirs.get("evaluator.freq_epochs")):
        to_decide.append(
            f"validation.every: every {epochs} epochs there, in steps here. Set yours."
        )


def _prepare_prime_rl(recipe: Recipe) -> dict[str, Any]:
    keys = {
        SECTIONS_OF_PRIME_RL.sub(r"trainer.\1", key, count=1): value
        for key, value in recipe.items()
    }
    keys = {key: value for key, value in keys.items() if value != {}}
    if any(key.startswith("trainer.model.lora") for key in keys):
        keys.setdefault("trainer.model.lora.rank", 16)
    prime_rl.switch_parts_on(keys)
    return dict(sorted(keys.items(), key=lambda item: not item[0].endswith(".type")))


def _derive_prime_rl(
    command: Command, theirs: Recipe, ours: Settings, to_decide: list[str]
) -> None:
    prime_rl.add_schedule(theirs, ours)
    decay_all(ours)
    sharing = ranks_of_a_model(ours)
    nodes = above_0(theirs.get("deployment.num_train_nodes"))
    gpus = nodes * (above_0(theirs.get("deployment.gpus_per_node")) or 8)
    gpus = gpus or above_0(theirs.get("deployment.num_train_gpus")) or 1
    ours.compute(
        "policy.data_parallel",
        max(1, gpus // sharing),
        f"{gpus} GPUs / {sharing} of one model",
    )
    length = above_0(theirs.get("data.seq_len"))
    rows = above_0(theirs.get("data.micro_batch_size"))
    if length and rows:
        formula = f"seq_len {length} x micro_batch_size {rows} / {sharing} of one model"
        ours.compute(
            "policy.max_tokens_per_micro_batch", -(-length * rows // sharing), formula
        )
    to_decide.append(
        f"{command.size}={ours.get(command.size)}: packed rows of {length} tokens there, each of several "
        "records. Raise it to the number of records."
    )
    for part, key in (("data", "data.train"), ("val.data", "data.validation")):
        if name := theirs.get(f"{part}.name"):
            subset, *subsets = theirs.get(f"{part}.subsets") or [""]
            split, *splits = theirs.get(f"{part}.splits") or ["train"]
            ours[key] = f"{name}{':' * bool(subset)}{subset}@{split}"
            if subsets or splits:
                to_decide.append(
                    f"{key}={ours[key]}: one part here. Join the others: {', '.join(subsets or splits)}."
                )
    ours["data.response_key"] = "completion"  # of records without `messages`
    if "run.steps" not in ours:
        to_decide.append("run.steps: without end there. Set a number.")


def _prepare_roll(recipe: Recipe) -> dict[str, Any]:
    named = {
        re.sub(r"^sft_train\.", "actor_train.", key): value for key, value in recipe.items()
    }
    return dict(roll.prepare(named, []))


def _derive_roll(
    command: Command, theirs: Recipe, ours: Settings, to_decide: list[str]
) -> None:
    roll.set_ranks(theirs, ours)
    if not str(theirs.get(f"{roll.TRAIN}strategy_args.strategy_name", "")).startswith(
        "megatron"
    ):
        decay_all(ours)
    sequences = count(theirs, roll.SIZE, 8, to_decide) * count(
        theirs, roll.ACCUMULATION, 1, to_decide
    )
    ranks = above_0(ours.get("policy.data_parallel"))
    size = theirs.get(roll.SIZE, 8)
    accumulated = theirs.get(roll.ACCUMULATION, 1)
    formula = f"{roll.SIZE} {size} x {roll.ACCUMULATION} {accumulated} x {ranks or 1} ranks"
    ours.compute(command.size, sequences * (ranks or 1), formula)
    if not ranks:
        to_decide.append(
            f"{command.size}={ours[command.size]}: of one rank. Multiply it by yours."
        )
    train, *others = paths_of(theirs.get(roll.FILES))
    if train:
        ours["data.train"] = train
    if others:
        to_decide.append(
            f"data.train={train}: one file or folder here. Join the others: {', '.join(others)}."
        )
    set_validation(paths_of(theirs.get("validation.data_args.file_name")), ours, to_decide)
    if command == SFT:
        ours["data.shuffle"] = False
        ours.pop("run.steps", None)  # set_max_steps counts them from the epochs
        return
    ours["data.prompt_key"] = "instruction"
    epochs = theirs.get("actor_train.training_args.num_train_epochs", 1)
    to_decide.append(
        f"run.steps={ours.get('run.steps')}: fewer there, if {epochs} epochs are."
    )


def _prepare_skyrl(recipe: Recipe) -> dict[str, Any]:
    keys = {_key_of_skyrl(key): value for key, value in recipe.items()}
    is_megatron = keys.get("trainer.strategy", "megatron") == "megatron"
    if is_megatron and not any(
        key.startswith("trainer.policy.megatron_config.") for key in keys
    ):
        # SFTConfig's own, which any key of megatron_config replaces.
        for way in ("tensor", "pipeline"):
            keys[f"trainer.policy.megatron_config.{way}_model_parallel_size"] = 2
    return keys


def _key_of_skyrl(key: str) -> str:
    if key in KEYS_OF_SKYRL:
        return f"trainer.{key}"
    for beginning, present in SECTIONS_OF_SKYRL.items():
        if key.startswith(beginning):
            return present + key.removeprefix(beginning)
    return key


def _derive_skyrl(
    command: Command, theirs: Recipe, ours: Settings, to_decide: list[str]
) -> None:
    nodes = count(theirs, skyrl.NODES, 1, to_decide)
    of_a_node = count(theirs, skyrl.GPUS_OF_A_NODE, 4, to_decide)
    set_data_parallel(
        ours, nodes, of_a_node, theirs.get("trainer.policy.fsdp_config.fsdp_size")
    )
    if theirs.get("trainer.strategy", "megatron") != "megatron":
        decay_all(ours)
    for part, key in (("train", "data.train"), ("eval", "data.validation")):
        name_data_of_skyrl(theirs, part, key, ours, to_decide)
    if "max_length" not in theirs:
        ask_for_length(to_decide)
    if steps := above_0(theirs.get("trainer.max_training_steps")) or above_0(
        theirs.get("num_steps")
    ):
        ours["run.steps"] = steps


def _prepare_slime(recipe: Recipe) -> dict[str, Any]:
    return {
        key.replace("_", "-"): value
        for key, value in recipe.items()
        if key not in JOB_FLAGS
    }


def _derive_slime(
    command: Command, theirs: Recipe, ours: Settings, to_decide: list[str]
) -> None:
    nodes = count(theirs, "actor-num-nodes", 1, to_decide)
    set_data_parallel(ours, nodes, count(theirs, "actor-num-gpus-per-node", 8, to_decide))
    of_a_rollout = above_0(theirs.get("rollout-batch-size"))
    updates = above_0(theirs.get("num-steps-per-rollout")) or 1
    size = above_0(theirs.get("global-batch-size")) or of_a_rollout // updates
    if size:
        ours[command.size] = size
        if rollouts := above_0(theirs.get("num-rollout")):
            formula = f"num-rollout {rollouts} x rollout-batch-size {of_a_rollout} / {size} of a step"
            ours.compute("run.steps", max(1, rollouts * of_a_rollout // size), formula)
    if least := number(theirs, "min-lr", 0.0):
        share = least / ours.get("policy.optimizer.learning_rate", 1e-6)
        formula = f"min-lr {least} / {least / share:g}, the learning rate"
        ours.compute("policy.optimizer.final_learning_rate_ratio", round(share, 9), formula)
    if theirs.get("train-backend") == "fsdp":
        decay_all(ours)
    images = theirs.get("multimodal-keys")
    if isinstance(images, Mapping) and "image" in images:
        ours["data.image_key"] = images["image"]
    if is_on(theirs, "gradient-checkpointing"):
        ours["model.gradient_checkpointing"] = "full"
    ask_for_length(to_decide)


OFFLINE_SYSTEMS = {
    "NeMo-RL": OfflineSystem(
        "NeMo-RL's run_sft, run_dpo and run_rm",
        _derive_nemo_rl,
        _prepare_nemo_rl,
        size="policy.train_global_batch_size",
        keys=(
            TEMPLATE,
            "data.train",
            "data.validation",
            "*.val_batches",
            "*.val_global_batch_size",
            *NAMES_OF_DATA,
        ),
    ),
    "AReaL": OfflineSystem(
        "AReaL's SFT, DPO and RW trainers",
        _derive_areal,
        _prepare_areal,
        {
            "actor.optimizer.lr": 1e-3,
            "actor.optimizer.weight_decay": 0.01,
            "actor.optimizer.beta2": 0.999,
            "actor.optimizer.warmup_steps_proportion": 0.001,
            "train_dataset.batch_size": 1,
            "total_train_epochs": 1,
        },
        size="train_dataset.batch_size",
    ),
    "prime-rl": OfflineSystem(
        "prime-rl's sft",
        _derive_prime_rl,
        _prepare_prime_rl,
        {
            "trainer.optim.lr": 1e-6,
            "trainer.optim.type": "adamw",
            "trainer.optim.weight_decay": 0.01,
            "trainer.model.ac.mode": "full",
            "data.batch_size": 128,
            "data.micro_batch_size": 1,
            "data.seq_len": 128,
        },
        size="data.batch_size",
        keys=(
            "data.name",
            "data.subsets",
            "data.splits",
            "data.micro_batch_size",
            "val.data.name",
        ),
    ),
    "ROLL": OfflineSystem(
        "ROLL's SFT and DPO pipelines",
        _derive_roll,
        _prepare_roll,
        {
            "actor_train.training_args.learning_rate": 5e-5,
            "actor_train.training_args.lr_scheduler_type": "linear",
            "actor_train.training_args.adam_beta2": 0.999,
            "actor_train.model_args.disable_gradient_checkpointing": False,
            "save_steps": 50,
            "eval_steps": 10,
        },
        {
            SFT: {"prompt_key": "instruction", "response_key": "output"},
            PREFERENCES: {"max_steps": 500},
        },
        keys=(
            roll.SIZE,
            roll.ACCUMULATION,
            roll.FILES,
            "actor_train.device_mapping",
            "validation.data_args.file_name",
        ),
    ),
    "SkyRL": OfflineSystem(
        "SkyRL's main_sft",
        _derive_skyrl,
        _prepare_skyrl,
        {
            "trainer.policy.model.path": "Qwen/Qwen3-0.6B",
            "trainer.policy.optimizer_config.lr": 1e-6,
            "trainer.policy.optimizer_config.weight_decay": 0.01,
            "trainer.policy.optimizer_config.adam_betas": [0.9, 0.999],
            "trainer.policy.model.lora.alpha": 16,
            "trainer.gradient_checkpointing": True,
            "trainer.seed": 42,
            "batch_size": 4,
            "train_on_what": "last_assistant_message",
        },
        size="batch_size",
        keys=("train_dataset*", "dataset_*", "eval_dataset*"),
    ),
    "slime": OfflineSystem(
        "slime's and miles' sft_rollout",
        _derive_slime,
        _prepare_slime,
        {
            "lr": 1e-6,
            "weight-decay": 0.01,
            "adam-beta2": 0.999,
            "lr-decay-style": "linear",
            "lora-alpha": 16,
            "rollout-shuffle": False,
            "calculate-per-token-loss": False,
            "input-key": "input",
        },
        keys=("num-rollout",),
    ),
}
