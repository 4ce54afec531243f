"""The configuration of `controller.fit`, importable without torch or Ray.

    FILE, key.sub=value --load--> Config --preflight.checks--> a run, or one line that says what to change

`controller.config.sections` and `workers.config.roles` declare the keys. Values that follow from several keys
are properties.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from controller.config.algorithm import AlgorithmConfig
from controller.config.file import read, settings, value_of
from controller.config.functions import absolute
from controller.config.role_table import ROLES, section_conditions
from controller.config.sections import (
    BalanceConfig,
    BatchConfig,
    DataConfig,
    ResourcesConfig,
    RewardConfig,
    RunConfig,
    TrackingConfig,
    ValidationConfig,
)
from controller.config.training import TrainingConfig, count_noun
from workers.config.engine_range import EngineRange
from workers.config.judge import POLICY
from workers.config.roles import (
    CriticConfig,
    LossConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RolloutConfig,
    TeacherConfig,
)

Schema = TypeVar("Schema", bound=TrainingConfig)


@dataclass
class Config(TrainingConfig):
    """All settings of a run, and values derived from them."""

    role_table = tuple(ROLES.values())
    only_with = (*section_conditions(role_table), ("data.validation", "validation"))

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def headline(self) -> str:
        return (
            f"{self.model.path} on {self.data.train or ', '.join(self.data.weights)}: "
            f"{self.algorithm.advantage}, {count_noun(self.batch.prompts_per_step, 'prompt')} x "
            f"{count_noun(self.rollout.samples_per_prompt, 'sample')} a step, "
            f"{count_noun(self.policy.data_parallel, 'policy rank')}, {self.engine_range.words}, "
            f"{self.device}"
        )

    @property
    def samples(self) -> bool:
        return True

    @property
    def has_data(self) -> bool:
        return bool(self.data.train or self.data.sources)

    @property
    def rewarded(self) -> bool:
        """Whether anything scores samples."""
        played = self.rollout.environment or self.rollout.runs_agent
        return bool(
            self.reward.weights or played or self.uses_reward_model or self.uses_judge
        )

    @property
    def sampling_key(self) -> str:
        """Section of `rollout.sampling`, for messages."""
        return "rollout.sampling"

    @property
    def temperature(self) -> float:
        """Sampling temperature, so that log-probs describe the sampled distribution."""
        return self.rollout.sampling.temperature

    @property
    def mini_batches(self) -> int:
        return self.batch.mini_batches

    @property
    def split_by(self) -> str:
        return self.batch.split_by

    @property
    def engines(self) -> int:
        """Number of vLLM engines at the start: the minimum of rollout.replicas, or as many as the placement's
        GPUs hold, at least 1.
        """
        minimum = self.rollout.engine_range.minimum
        if minimum or not self.uses_gpus:
            return minimum or 1
        trained_on = self.training_workers if self.training_roles else 0
        judge = self.reward.judge
        other_gpus = trained_on + (
            judge.replicas * judge.tensor_parallel if judge.has_engines else 0
        )
        gpus = (
            trained_on if self.rollout_placement == "colocated" else self.gpus - other_gpus
        )
        return max(1, gpus // self.rollout.tensor_parallel)

    @property
    def engine_range(self) -> EngineRange:
        return EngineRange(
            self.engines, max(self.engines, self.rollout.engine_range.maximum)
        )

    @property
    def colocated_engines(self) -> tuple[int, int]:
        return (
            self.engines if self.rollout_placement == "colocated" else 0,
            self.rollout.tensor_parallel,
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences of a global batch, before any is dropped."""
        return self.batch.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def replayed_per_step(self) -> int:
        """Samples of earlier steps that a step trains on again, if as many are kept."""
        return math.ceil(self.batch.replay.share * self.sequences_per_step)

    @property
    def older_samples(self) -> str:
        """The setting by which steps train on samples of older weights, as `key=value`, or empty."""
        if self.rollout.max_staleness:
            return f"rollout.max_staleness={self.rollout.max_staleness}"
        return (
            f"batch.replay.share={self.batch.replay.share}"
            if self.batch.replay.share
            else ""
        )

    @property
    def mini_batch_sizes(self) -> tuple[int, ...]:
        """Sequences of each mini-batch of a full global batch, in descending order. They differ by at most
        one.
        """
        smallest, larger = divmod(self.sequences_per_step, self.batch.mini_batches)
        return tuple(smallest + (i < larger) for i in range(self.batch.mini_batches))

    @property
    def longest_sequence(self) -> int:
        """An agent's requests are as long as the engine accepts."""
        limit = self.data.max_prompt_tokens + self.longest_response
        return self.max_model_tokens if self.rollout.runs_agent else limit

    @property
    def longest_response(self) -> int:
        """Maximum tokens after a prompt in training: of a response, or of an episode's turns and
        observations.
        """
        return self.rollout.response_limit(self.rollout.sampling)

    @property
    def max_model_tokens(self) -> int:
        """Maximum prompt plus response that an engine accepts, in training and validation."""
        return self.rollout.max_model_tokens or self.needed_model_tokens

    @property
    def needed_model_tokens(self) -> int:
        """Maximum tokens of a sequence in training or validation."""
        responses = [self.longest_response]
        judge = self.reward.judge
        if self.data.validation:
            responses.append(self.rollout.response_limit(self.validation.sampling))
        judge_tokens = judge.max_tokens if judge.model == POLICY else 0
        return max(self.data.max_prompt_tokens + max(responses), judge_tokens)

    @property
    def old_log_probs(self) -> str:
        """Source of the old log-probs in the loss's ratios and in a KL in the reward.

        One of `sampler`, `forward_pass` (before the first update), or `update` if a step has only one. Stale
        samples need a ratio to the policy that sampled them. If algorithm.loss.rollout_correction provides
        it, the other ratio starts at 1 (decoupled objective, Hilton et al. 2021).
        """
        loss = self.algorithm.loss
        if (
            self.older_samples
            and loss.name != "reinforce"
            and not loss.rollout_correction.is_on
        ):
            return "sampler"
        needed_before = (
            self.updates_per_step > 1 or self.algorithm.kl_in_reward.coefficient > 0
        )
        return "forward_pass" if needed_before or loss.old_entropies else "update"

    @property
    def has_forward_pass(self) -> bool:
        """Whether the policy reads a step's samples before the first update, for old log-probs or
        entropies.
        """
        return self.old_log_probs == "forward_pass" or self.algorithm.loss.old_entropies

    @property
    def policy_loss(self) -> LossConfig:
        """Return algorithm.loss for workers."""
        return replace(self.algorithm.loss, function=absolute(self.algorithm.loss.function))

    @property
    def loss_columns(self) -> tuple[str, ...]:
        """Columns of the records that the policy loss reads."""
        return tuple(
            name.strip() for name in self.algorithm.loss.columns.split(",") if name.strip()
        )

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps of a training step, over all epochs."""
        return self.batch.mini_batches * self.batch.epochs

    @property
    def total_optimizer_steps(self) -> int:
        """Optimiser steps of the policy's learning rate schedule."""
        learning = self.run.steps - self.critic.warmup_steps
        return self.policy.optimizer.total_steps or learning * self.updates_per_step

    @property
    def uses_token_returns(self) -> bool:
        """Whether each token has its own advantage, from future rewards, without a critic."""
        algorithm = self.algorithm
        differ = (
            algorithm.gamma < 1
            or algorithm.kl_in_reward.coefficient > 0
            or algorithm.credit == "turn"
        )
        return differ and algorithm.advantage in (
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )

    @property
    def needs_one_row(self) -> str:
        """The setting that needs all tokens of a sample in one row, as `key=value`, or empty."""
        algorithm = self.algorithm
        loss = self.algorithm.loss
        correction = loss.rollout_correction
        needing = {
            f"algorithm.advantage={algorithm.advantage}": self.uses_critic
            or self.uses_token_returns,
            f"algorithm.loss.name={loss.name}": loss.name in ("gspo", "gmpo"),
            "algorithm.loss.rollout_correction.weights=sequence": correction.weights
            == "sequence",
            "algorithm.loss.rollout_correction.rejection=sequence": correction.rejection
            == "sequence",
        }
        return next((name for name, needs in needing.items() if needs), "")

    @property
    def history(self) -> str:
        """rollout.history with `auto` resolved. Users' losses and steps may need one row a sample."""
        one_row = (
            self.needs_one_row or self.algorithm.loss.name == "custom" or self.run.step
        )
        automatic = "keep" if one_row else "template"
        return automatic if self.rollout.history == "auto" else self.rollout.history

    @property
    def uses_judge(self) -> bool:
        return bool(self.reward.judge.model)

    @property
    def judge_model(self) -> ModelConfig:
        """Model of the judge: the policy's, or model.* with reward.judge.model."""
        judge = self.reward.judge
        return self.model.of_another_role(judge.model) if judge.has_engines else self.model

    @property
    def other_engines(self) -> dict[str, "Config"]:
        """Settings of engines besides the policy's, by role, as if they were a policy's."""
        judge = self.reward.judge
        if not judge.has_engines:
            return {}
        options = {
            name: getattr(judge, name)
            for name in ("replicas", "tensor_parallel", "sampling", "engine")
        }
        shared = (
            "max_concurrent",
            "max_retries",
            "hang_timeout_s",
            "threads",
            "cpu_kv_cache_gib",
        )
        options |= {name: getattr(self.rollout, name) for name in shared}
        placement = "apart" if self.uses_gpus else "shared_memory"
        rollout = RolloutConfig(
            placement=placement, max_model_tokens=judge.max_tokens, **options
        )
        return {
            "judge": replace(
                self, model=self.judge_model, rollout=rollout, reward=RewardConfig()
            )
        }

    @property
    def reward_actors(self) -> int:
        """Reward workers, with the one that reads a judge's answers."""
        return self.reward.workers + self.uses_judge

    @property
    def rollout_placement(self) -> str:
        """`shared_memory`, `colocated` or `apart`."""
        if self.rollout.placement == "auto":
            return "colocated" if self.uses_gpus else "shared_memory"
        return self.rollout.placement


