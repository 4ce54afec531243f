"""Sections of a configuration for the algorithm: advantages, losses and what is trained on."""

from dataclasses import dataclass, field

from workers.config.roles import GaeConfig, KlInRewardConfig, LossConfig, setting


@dataclass
class GigpoConfig:
    """Compares turns within a group of samples. Formulas: `controller.algorithm.credit`."""

    weight: float = setting(
        1.0, "Weight of a turn's advantage beside its sample's.", minimum=0
    )
    states: str = setting(
        "observation",
        "Turns to compare: after an equal `observation` of the environment, as in the paper, or of the "
        "same `number`.",
        choices=("observation", "number"),
    )


@dataclass
class AlgorithmConfig:
    only_with = (
        (".advantage=custom", "advantage_function"),
        (".zero_variance_groups=drop or replace", "group_filter"),
        (".advantage=grpo or gigpo", "normalize_by_std"),
        (
            ".advantage=gae or reinforce_plus_plus or reinforce_plus_plus_baseline or gigpo",
            "credit",
        ),
        ("rollout.environment", "credit"),
        ("episodes", "gamma_per"),
        ("rollout.max_turns above 1", "credit, gamma_per"),
        (
            ".advantage=reinforce_plus_plus or reinforce_plus_plus_baseline or gigpo",
            "gamma",
        ),
        (
            ".advantage=gae or reinforce_plus_plus or reinforce_plus_plus_baseline",
            "gamma_per",
        ),
        ("discount", "gamma_per"),
        (".advantage=gigpo", "gigpo"),
        (".advantage=pass_at_k", "pass_k"),
        (".zero_variance_groups=replace", "max_sampling_rounds"),
        (".advantage=gae", "gae"),
        (".kl_in_reward.coefficient above 0", "kl_in_reward"),
    )

    advantage: str = setting(
        "grpo",
        "Advantage estimator. Formulas: `controller.algorithm.advantages`. `gae` is PPO with a critic. "
        "`none`: nothing is learned from rewards, which then are optional (algorithm.loss.distillation). "
        "`custom` uses algorithm.advantage_function.",
        choices=(
            "gae",
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "opo",
            "pass_at_k",
            "maxrl",
            "gigpo",
            "none",
            "custom",
        ),
    )
    advantage_function: str = setting(
        "",
        "Function that returns an advantage for each sample, `module:function` or `path/file.py:function`. "
        "See docs/your-own.md.",
    )
    credit: str = setting(
        "episode",
        "Where the rewards of an environment lie: all on the `episode`'s last token, or each on the last "
        "token of the `turn` that earned it. All other rewards and penalties lie on the episode's last "
        "token.",
        choices=("episode", "turn"),
    )
    normalize_by_std: bool = setting(
        True, "Divide a group's centred rewards by their standard deviation (grpo)."
    )
    gamma: float = setting(
        1.0,
        "Discount in reinforce_plus_plus and reinforce_plus_plus_baseline, and between turns in gigpo. gae "
        "uses algorithm.gae.gamma.",
        minimum=0,
        maximum=1,
    )
    gamma_per: str = setting(
        "token",
        "What gamma discounts: every `token`, or only the step from a `turn` to the next. gae's lambda is "
        "per token.",
        choices=("token", "turn"),
    )
    pass_k: int = setting(
        4,
        "k of pass_at_k, which rewards the best of k responses. Must be below samples_per_prompt.",
        minimum=1,
    )
    zero_variance_groups: str = setting(
        "keep",
        "Handling of groups whose rewards are all equal (zero advantage): `keep` them, `drop` them, or "
        "`replace` them with new prompts until a step has batch.prompts_per_step other groups (DAPO's "
        "dynamic sampling).",
        choices=("keep", "drop", "replace"),
    )
    group_filter: str = setting(
        "",
        "Function that says whether a group is kept, `module:function` or `path/file.py:function`. It "
        "replaces the rule of zero_variance_groups, and not what becomes of other groups. See "
        "docs/your-own.md.",
    )
    max_sampling_rounds: int = setting(
        10,
        "Maximum generation rounds per step with `replace`. After the last round, the step trains on the "
        "groups found.",
        minimum=2,
    )
    gae: GaeConfig = field(default_factory=GaeConfig)
    gigpo: GigpoConfig = field(default_factory=GigpoConfig)
    kl_in_reward: KlInRewardConfig = field(default_factory=KlInRewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def compares_groups(self) -> bool:
        """Whether advantages are 0 in a group of equal rewards."""
        other_estimators = (
            "reinforce_plus_plus",
            "gae",
            "remax",
            "gigpo",
            "none",
            "custom",
        )
        return self.advantage not in other_estimators and self.credit == "episode"

    @property
    def reads_turns(self) -> bool:
        """Whether the estimator needs the column `by_turn`."""
        return (
            self.credit == "turn" or self.gamma_per == "turn" or self.advantage == "gigpo"
        )
