"""Settings of the worker roles and engines: plain dataclasses, importable without torch, Ray or vLLM.

Each field declares its default, documentation and range: `setting(default, "What it does.", ...)`. A
section's `only_with` lists conditions and the settings that need them. `controller.config` combines and
checks the sections.
"""

from dataclasses import dataclass, field

from workers.config.loss import POLICY_LOSS_NAMES as POLICY_LOSS_NAMES
from workers.config.loss import GaeConfig as GaeConfig
from workers.config.loss import KlInRewardConfig as KlInRewardConfig
from workers.config.loss import LossConfig as LossConfig
from workers.config.loss import RolloutCorrectionConfig as RolloutCorrectionConfig
from workers.config.loss import SupervisedLossConfig as SupervisedLossConfig
from workers.config.loss import TeacherConfig as TeacherConfig
from workers.config.loss import ValueLossConfig as ValueLossConfig
from workers.config.model import LoraConfig as LoraConfig
from workers.config.model import ModelConfig as ModelConfig
from workers.config.optimizer import OptimizerConfig as OptimizerConfig
from workers.config.rollout import GATEWAY_KEY as GATEWAY_KEY
from workers.config.rollout import HTTP as HTTP
from workers.config.rollout import GatewayConfig as GatewayConfig
from workers.config.rollout import RolloutConfig as RolloutConfig
from workers.config.rollout import SamplingConfig as SamplingConfig
from workers.config.setting import setting as setting


@dataclass
class ParallelConfig:
    """ranks = pipeline_parallel * dp * context_parallel * tensor_parallel. `workers.model` describes the
    methods.
    """

    only_with = (
        (".context_parallel above 1", "context_parallel_method, context_parallel_degree"),
        (".pipeline_parallel above 1", "virtual_stages"),
        ("several ranks", "defer_gradient_reduction"),
    )

    context_parallel: int = setting(
        1,
        "Ranks that share each sequence. The token cap of the group is cap * context_parallel.",
        minimum=1,
        maximum=10_000,
    )
    context_parallel_method: str = setting(
        "ulysses",
        "`ulysses` exchanges heads for tokens and needs attention heads divisible by context_parallel * "
        "tensor_parallel. `ring` passes keys and values between ranks and works with any number of heads.",
        choices=("ulysses", "ring"),
    )
    context_parallel_degree: str = setting(
        "fixed",
        "`fixed`: all context_parallel ranks share every sequence. `auto`: each micro-step has a degree of "
        "1, 2, 4 ... context_parallel, so that long sequences get more ranks and ranks compute short ones "
        "alone.",
        choices=("fixed", "auto"),
    )
    tensor_parallel: int = setting(
        1,
        "Ranks that share each layer's matrices, heads and vocabulary.",
        minimum=1,
        maximum=10_000,
    )
    replicate: int = setting(
        1,
        "Copies of the sharded model (HSDP): parameters are gathered within dp / replicate ranks, and "
        "copies exchange only gradients. 1 shards over all ranks.",
        minimum=1,
        maximum=10_000,
    )
    expert_parallel: int = setting(
        1,
        "Ranks that share each layer's experts (mixtures of experts only). Must divide dp / replicate * "
        "context_parallel * tensor_parallel. Tokens travel to their experts by all-to-all.",
        minimum=1,
        maximum=10_000,
    )
    defer_gradient_reduction: bool = setting(
        False,
        "Reduce gradients over ranks only in the last micro-step of a mini-batch. Saves traffic, but every "
        "rank keeps full float32 gradients: 4 bytes per parameter / tensor_parallel. Model copies "
        "(replicate) always reduce in the last micro-step only.",
    )
    pipeline_parallel: int = setting(
        1,
        "Pipeline stages, each with some of the layers (1F1B schedule). policy.data_parallel counts one "
        "stage.",
        minimum=1,
        maximum=10_000,
    )
    virtual_stages: int = setting(
        1,
        "Groups of layers on each stage (interleaved 1F1B). More groups mean less waiting and more "
        "communication.",
        minimum=1,
        maximum=10_000,
    )

    @property
    def context_degrees(self) -> tuple[int, ...]:
        """Return how many ranks may share a sequence, ascending."""
        if self.context_parallel_degree == "fixed":
            return (self.context_parallel,)
        return tuple(2**power for power in range(self.context_parallel.bit_length()))


CPU_OFFLOAD = (
    "What host memory keeps. `optimizer`: the optimiser's state, which comes to the GPU by parts in each "
    "step. `all`: parameters and gradients too (FSDP2), copied in every micro-batch."
)