Files = str | Path | Sequence[str | Path] | None


def load(path: Files, overrides: Sequence[str] = ()) -> Config:
    """Load the settings of `controller.fit` (see `load_as`)."""
    return load_as(Config, path, overrides)


def load_as(schema: type[Schema], path: Files, overrides: Sequence[str] = ()) -> Schema:
    """Load the settings of any command. Raises as `read`. A run without a name takes the last file's."""
    files = [path] if isinstance(path, (str, Path)) else list(path or ())
    config = read(schema, files, overrides)
    if not config.run.name:
        name = _default_name(files[-1] if files else None)
        config.run.name = (
            name if config.run.resume == "auto" else free_name(config.run.dir, name)
        )
        config.default_name = "" if config.run.resume == "auto" else name
    return config


def to_yaml(config: TrainingConfig) -> str:
    """Write the configuration as YAML that `load` reads back."""
    # Of values alone: nodes of a schema with their types took twice the time.
    return OmegaConf.to_yaml(OmegaConf.create(asdict(cast(Any, config))))


def changed_yaml(config: TrainingConfig) -> str:
    """Write the settings that differ from their defaults, as YAML that `load` reads back."""
    changed = OmegaConf.create()
    for setting in settings(type(config)()):
        value = value_of(config, setting.key)
        default = (
            value_of(config, setting.default[2:-1]) if setting.follows else setting.default
        )
        if value != default:
            OmegaConf.update(changed, setting.key, value, force_add=True)
    return OmegaConf.to_yaml(changed)


def _default_name(path: str | Path | None) -> str:
    if path is None:
        return "run"
    file = Path(path).resolve()
    return file.parent.name if file.stem == "config" else file.stem


def free_name(folder: str, name: str) -> str:
    """Return `name`, or `name-2`, `name-3`, ... if runs of that name exist."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (Path(folder) / name).exists())
