"""Tables, defaults and derived settings of recipes for SFT, preferences and reward models."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ballast.migrate.commands import PREFERENCES, REWARD_MODEL, SFT, Command
from ballast.migrate.offline_systems import OFFLINE_SYSTEMS
from ballast.migrate.rules import Settings, above_0, count, decay_all
from ballast.migrate.systems.trl import PROCESSES, apply_switches, choose_modules, name_data

TABLES = {
    "verl": "verl's sft_trainer",
    "TRL": "TRL's SFTTrainer and DPOTrainer",
    "OpenRLHF": "OpenRLHF's train_sft, train_dpo and train_rm",
    **{name: system.table for name, system in OFFLINE_SYSTEMS.items()},
}
"""The table that comes before the one of the system itself."""

TRL = {
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
    "seed": 42,
    "max_length": 1024,
    "num_train_epochs": 3,
}
OPENRLHF = {
    "train.batch_size": 128,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
}
DEFAULTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("TRL", SFT.module): TRL | {"learning_rate": 2e-5},
    ("TRL", PREFERENCES.module): TRL | {"learning_rate": 1e-6},
    ("TRL", REWARD_MODEL.module): TRL | {"learning_rate": 1e-4},
    ("OpenRLHF", SFT.module): OPENRLHF
    | {"train.max_epochs": 2, "adam.lr": 5e-6, "data.input_key": "input"},
    ("OpenRLHF", PREFERENCES.module): OPENRLHF | {"data.max_len": 512, "adam.lr": 1e-5},
    ("OpenRLHF", REWARD_MODEL.module): OPENRLHF | {"data.max_len": 512, "adam.lr": 9e-6},
    ("verl", SFT.module): {
        "data.train_batch_size": 256,
        "data.max_length": 1024,
        "optim.weight_decay": 0.01,
        "trainer.total_epochs": 4,
        "data.truncation": "error",
        "model.lora_alpha": 16,
        "model.enable_gradient_checkpointing": True,
    },
}
VERL_ENGINE = {"optim.lr": 1e-3, "optim.betas": [0.9, 0.999]}
VERL_FSDP = {
    "optim.lr": 1e-5,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler": "cosine",
}

OLD_FLAGS = {
    "pretrain": "model.model_name_or_path",
    "ref_pretrain": "ref.model_name_or_path",
    "learning_rate": "adam.lr",
    "l2": "adam.weight_decay",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "max_len": "data.max_len",
    "dataset": "data.dataset",
    "eval_dataset": "eval.dataset",
    "input_key": "data.input_key",
    "output_key": "data.output_key",
    "prompt_key": "data.prompt_key",
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "beta": "model.beta",
    "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "save_path": "ckpt.output_dir",
    "seed": "train.seed",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
}
"""Flags of OpenRLHF before it had dotted ones."""
PER_DEVICE = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"


def rename_keys(system: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys by their present names."""
    if system == "TRL":
        return apply_switches(recipe)
    if system in OFFLINE_SYSTEMS:
        return OFFLINE_SYSTEMS[system].prepare(recipe)
    if system != "OpenRLHF":
        return dict(recipe)
    return {
        OLD_FLAGS.get(key.replace("-", "_"), key): value for key, value in recipe.items()
    }


def defaults(system: str, command: Command, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's defaults of the keys that `recipe` leaves out."""
    if system in OFFLINE_SYSTEMS:
        offline = OFFLINE_SYSTEMS[system]
        values = {**offline.defaults, **offline.of_commands.get(command, {})}
    else:
        values = dict(DEFAULTS.get((system, command.module), {}))
    if system == "verl":
        values |= VERL_FSDP if "model.partial_pretrain" in recipe else VERL_ENGINE
    return {key: value for key, value in values.items() if key not in recipe}


def is_derived(system: str, key: str) -> bool:
    """Whether `key` becomes a setting by `derive_offline` alone."""
    keys = (
        OFFLINE_SYSTEMS[system].keys
        if system in OFFLINE_SYSTEMS
        else (PER_DEVICE, ACCUMULATION)
    )
    return any(fnmatchcase(key, pattern) for pattern in keys)


def derive_offline(
    system: str,
    command: Command,
    theirs: Mapping[str, Any],
    ours: Settings,
    to_decide: list[str],
) -> None:
    """Add the size of a step and the length of the run, and the open questions to `to_decide`."""
    if system == "TRL":
        _size_of_trl(command, theirs, ours, to_decide)
        name_data(theirs, ours)
        _tell_trl(command, theirs, ours, to_decide)
    elif system in OFFLINE_SYSTEMS:
        offline = OFFLINE_SYSTEMS[system]
        if offline.size in theirs:
            ours[command.size] = count(
                theirs, offline.size, command.known[command.size].default, to_decide
            )
        offline.derive(command, theirs, ours, to_decide)
    elif size := theirs.get("train.batch_size", theirs.get("data.train_batch_size")):
        ours[command.size] = size
    if system == "verl" and theirs.get("engine") != "megatron":
        decay_all(ours)
    if ours.get("run.steps"):
        ours.pop("run.epochs", None)  # steps come first there too
    if int(theirs.get("trainer.nnodes") or 1) > 1 and "policy.data_parallel" in ours:
        nodes = int(theirs["trainer.nnodes"])
        gpus = int(theirs.get("trainer.n_gpus_per_node") or 8)
        formula = f"trainer.nnodes {nodes} x trainer.n_gpus_per_node {gpus}"
        ours.compute("policy.data_parallel", nodes * gpus, formula)
    if isinstance(ours.get("data.train"), list):
        files = ours.pop("data.train")
        ours["data.train"] = files[0]
        if len(files) > 1:
            to_decide.append(
                f"data.train={files[0]}: one file or folder here. Join the others: {', '.join(files[1:])}."
            )


def _size_of_trl(
    command: Command, theirs: Mapping[str, Any], ours: Settings, to_decide: list[str]
) -> None:
    sizes = [theirs.get(PER_DEVICE, 8), theirs.get(ACCUMULATION, 1)]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        to_decide.append(
            f"{command.size}: {PER_DEVICE} x {ACCUMULATION} must be whole numbers above 0."
        )
        return
    processes = above_0(theirs.get(PROCESSES)) or 1
    formula = f"{PER_DEVICE} {sizes[0]} x {ACCUMULATION} {sizes[1]} x {processes} processes"
    ours.compute(command.size, sizes[0] * sizes[1] * processes, formula)
    unit = "packed rows, each of several records, " if theirs.get("packing") is True else ""
    if unit or not above_0(theirs.get(PROCESSES)):
        to_decide.append(
            f"{command.size}={ours[command.size]}: {unit}of one GPU. Multiply it by yours."
        )


def _tell_trl(
    command: Command, theirs: Mapping[str, Any], ours: Settings, to_decide: list[str]
) -> None:
    if command != REWARD_MODEL:  # whose whole model is trained
        choose_modules(ours, to_decide)
    if command != SFT:
        return
    if True not in (theirs.get("assistant_only_loss"), theirs.get("completion_only_loss")):
        to_decide.append(
            "data.train: `messages` train on every token there, here on the assistant's turns."
        )
    if theirs.get("loss_type", "nll") not in ("nll", "chunked_nll"):
        to_decide.append(
            f"loss.aggregation: loss_type={theirs['loss_type']} there, the plain log-loss here."
        )