@dataclass
class PolicyConfig:
    only_with = (
        (
            "policy's forward pass",
            "forward_max_tokens_per_micro_batch, forward_max_sequences_per_micro_batch",
        ),
        ("forward pass", "forward_min_micro_batches"),
        ("GPUs", "cpu_offload"),
        ("model.layout=packed", "max_patches_per_micro_batch"),
    )

    data_parallel: int = setting(
        1,
        "Data-parallel ranks: each trains on its own sequences.",
        minimum=1,
        maximum=100_000,
    )
    max_tokens_per_micro_batch: int = setting(
        16384,
        "Cap on packed tokens of a training micro-batch. Twice the longest sequence is a good start.",
        minimum=1,
    )
    forward_max_tokens_per_micro_batch: int = setting(
        0,
        "Cap on packed tokens of a forward-only micro-batch. 0 uses policy.max_tokens_per_micro_batch.",
        minimum=0,
    )
    max_sequences_per_micro_batch: int = setting(
        0,
        "Cap on sequences of a training micro-batch. 0 means unlimited. If set, use 2 or more.",
        minimum=0,
    )
    forward_max_sequences_per_micro_batch: int = setting(
        0,
        "Cap on sequences of a forward-only micro-batch. 0 uses policy.max_sequences_per_micro_batch.",
        minimum=0,
    )
    max_patches_per_micro_batch: int = setting(
        0,
        "Cap on image patches of a training micro-batch, each image once. It bounds the memory of the "
        "vision tower. 0 means unlimited.",
        minimum=0,
    )
    min_micro_batches: int = setting(
        1,
        "Minimum micro-batches per rank and mini-batch, of policy and critic. Raise it if memory is short. "
        "A step with too few sequences left has fewer.",
        minimum=1,
    )
    forward_min_micro_batches: int = setting(
        1,
        "Minimum micro-batches per rank in a forward-only pass of any training role.",
        minimum=1,
    )
    cpu_offload: str = setting("none", CPU_OFFLOAD, choices=("none", "optimizer", "all"))
    reshard_after_forward: bool = setting(
        True,
        "Free gathered parameters after each layer's forward pass (FSDP2). On one GPU, their casts.",
    )
    threads: int = setting(
        0,
        "CPU threads of a worker. 0 divides a node's cores among the role's workers on it.",
        minimum=0,
        maximum=10_000,
    )
    max_mismatch: float = setting(
        0.5,
        "Stop the run if log-probs of engines and trainer differ by more than this in a step: mean, in "
        "nats per token. With equal weights, expect about 1e-6 in float32 and 0.01 to 0.1 in bfloat16. "
        "Stale samples add what the policy has learned since. NaN always stops the run.",
        above=0,
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass
class ReferenceConfig:
    """Frozen policy of a KL penalty in the loss or reward, started only with such a penalty."""

    only_with = (("own reference", "cpu_offload"), ("GPUs", "cpu_offload"))

    path: str = setting(
        "",
        "Model of the reference. If empty, model.path, or with model.lora the policy without its adapters.",
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
class RewardModelConfig:
    """Models whose scores are part of the reward. They use the policy's ranks, parallelism, threads and model
    settings, without adapters.
    """

    only_with = (("GPUs", "cpu_offload"), (".paths", "weights"))

    path: str = setting(
        "",
        "Reward model: a Hugging Face sequence-classification checkpoint with one label and the policy's "
        "tokenizer. Empty disables it.",
    )
    weight: float = setting(1.0, "Weight of its score in the reward.")
    paths: dict[str, str] = setting(
        {},
        "Several reward models by name, `{helpful: models/helpful, short: models/short}`, instead of path.",
    )
    weights: dict[str, float] = setting(
        {}, "Weights of several models' scores by name. Others have `weight`."
    )
    normalize: str = setting(
        "none",
        "`running`: subtract the mean of a model's scores in the run so far and divide by their standard "
        "deviation, before the weight. Validation adds scores as they are.",
        choices=("none", "running"),
    )
    max_tokens_per_micro_batch: int = setting(
        0,
        "Cap on packed tokens of a micro-batch. 0 uses policy.max_tokens_per_micro_batch.",
        minimum=0,
    )
    max_sequences_per_micro_batch: int = setting(
        0,
        "Cap on sequences of a micro-batch. 0 uses policy.max_sequences_per_micro_batch.",
        minimum=0,
    )
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")

    @property
    def named_weights(self) -> dict[str, float]:
        """Weight of each model's score, by name. A single model has none."""
        return {name: self.weights.get(name, self.weight) for name in self.paths} or {
            "": self.weight
        }


@dataclass
class CriticConfig:
    """A model that predicts a value per token, started only with algorithm.advantage=gae. It uses the
    policy's ranks, parallelism, threads and model settings, without adapters.
    """

    only_with = (("GPUs", "cpu_offload"),)

    path: str = setting(
        "",
        "Model that the critic starts from: a reward model, whose head is kept, or a causal LM, whose new "
        "head starts at 0. Empty uses model.path.",
    )
    max_tokens_per_micro_batch: int = setting(
        0,
        "Cap on packed tokens of a training micro-batch. 0 uses policy.max_tokens_per_micro_batch.",
        minimum=0,
    )
    forward_max_tokens_per_micro_batch: int = setting(
        0,
        "Cap on packed tokens of a forward-only micro-batch. 0 uses critic.max_tokens_per_micro_batch.",
        minimum=0,
    )
    max_sequences_per_micro_batch: int = setting(
        0,
        "Cap on sequences of a training micro-batch. 0 uses policy.max_sequences_per_micro_batch.",
        minimum=0,
    )
    forward_max_sequences_per_micro_batch: int = setting(
        0,
        "Cap on sequences of a forward-only micro-batch. 0 uses critic.max_sequences_per_micro_batch.",
        minimum=0,
    )
    warmup_steps: int = setting(
        0, "Steps at the start of a run that train only the critic.", minimum=0
    )
    cpu_offload: str = setting("none", CPU_OFFLOAD, choices=("none", "optimizer", "all"))
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5)
    )
    loss: ValueLossConfig = field(default_factory=ValueLossConfig)
