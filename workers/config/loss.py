"""Settings of the losses, their teacher and advantages, see `workers.config.roles`, and rules on them."""

from dataclasses import dataclass, field

from workers.config.setting import setting
from workers.errors import ConfigError


@dataclass
class SupervisedLossConfig:
    """Negative log-likelihood of the tokens to learn. Formulas: `workers.model.losses.supervised`."""

    only_with = ((".aggregation=sequence_mean_token_sum_norm", "constant_length"),)

    aggregation: str = setting(
        "token_mean",
        "How token losses are aggregated. Denominators count the whole step.",
        choices=(
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
        ),
    )
    constant_length: int = setting(
        0,
        "Divisor of a sequence's sum in sequence_mean_token_sum_norm, in tokens.",
        minimum=0,
    )


MEANS_OF_SEQUENCES = ("sapo", "gspo", "gmpo")
"""Policy losses whose papers average each sequence first. The registry says the same, and needs torch."""


def automatic_aggregation(loss: str) -> str:
    """Return what algorithm.loss.aggregation=auto means for a named loss, or an empty string for a custom
    one.
    """
    if loss == "custom":
        return ""
    return "sequence_mean_token_mean" if loss in MEANS_OF_SEQUENCES else "token_mean"


SUM_LOSS_NAMES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


@dataclass(frozen=True)
class SumLossConfig:
    """A loss that is a sum over tokens. Formulas, and the columns that it reads: `workers.model.losses.sums`.

    ratio_low, ratio_high: bounds of the ratio in ppo, cispo and gspo. beta: of dro.
    """

    name: str = "cross_entropy"
    ratio_low: float = 0.8
    ratio_high: float = 1.2
    beta: float = 0.05


@dataclass(frozen=True)
class WeightedLossConfig:
    """The sum of sequences' log-probs, or scores, times the column `coefficient`: the gradient of a loss of
    pairs.
    """


POLICY_LOSS_NAMES = (
    "ppo_clip",
    "reinforce",
    "cispo",
    "gspo",
    "gmpo",
    "sapo",
    "clip_cov",
    "kl_cov",
)


@dataclass
class RolloutCorrectionConfig:
    """Importance weights and rejection for the difference between the sampler's and the trainer's log-probs.

    Formulas: `workers.model.losses.correction`.
    """

    only_with = (
        (".weights=token or sequence", "cap"),
        (".rejection=token or sequence", "rejection_low, rejection_high"),
    )

    weights: str = setting(
        "none",
        "Truncated importance weights, trainer over sampler: per `token`, or per `sequence`.",
        choices=("none", "token", "sequence"),
    )
    cap: float = setting(2.0, "Upper limit of importance weights.", above=0)
    rejection: str = setting(
        "none",
        "Leave out each `token` whose ratio is outside the bounds, or each `sequence` whose geometric mean "
        "ratio is.",
        choices=("none", "token", "sequence"),
    )
    rejection_low: float = setting(
        0.5, "Lower bound of accepted ratios.", above=0, maximum=1
    )
    rejection_high: float = setting(2.0, "Upper bound of accepted ratios.", minimum=1)

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected."""
        return not self.weights == self.rejection == "none"


@dataclass
class DistillationConfig:
    """Learn from a teacher, a frozen model that reads the policy's own samples (on-policy distillation).

    Formulas: `workers.model.losses.divergence`.
    """

    only_with = (
        (".coefficient above 0", "over"),
        (".over=top_k or vocabulary", "divergence"),
        (".over=top_k", "top_k"),
    )

    coefficient: float = setting(
        0.0,
        "Weight of the divergence from the teacher in the loss. 0 starts no teacher.",
        minimum=0,
    )
    over: str = setting(
        "top_k",
        "What is compared at each token. `token`: only the sampled token, whose log-ratio is its "
        "advantage, an unbiased estimate of the reverse KL's gradient. `top_k`: the teacher's likeliest "
        "tokens, and all others as one. `vocabulary`: all tokens. The teacher's hidden states then travel "
        "to the policy.",
        choices=("token", "top_k", "vocabulary"),
    )
    divergence: str = setting(
        "reverse_kl",
        "`reverse_kl`: KL of the policy to the teacher. `forward_kl`: the opposite. `jsd`: the mean of "
        "both to their mixture.",
        choices=("reverse_kl", "forward_kl", "jsd"),
    )
    top_k: int = setting(
        64, "Number of the teacher's likeliest tokens.", minimum=1, maximum=4096
    )

    @property
    def compares_distributions(self) -> bool:
        """Whether the student's output layer computes a divergence."""
        return self.coefficient > 0 and self.over != "token"


