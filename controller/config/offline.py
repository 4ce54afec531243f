"""Settings of training on given sequences, without engines and rewards.

SftConfig             controller.sft            conversations, or prompts with responses
PreferencesConfig     controller.preferences    pairs of a chosen and a rejected response
RewardTrainingConfig  controller.reward_model   such pairs, scored responses, or responses with labelled steps
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from controller.config.conditions import CONDITIONS, FORWARD_PASSES
from controller.config.role_table import POLICY, REFERENCE, RoleSpec, section_conditions
from controller.config.sections import (
    IMAGE_KEY,
    BalanceConfig,
    BaseRunConfig,
    ImagePixelsConfig,
    ResourcesConfig,
    TrackingConfig,
)
from controller.config.training import Limits, TrainingConfig, count_noun
from workers.config.roles import (
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    SupervisedLossConfig,
    setting,
)

OFFLINE_POLICY = replace(POLICY, worker="workers.roles.policy:OfflinePolicyWorker")
REWARD_POLICY = replace(
    POLICY, worker="workers.roles.reward_model:RewardModelTrainer", head="value"
)


@dataclass
class OfflineRunConfig(BaseRunConfig):
    only_with = ((".steps=0", "epochs"),)

    steps: int = setting(0, "Optimiser steps. 0 trains for run.epochs instead.", minimum=0)
    epochs: int = setting(1, "Passes over data.train.", minimum=1)


@dataclass
class OfflineDataConfig:
    """Records to train on."""

    train: str = setting(
        "",
        "Records: a .jsonl, .json, .parquet or .arrow file, a folder with files of one kind "
        "(`datasets.save_to_disk`, a hub repository), `folder@split` if it has several splits, a pattern "
        "such as `data/part-*.jsonl`, or a data set of the hub, `owner/name[:subset][@split]`. The hub's "
        "split defaults to `train`.",
    )
    validation: str = setting(
        "", "Held-out records, in the forms of data.train. Empty disables validation."
    )
    prompt_key: str = setting(
        "prompt", "Column with the prompt: a string, or a list of chat messages."
    )
    image_key: str = setting("images", IMAGE_KEY)
    image_pixels: ImagePixelsConfig = field(default_factory=ImagePixelsConfig)
    chat_template_arguments: dict[str, Any] = setting(
        {},
        "Variables of the chat template, such as `{enable_thinking: false}` or `{reasoning_effort: low}`. "
        "A record's column `chat_template_arguments` overrides them, and its column `tools` gives "
        "functions to call.",
    )
    max_tokens: int = setting(2048, "Maximum sequence length, in tokens.", minimum=2)
    overlong_records: str = setting(
        "drop",
        "Handling of a longer record: `drop` removes and counts it, `error` stops the run.",
        choices=("drop", "error"),
    )
    shuffle: bool = setting(True, "Shuffle the records in every epoch.")


@dataclass
class LearnedDataConfig(OfflineDataConfig):
    train_on: str = setting(
        "all",
        "Assistant turns to learn of a conversation, or of a response of chat messages: `all`, or the "
        "`last`.",
        choices=("all", "last"),
    )


@dataclass
class SftDataConfig(LearnedDataConfig):
    messages_key: str = setting(
        "messages",
        "Column with a conversation, a list of chat messages whose assistant turns are learned. Records "
        "without it need a prompt and a response.",
    )
    response_key: str = setting("response", "Column with the response to learn: a string.")


@dataclass
class PairDataConfig:
    """Chosen and rejected responses: strings, or lists of chat messages that follow the prompt's."""

    chosen_key: str = setting("chosen", "Column with the better response.")
    rejected_key: str = setting("rejected", "Column with the worse response.")


@dataclass
class PreferencesDataConfig(PairDataConfig, LearnedDataConfig):
    """Chosen and rejected responses: strings, or lists of chat messages that follow the prompt's."""


@dataclass
class RewardDataConfig(PairDataConfig, OfflineDataConfig):
    """Responses are strings, or lists of chat messages that follow the prompt's. Steps are strings."""

    only_with = (
        ("loss.name=bradley_terry", "chosen_key, rejected_key, margin_key"),
        ("loss.name=regression", "response_key, score_key"),
        ("loss.name=process", "steps_key, labels_key, step_separator"),
    )

    margin_key: str = setting(
        "margin", "Column with the margin by which the chosen response should win, if any."
    )
    response_key: str = setting("response", "Column with a scored response.")
    score_key: str = setting("score", "Column with its score.")
    steps_key: str = setting(
        "completions", "Column with the steps of a response, a list of strings."
    )
    labels_key: str = setting(
        "labels",
        "Column with a label for each step: true or false, or the chance of right.",
    )
    step_separator: str = setting("\n", "Text between two steps.")


