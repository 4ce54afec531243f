"""Recognise the command that a recipe is for.

keys, program --recognise--> (TRL, controller.sft, "SFTConfig")

A program's name decides, then keys that only one trainer has, then the number of keys.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from controller.config import Config, TrainingConfig
from controller.config.file import Setting, settings
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.config.sampler import EvaluateConfig
from workers.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """module: of `python -m`. size: its setting with the records of a step."""

    module: str
    schema: type[TrainingConfig]
    size: str
    title: str

    @cached_property
    def known(self) -> dict[str, Setting]:
        return {row.key: row for row in settings(self.schema())}


FIT = Command("controller.fit", Config, "batch.prompts_per_step", "reinforcement learning")
SFT = Command(
    "controller.sft", SftConfig, "batch.sequences_per_step", "supervised fine-tuning"
)
PREFERENCES = Command(
    "controller.preferences",
    PreferencesConfig,
    "batch.pairs_per_step",
    "preference optimisation",
)
REWARD_MODEL = Command(
    "controller.reward_model",
    RewardTrainingConfig,
    "batch.records_per_step",
    "a reward model",
)
EVALUATION = Command("ballast.sampling_commands.evaluate", EvaluateConfig, "", "evaluation")
DISTILLATION = replace(FIT, title="distillation")
PPO = replace(FIT, title="PPO with a value model")

REINFORCEMENT = (
    r"\w*(?:GRPO|RLOO|PPO|ReMax)(?:Config|Trainer)\b|trl (?:grpo|rloo)\b|main_ppo|main_dapo|train_ppo\w*"
    r"|\b(?:grpo|rloo|ppo|gspo)(?:_\w+)?\.py"
)
REFUSED = (
    r"\w*(?:KTO|ORPO|BCO|GKD|GOLD|MiniLLM|NashMD|XPO|OnlineDPO|SDPO|CPO|BEMA)(?:Config|Trainer)\b"
    r"|trl kto\b|(?:online_dpo\w*|sdpo|kto|orpo|bco|gkd|cpo)\.py|train_k(?:to|d)\b"
)
PROGRAMS = (
    ("SkyRL", SFT, r"\S*main_sft\w*", ("train_datasets", "optimizer_config.")),
    ("NeMo-RL", SFT, r"run_(?:vlm_)?sft\.py", ("sft.", "policy.")),
    ("NeMo-RL", PREFERENCES, r"run_dpo\.py", ("dpo.", "policy.")),
    ("NeMo-RL", REWARD_MODEL, r"run_rm\.py", ("rm.", "policy.")),
    ("ROLL", SFT, r"start_sft_pipeline", ("sft_train.",)),
    ("ROLL", PREFERENCES, r"start_dpo_pipeline", ("chosen_key", "actor_train.")),
    ("AReaL", SFT, r"(?:gsm8k|clevr_count_70k)_sft\.py", ("train_dataset.type=sft",)),
    ("AReaL", PREFERENCES, r"hhrlhf_dpo\.py", ("train_dataset.type=dpo",)),
    ("AReaL", REWARD_MODEL, r"hhrlhf_rw\.py", ("train_dataset.type=rw",)),
    (
        "slime",
        SFT,
        r"slime\.rollout\.sft_rollout\S*|miles\.rollout\.sft_rollout\S*|sft_loss",
        (),
    ),
    ("prime-rl", SFT, r"\buv run sft\b", ("data.seq_len",)),
    (
        "verl",
        SFT,
        r"verl\.trainer\.\w*sft_trainer\w*",
        ("data.train_files=", "optim.lr="),
    ),
    ("OpenRLHF", SFT, r"openrlhf\.cli\.train_sft", ()),
    ("OpenRLHF", PREFERENCES, r"openrlhf\.cli\.train_dpo", ()),
    ("OpenRLHF", REWARD_MODEL, r"openrlhf\.cli\.train_rm", ()),
    ("TRL", SFT, r"trl sft\b|\w*SFT(?:Config|Trainer)\b|\bsft(?:_\w+)?\.py", ()),
    ("TRL", PREFERENCES, r"trl dpo\b|\w*DPO(?:Config|Trainer)\b|\bdpo(?:_\w+)?\.py", ()),
    (
        "TRL",
        REWARD_MODEL,
        r"trl reward\b|\w*(?:Reward|PRM)(?:Config|Trainer)\b|\b(?:reward_modeling|prm)\.py",
        (),
    ),
)
"""System, command, the names of programs and classes, and beginnings of key=value that a recipe of it has all
of.
"""

NEVER = r"(?!)"
NOT_TRANSLATED = (
    ("MindSpeed-RL", PREFERENCES, NEVER, ("megatron_training.stage=dpo",)),
    ("MindSpeed-RL", PPO, NEVER, ("megatron_training.stage=ray_ppo",)),
    ("NeMo-RL", DISTILLATION, r"run_\w*distillation\.py", ("distillation.", "policy.")),
    ("NeMo-RL", PPO, r"run_ppo\.py", ("ppo.", "policy.model_name")),
    ("NeMo-RL", EVALUATION, r"run_eval\.py", ("eval.metric",)),
    (
        "ROLL",
        DISTILLATION,
        r"start_distill(?:_vl)?_pipeline",
        ("student_pretrain", "teacher_pretrain"),
    ),
)
"""System, command, program, and beginnings of key=value: a recipe that has all of them is refused."""

TRAINS_NOTHING = (
    ("OpenRLHF", "a reward model's server", r"openrlhf\.cli\.serve_rm", ()),
    ("OpenRLHF", "a tool", r"openrlhf\.cli\.(?!train_)\w+", ()),
    (
        "prime-rl",
        "an inference server",
        r"\buv run inference\b",
        ("vllm.model=", "deployment."),
    ),
    ("prime-rl", "an evaluation", r"\buv run evals?\b", ("eval.source=", "model=")),
    ("prime-rl", "a trainer on random tokens", NEVER, ("data.fake.",)),
    ("verl", "a generation server", r"verl\.trainer\.main_generation\w*", ()),
    ("verl", "an evaluation", r"verl\.trainer\.main_eval\w*", ()),
    ("verl", "a tool", r"verl\.model_merger\w*", ()),
    (
        "accelerate",
        "a launcher's configuration",
        NEVER,
        ("compute_environment=", "distributed_type="),
    ),
    ("SkyRL", "a generation", r"entrypoints\.main_generate\w*", ()),
)
"""System, what it is, the names of programs, and beginnings of key=value: no recipe of training."""

BY_KEYS = (
    (
        "verl",
        SFT,
        (
            "model.partial_pretrain",
            "data.multiturn.enable",
            "data.messages_key",
        ),
    ),
    (
        "OpenRLHF",
        PREFERENCES,
        ("model.beta", "model.ipo_enable", "ref.model_name_or_path", "ref_pretrain", "ipo"),
    ),
    (
        "OpenRLHF",
        REWARD_MODEL,
        (
            "ds.value_head_prefix",
            "model.loss_type",
            "value_head_prefix",
            "compute_fp32_loss",
        ),
    ),
    (
        "OpenRLHF",
        SFT,
        ("data.multiturn", "data.output_key", "output_key", "model.pretrain_mode_enable"),
    ),
    ("TRL", REWARD_MODEL, ("center_rewards_coefficient",)),
    (
        "TRL",
        PREFERENCES,
        (
            "ref_model",
            "precompute_ref_log_probs",
            "rpo_alpha",
            "simpo_gamma",
        ),
    ),
    (
        "TRL",
        SFT,
        (
            "packing",
            "assistant_only_loss",
            "completion_only_loss",
            "dataset_text_field",
            "max_seq_length",
            "eos_token",
        ),
    ),
)
"""Keys that no trainer by reinforcement learning of the system has."""
PAIR_LOSSES = {
    "sigmoid",
    "ipo",
    "hinge",
    "simpo",
    "robust",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "exo_pair",
}
OF_REINFORCEMENT = (
    r"actor_rollout_ref\..*|num_generations|max_completion_length|reward_funcs|reward_weights"
    r"|generation_batch_size|num_iterations|scale_rewards|steps_per_generation|use_vllm|vllm_.*"
    r"|n_samples_per_prompt|rollout\..*|actor\..*"
    r"|actor_train\..*|rollout[_-].*|hf[_-]checkpoint|prompt_data"
    r"|trainer\.policy\..*|grpo\..*|gconfig\..*|orchestrator\..*"
)


@dataclass(frozen=True)
class Recognition:
    system: str
    command: Command
    evidence: str


def recognise_offline(recipe: Mapping[str, Any]) -> Recognition | None:
    """Return what a recipe of training on given sequences is for. None: it may be reinforcement learning.

    Raises ConfigError for one that `migrate` does not translate.
    """
    program = getattr(recipe, "program", "")
    _refuse_without_training(recipe, program)
    if re.search(REINFORCEMENT, program):
        return None
    if match := re.search(REFUSED, program):
        raise ConfigError(
            f"{match[0]}: no command trains this. Closest are `python -m {PREFERENCES.module}` (dpo, ipo, "
            f"simpo) and `python -m {FIT.module}`. Start from their --settings."
        )
    _refuse(recipe, program)
    for system, command, pattern, beginnings in PROGRAMS:
        if telling := _evidence(recipe, program, pattern, beginnings):
            return Recognition(system, command, telling)
    return _by_keys(recipe)


def _refuse_without_training(recipe: Mapping[str, Any], program: str) -> None:
    for system, kind, pattern, beginnings in TRAINS_NOTHING:
        if telling := _evidence(recipe, program, pattern, beginnings):
            raise ConfigError(
                f"{telling}: {kind} of {system}, which trains nothing. Migrate the recipe that trains."
            )


def _refuse(recipe: Mapping[str, Any], program: str) -> None:
    for system, command, pattern, beginnings in NOT_TRANSLATED:
        if telling := _evidence(recipe, program, pattern, beginnings):
            raise ConfigError(
                f"{telling}: {system}'s recipe for {command.title}, which migrate does not translate. Write "
                f"a configuration of `python -m {command.module}`, whose --settings lists its keys."
            )


def _evidence(
    recipe: Mapping[str, Any], program: str, pattern: str, beginnings: Sequence[str]
) -> str:
    """Return the program's name, or the keys with these beginnings if there is one for each, or ""."""
    if match := re.search(pattern, program):
        return match[0]
    pairs = [f"{key}={value}" for key, value in recipe.items()]
    hits = []
    for beginning in beginnings:
        hit = next((pair for pair in pairs if pair.startswith(beginning)), "")
        if not hit:
            return ""
        hits.append(hit)
    return ", ".join(hits)


def _by_keys(recipe: Mapping[str, Any]) -> Recognition | None:
    if any(re.fullmatch(OF_REINFORCEMENT, key) for key in recipe):
        return None
    names = {key.replace("-", "_") for key in recipe}
    dotted = sum("." in key for key in recipe)
    for system, command, marks in BY_KEYS:
        if system == "TRL" and dotted * 2 > len(recipe):
            continue
        if hits := [key for key in marks if key in names]:
            return Recognition(system, command, ", ".join(hits))
    losses = recipe.get("loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    if PAIR_LOSSES.intersection(map(str, losses)):
        return Recognition("TRL", PREFERENCES, f"loss_type={losses[0]}")
    pairs = names & {"data.chosen_key", "chosen_key"}
    if pairs and names & {"adam.lr", "learning_rate"}:
        raise ConfigError(
            f"{pairs.pop()}: a recipe for pairs, of DPO or a reward model, and no key says which. Give the "
            "command's first words too (`openrlhf.cli.train_dpo`), or write one of `python -m "
            f"{PREFERENCES.module}` or `python -m {REWARD_MODEL.module}`."
        )
    return None