@dataclass
class TeacherConfig:
    """Frozen model that the policy learns from (algorithm.loss.distillation). It uses the policy's ranks,
    parallelism, threads and model settings, without adapters.
    """

    only_with = (
        (".paths", "key"),
        (".context_key", "context_template"),
        ("own teacher", "cpu_offload"),
        ("GPUs", "cpu_offload"),
    )

    path: str = setting(
        "",
        "Model of the teacher. Its tokenizer gives the policy's tokens the same ids. Empty with "
        "teacher.context_key: the policy as it is in each step.",
    )
    paths: dict[str, str] = setting(
        {},
        "Several teachers by name, instead of teacher.path. They read in turn, each the samples of its "
        "records.",
    )
    key: str = setting(
        "teacher", "Column of the training records that names a record's teacher."
    )
    context_key: str = setting(
        "",
        "Column of the training records that the teacher alone reads, such as a hint or the solution "
        "(self-distillation with privileged context, see docs/distillation.md).",
    )
    context_template: str = setting(
        "{prompt} Here is a correct solution: {context} Now answer in your own words.",
        "Teacher's prompt: of a text, or of the last user message of a chat. Contains `{prompt}` and "
        "`{context}`.",
    )
    forward_max_tokens_per_micro_batch: int = setting(
        0,
        "Cap on packed tokens of a micro-batch. 0 uses policy.max_tokens_per_micro_batch.",
        minimum=0,
    )
    forward_max_sequences_per_micro_batch: int = setting(
        0,
        "Cap on sequences of a micro-batch. 0 uses policy.max_sequences_per_micro_batch.",
        minimum=0,
    )
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")