@dataclass
class SequenceBatchConfig:
    sequences_per_step: int = setting(
        32, "Sequences per optimiser step.", minimum=1, maximum=10**6
    )


@dataclass
class PairBatchConfig:
    pairs_per_step: int = setting(32, "Pairs per optimiser step.", minimum=1, maximum=10**6)


@dataclass
class RecordBatchConfig:
    records_per_step: int = setting(
        32, "Records per optimiser step: pairs, or responses.", minimum=1, maximum=10**6
    )


@dataclass
class OfflineValidationConfig:
    every: int = setting(
        0,
        "Validate every this many steps. 0 validates only before and after training.",
        minimum=0,
    )
    at_start: bool = setting(True, "Validate before the first step.")
    records: int = setting(
        0, "Use only the first this many held-out records. 0 uses all.", minimum=0
    )


@dataclass
class PreferenceLossConfig:
    """Loss of a pair. Formulas: `controller.offline.preference_losses`."""

    only_with = ((".name=dpo or simpo", "label_smoothing"), (".name=simpo", "margin"))

    name: str = setting(
        "dpo",
        "`dpo` (Rafailov et al. 2023) and `ipo` (Azar et al. 2023) compare with a frozen reference. "
        "`simpo` (Meng et al. 2024) does not.",
        choices=("dpo", "ipo", "simpo"),
    )
    beta: float = setting(
        0.1,
        "Scale of log-probs in the loss. The papers use 0.1 for dpo, 2 for simpo.",
        above=0,
    )
    log_probs: str = setting(
        "auto",
        "Log-prob of a response: the `sum` over its tokens, or the length-normalised `mean`. `auto` "
        "follows the paper: mean for simpo, else sum.",
        choices=("auto", "sum", "mean"),
    )
    label_smoothing: float = setting(
        0.0,
        "Assumed share of pairs whose labels are swapped (dpo, simpo).",
        minimum=0,
        below=0.5,
    )
    margin: float = setting(
        0.0, "Margin by which the chosen response should win (simpo's gamma).", minimum=0
    )

    @property
    def averages(self) -> bool:
        """Whether a response's log-prob is the mean over its tokens."""
        return self.log_probs == "mean" or (
            self.log_probs == "auto" and self.name == "simpo"
        )


@dataclass
class RewardLossConfig:
    """Loss of a reward model. Formulas: `controller.offline.preference_losses`,
    `workers.model.losses.value`.
    """

    only_with = ((".name=bradley_terry", "center_rewards_coefficient"),)

    name: str = setting(
        "bradley_terry",
        "`bradley_terry` ranks pairs. `regression` predicts scores (squared error). `process` predicts "
        "whether each step is right (cross-entropy).",
        choices=("bradley_terry", "regression", "process"),
    )
    center_rewards_coefficient: float = setting(
        0.0,
        "Weight of the squared sum of a pair's scores, which keeps scores around 0. 0.01 is common.",
        minimum=0,
    )