@dataclass
class LossConfig:
    """The policy loss. Formulas: the functions in `workers.model.losses`."""

    only_with = (
        (".name=custom", "function, columns, old_entropies, hidden_states"),
        (
            ".name=ppo_clip or cispo or gspo or gmpo or clip_cov or custom",
            "clip_low, clip_high",
        ),
        (".name=ppo_clip or custom", "dual_clip"),
        (".name=sapo or custom", "sapo_tau_positive, sapo_tau_negative"),
        (".name=clip_cov or kl_cov or custom", "covariance_fraction"),
        (".name=clip_cov or custom", "clip_cov_low, clip_cov_high"),
        (".name=kl_cov or custom", "kl_cov_coefficient"),
        (
            "old policy",
            "clip_low, clip_high, dual_clip, sapo_tau_positive, sapo_tau_negative",
        ),
        (".aggregation=sequence_mean_token_sum_norm", "constant_length"),
        (".kl_coefficient above 0", "kl_estimator, kl_correction"),
    )

    name: str = setting(
        "ppo_clip",
        "Policy loss. `custom` uses algorithm.loss.function.",
        choices=(*POLICY_LOSS_NAMES, "custom"),
    )
    function: str = setting(
        "",
        "Custom loss, `module:function` or `path/file.py:function`, decorated with "
        "`workers.model.losses.policy_loss`. The file must have the same path on every policy node.",
    )
    columns: str = setting(
        "",
        "Columns of the training records for a custom loss, such as `level,source`. Numbers arrive as "
        "tensors, anything else as objects.",
    )
    old_entropies: bool = setting(
        False,
        "Give a custom loss each token's entropy before the first update, as the column `old_entropies`. "
        "May need an extra forward pass.",
    )
    hidden_states: bool = setting(
        False,
        "Give a custom loss the last hidden states, with their gradient, as `predictions.hidden`.",
    )
    clip_low: float = setting(
        0.2,
        "Lower clip: ratios below 1 - clip_low give no gradient (gmpo: of the log-ratio).",
        minimum=0,
        maximum=1,
    )
    clip_high: float = setting(
        0.2,
        "Upper clip: ratios above 1 + clip_high give no gradient (gmpo: of the log-ratio).",
        minimum=0,
    )
    dual_clip: float = setting(
        0.0,
        "Bound on the loss of a token with negative advantage, in multiples of the advantage. 0 disables "
        "it, else it must be above 1.",
        minimum=0,
    )
    sapo_tau_positive: float = setting(
        1.0, "Steepness of SAPO's gate at positive advantages.", above=0
    )
    sapo_tau_negative: float = setting(
        1.05, "Steepness of SAPO's gate at other advantages.", above=0
    )
    covariance_fraction: float = setting(
        0.0002,
        "Share of a mini-batch's tokens that clip_cov or kl_cov restrains.",
        above=0,
        maximum=1,
    )
    clip_cov_low: float = setting(
        1.0, "clip_cov selects tokens whose covariance is above this."
    )
    clip_cov_high: float = setting(
        5.0, "clip_cov selects tokens whose covariance is below this."
    )
    kl_cov_coefficient: float = setting(1.0, "Weight of kl_cov's penalty.", minimum=0)
    aggregation: str = setting(
        "auto",
        "How token losses are aggregated. Denominators count the whole mini-batch. `auto` follows the "
        "loss's paper.",
        choices=(
            "auto",
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
            "group_mean_token_mean",
        ),
    )
    constant_length: int = setting(
        0,
        "Divisor of a sequence's sum in sequence_mean_token_sum_norm, in tokens (Dr. GRPO).",
        minimum=0,
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus.", minimum=0)
    kl_coefficient: float = setting(
        0.0,
        "Weight of the KL to the reference in the loss. 0 starts no reference.",
        minimum=0,
    )
    kl_estimator: str = setting(
        "k3", "Estimator of the KL (Schulman 2020).", choices=("k1", "k2", "k3", "absolute")
    )
    kl_correction: str = setting(
        "none",
        "Gradient of the KL. `none`: gradient of the estimate, which for k1 and k3 is not the KL's. "
        "`straight_through`: gradient of k2, which is the KL's on samples of the current policy (verl's "
        "`k3+`). `importance`: k1 or k3 times the ratio to the old policy, also correct for older samples "
        "(DeepSeek-V3.2).",
        choices=("none", "straight_through", "importance"),
    )
    rollout_correction: RolloutCorrectionConfig = field(
        default_factory=RolloutCorrectionConfig
    )
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass
class ValueLossConfig:
    """The critic's loss. Formulas: `workers.model.losses.value`."""

    only_with = (("several updates", "clip"),)

    clip: float = setting(
        0.2,
        "Values that moved further than this during the update give no gradient. 0 disables clipping.",
        minimum=0,
    )
    aggregation: str = setting(
        "token_mean",
        "How token losses are aggregated. Denominators count the whole mini-batch.",
        choices=("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"),
    )


@dataclass
class GaeConfig:
    """Generalised advantage estimation. Formulas: `workers.model.losses.returns`."""

    gamma: float = setting(1.0, "Discount per token.", minimum=0, maximum=1)
    lam: float = setting(
        1.0,
        "Lambda, from 0 (only the next value: low variance, biased by the critic) to 1 (all future rewards).",
        minimum=0,
        maximum=1,
    )
    whiten: bool = setting(
        True,
        "Normalise the advantages of a step's tokens to mean 0 and standard deviation 1.",
    )


@dataclass
class KlInRewardConfig:
    """A penalty on the KL to the reference, subtracted from the rewards.

    Per token with algorithm.advantage=gae or reinforce_plus_plus (with or without baseline), else per
    sequence. Formulas: `workers.model.losses.returns` and `controller.algorithm.advantages`.
    """

    only_with = ((".target above 0", "horizon"),)

    coefficient: float = setting(
        0.0,
        "Weight of the penalty. With a target, the initial weight. 0 disables the penalty.",
        minimum=0,
    )
    estimator: str = setting(
        "k1", "Estimator of the KL (Schulman 2020).", choices=("k1", "k2", "k3", "absolute")
    )
    target: float = setting(
        0.0,
        "Target KL of a response, in nats. The weight is adapted to it at each step. 0 keeps the weight.",
        minimum=0,
    )
    horizon: int = setting(
        10000,
        "Sequences after which a KL far from its target has changed the weight by about a fifth.",
        minimum=1,
    )


NORM = "sequence_mean_token_sum_norm"


def check_policy_loss(config: LossConfig) -> None:
    """Raise ConfigError if settings of a policy loss conflict."""
    check_constant_length("algorithm.loss.", config.aggregation, config.constant_length)
    if 0 < config.dual_clip <= 1:
        raise ConfigError(
            f"algorithm.loss.dual_clip={config.dual_clip} must be above 1, or 0 for no dual clip."
        )
    if config.clip_cov_low >= config.clip_cov_high:
        raise ConfigError(
            f"algorithm.loss.clip_cov_low={config.clip_cov_low} is not below "
            f"clip_cov_high={config.clip_cov_high}."
        )


def check_constant_length(section: str, aggregation: str, constant_length: int) -> None:
    """Raise ConfigError if the aggregation needs `constant_length`. section: of the settings, with a dot at
    its end.
    """
    if aggregation == NORM and constant_length <= 0:
        raise ConfigError(
            f"{section}aggregation={NORM} divides by {section}constant_length, which is {constant_length}. "
            "Set it, such as to the tokens of the longest response."
        )


def undecorated_error(function: str) -> ConfigError:
    """Return the error about a custom loss, `module:function`, that is not registered by `policy_loss`."""
    return ConfigError(
        f"algorithm.loss.function={function!r} does not state its normaliser. Decorate it with "
        "@policy_loss(NAME, aggregation=...)."
    )