@dataclass
class OfflineConfig(TrainingConfig):
    """Settings of all commands. Each redeclares batch and loss, which only keep their position here."""

    role_table: ClassVar[tuple[RoleSpec, ...]] = (OFFLINE_POLICY,)
    only_with: ClassVar[tuple[tuple[str, str], ...]] = (("data.validation", "validation"),)

    run: OfflineRunConfig = field(default_factory=OfflineRunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: OfflineDataConfig = field(default_factory=OfflineDataConfig)
    batch: Any = None
    loss: Any = None
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    validation: OfflineValidationConfig = field(default_factory=OfflineValidationConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def records_per_step(self) -> int:
        """Records of an optimiser step."""
        raise NotImplementedError

    @property
    def sequences_per_record(self) -> int:
        return 1

    @property
    def longest_sequence(self) -> int:
        return self.data.max_tokens

    def steps_over(self, records: int) -> int:
        """Count the run's optimiser steps over that many records, including a smaller last one."""
        return self.run.steps or -(-self.run.epochs * records // self.records_per_step)

    @property
    def length_setting(self) -> str:
        """Setting that determines the run's length, as `key=value`."""
        return (
            f"run.steps={self.run.steps}"
            if self.run.steps
            else f"run.epochs={self.run.epochs}"
        )

    def optimizer_steps_over(self, records: int) -> int:
        """Count the optimiser steps of the learning rate's schedule."""
        return self.policy.optimizer.total_steps or self.steps_over(records)


@dataclass
class SftConfig(OfflineConfig):
    """All settings of supervised fine-tuning."""

    conditions = CONDITIONS | dict.fromkeys(
        FORWARD_PASSES, ("data.validation", lambda c: bool(c.data.validation))
    )

    data: SftDataConfig = field(default_factory=SftDataConfig)
    batch: SequenceBatchConfig = field(default_factory=SequenceBatchConfig)
    loss: SupervisedLossConfig = field(default_factory=SupervisedLossConfig)
    policy: PolicyConfig = field(
        default_factory=lambda: PolicyConfig(optimizer=OptimizerConfig(learning_rate=1e-5))
    )

    @property
    def headline(self) -> str:
        return (
            f"{self.model.path} on {self.data.train}: supervised, "
            f"{count_noun(self.batch.sequences_per_step, 'sequence')} a step, "
            f"{count_noun(self.policy.data_parallel, 'policy rank')}, {self.device}"
        )

    @property
    def records_per_step(self) -> int:
        """Records of an optimiser step, each of which is a sequence."""
        return self.batch.sequences_per_step

    @property
    def limits(self) -> dict[str, Limits]:
        """Limits of each pass's micro-batches. `policy.log_probs` is validation's."""
        limits = super().limits
        return (
            limits if self.data.validation else {"policy.update": limits["policy.update"]}
        )


@dataclass
class PreferencesConfig(OfflineConfig):
    """All settings of preference optimisation."""

    conditions = CONDITIONS | {
        "reference": ("loss.name=dpo or ipo", lambda c: c.loss.name != "simpo"),
        **dict.fromkeys(FORWARD_PASSES, ("", lambda c: True)),
    }

    role_table = (OFFLINE_POLICY, REFERENCE)
    only_with = section_conditions(role_table)

    data: PreferencesDataConfig = field(default_factory=PreferencesDataConfig)
    batch: PairBatchConfig = field(default_factory=PairBatchConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def headline(self) -> str:
        return (
            f"{self.model.path} on {self.data.train}: {self.loss.name}, "
            f"{count_noun(self.batch.pairs_per_step, 'pair')} a step, "
            f"{count_noun(self.policy.data_parallel, 'policy rank')}, {self.device}"
        )

    @property
    def records_per_step(self) -> int:
        """Records of an optimiser step, each of which is a pair."""
        return self.batch.pairs_per_step

    @property
    def sequences_per_record(self) -> int:
        return 2


@dataclass
class RewardTrainingConfig(OfflineConfig):
    """All settings of reward model training. `policy` has those of the reward model."""

    conditions = CONDITIONS | dict.fromkeys(
        FORWARD_PASSES,
        ("loss.name=bradley_terry or data.validation", lambda c: c.has_forward_pass),
    )
    role_table = (REWARD_POLICY,)

    data: RewardDataConfig = field(default_factory=RewardDataConfig)
    batch: RecordBatchConfig = field(default_factory=RecordBatchConfig)
    loss: RewardLossConfig = field(default_factory=RewardLossConfig)
    policy: PolicyConfig = field(
        default_factory=lambda: PolicyConfig(optimizer=OptimizerConfig(learning_rate=1e-5))
    )

    @property
    def headline(self) -> str:
        return (
            f"{self.model.path} on {self.data.train}: reward model by {self.loss.name}, "
            f"{count_noun(self.batch.records_per_step, 'record')} a step, "
            f"{count_noun(self.policy.data_parallel, 'rank')}, {self.device}"
        )

    @property
    def compares_pairs(self) -> bool:
        return self.loss.name == "bradley_terry"

    @property
    def has_forward_pass(self) -> bool:
        return self.compares_pairs or bool(self.data.validation)

    @property
    def records_per_step(self) -> int:
        """Records of an optimiser step, which are pairs or responses."""
        return self.batch.records_per_step

    @property
    def sequences_per_record(self) -> int:
        return 2 if self.compares_pairs else 1

    @property
    def limits(self) -> dict[str, Limits]:
        """Limits of each pass's micro-batches. `policy.log_probs` is the pass that scores."""
        limits = super().limits
        return (
            limits if self.has_forward_pass else {"policy.update": limits["policy.update"]}
        )
