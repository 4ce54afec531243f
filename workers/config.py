"""Settings of the worker roles: plain dataclasses, importable without torch, Ray or vLLM.

Each field declares its default, documentation and range: `setting(default, "What it does.", ...)`.
`only_with` of a section pairs a condition with the settings that have no effect without it.
`controller.config` composes these into the whole schema and checks them.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from workers.model_config import LoraConfig as LoraConfig
from workers.model_config import ModelConfig as ModelConfig
from workers.setting import setting as setting


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) with linear warm-up."""

    only_with = ((".schedule=linear or cosine", "total_steps, final_learning_rate_ratio"),)

    learning_rate: float = setting(1e-6, "Peak learning rate.", minimum=0, maximum=1, exclusive_minimum=True)
    weight_decay: float = setting(0.0, "Decoupled weight decay, on matrices only.", minimum=0, maximum=100)
    beta1: float = setting(0.9, "Decay of the first moment.", minimum=0, maximum=1, exclusive_maximum=True)
    beta2: float = setting(0.95, "Decay of the second moment.", minimum=0, maximum=1, exclusive_maximum=True)
    epsilon: float = setting(
        1e-8, "Added to the root of the second moment.", minimum=0, maximum=1, exclusive_minimum=True
    )
    max_grad_norm: float = setting(
        1.0, "Gradients are scaled down to this L2 norm.", minimum=0, maximum=10**9, exclusive_minimum=True
    )
    schedule: str = setting("constant", "Learning rate after warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = setting(0, "Optimiser steps of linear warm-up from 0.", minimum=0)
    total_steps: int = setting(
        0,
        "Optimiser steps after which `linear` and `cosine` end; 0 takes the number that follows from run.steps and "
        "batch.",
        minimum=0,
    )
    final_learning_rate_ratio: float = setting(
        0.0, "Final learning rate of `linear` and `cosine`, as a share of the peak.", minimum=0, maximum=1
    )
    max_skipped_steps: int = setting(
        10,
        "The run stops after this many optimiser steps in a row were skipped because loss or gradient was NaN or "
        "infinite.",
        minimum=1,
    )


@dataclass
class ParallelConfig:
    """ranks = pipeline_parallel * dp * context_parallel * tensor_parallel; `workers.model` describes the methods."""

    only_with = (
        (".context_parallel above 1", "context_parallel_method"),
        (".pipeline_parallel above 1", "virtual_stages"),
        ("several ranks", "defer_gradient_reduction"),
    )

    context_parallel: int = setting(
        1,
        "Ranks that share each sequence; the token caps then hold for the group: cap * context_parallel.",
        minimum=1,
        maximum=10_000,
    )
    context_parallel_method: str = setting(
        "ulysses",
        "`ulysses` exchanges heads for tokens (needs attention heads divisible by context_parallel * tensor_parallel); "
        "`ring` passes keys and values from rank to rank, for any number of heads.",
        choices=("ulysses", "ring"),
    )
    tensor_parallel: int = setting(
        1, "Ranks that share each layer's matrices, heads and vocabulary.", minimum=1, maximum=10_000
    )
    replicate: int = setting(
        1,
        "Copies of the sharded model (HSDP): parameters are gathered within dp / replicate ranks, and copies exchange "
        "gradients only. 1 shards over all ranks.",
        minimum=1,
        maximum=10_000,
    )
    expert_parallel: int = setting(
        1,
        "Ranks that share the experts of each layer, out of those that hold different tokens (dp / replicate * "
        "context_parallel * tensor_parallel); tokens travel to their experts and back by all-to-all. For mixtures of "
        "experts only.",
        minimum=1,
        maximum=10_000,
    )
    defer_gradient_reduction: bool = setting(
        False,
        "Reduce gradients over ranks only in the last micro-step of a mini-batch: less traffic, but every rank then "
        "keeps whole gradients in float32, 4 bytes a parameter / tensor_parallel. Copies (replicate) always reduce "
        "over one another in the last micro-step only.",
    )
    pipeline_parallel: int = setting(
        1,
        "Stages, each with a part of the layers, through which micro-batches go one after another (1F1B); policy.ranks "
        "are those of one stage.",
        minimum=1,
        maximum=10_000,
    )
    virtual_stages: int = setting(
        1,
        "Parts of the layers on each stage (interleaved 1F1B): stages wait less, and send more often.",
        minimum=1,
        maximum=10_000,
    )


@dataclass
class PolicyConfig:
    only_with = (
        ("policy's forward pass", "forward_max_tokens, forward_max_sequences"),
        ("forward pass", "forward_min_micro_batches"),
        ("GPUs", "cpu_offload"),
    )

    ranks: int = setting(1, "Data-parallel ranks (one worker actor each).", minimum=1, maximum=100_000)
    max_tokens: int = setting(
        16384, "Cap on packed tokens of a training micro-batch; twice the longest sequence is a good start.", minimum=1
    )
    forward_max_tokens: int = setting(
        0, "Cap on packed tokens of a forward-only micro-batch; 0 takes policy.max_tokens.", minimum=0
    )
    max_sequences: int = setting(
        0, "Cap on sequences of a training micro-batch; 0 is no cap, else 2 or more is advised.", minimum=0
    )
    forward_max_sequences: int = setting(
        0, "Cap on sequences of a forward-only micro-batch; 0 takes policy.max_sequences.", minimum=0
    )
    min_micro_batches: int = setting(
        1,
        "Minimum number of micro-batches of a rank in each mini-batch, of policy and critic; raise it if memory is "
        "short. A step of which fewer sequences are left has as many as these fill.",
        minimum=1,
    )
    forward_min_micro_batches: int = setting(
        1, "Minimum number of micro-batches of a rank in a forward-only pass of any training role.", minimum=1
    )
    cpu_offload: bool = setting(False, "Keep parameters, gradients and optimiser state in host memory (FSDP2).")
    reshard_after_forward: bool = setting(True, "Free gathered parameters after each layer's forward pass (FSDP2).")
    threads: int = setting(
        0, "CPU threads of a worker; 0 divides the node's cores among the role's workers.", minimum=0, maximum=10_000
    )
    max_mismatch: float = setting(
        0.5,
        "The run stops if the log-probs of engines and trainer differ by more than this over a step: mean, in nats a "
        "token. At equal weights it is about 1e-6 in float32 and 0.01 to 0.1 in bfloat16; samples of older weights add "
        "what the policy has learned since. NaN always stops the run.",
        minimum=0,
        exclusive_minimum=True,
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass
class ReferenceConfig:
    """The frozen policy of a KL penalty in the loss or the reward; started only if there is one."""

    only_with = (("own reference", "cpu_offload"), ("GPUs", "cpu_offload"))

    path: str = setting(
        "", "Model of the reference; empty takes model.path, or with model.lora the policy without its adapters."
    )
    forward_max_tokens: int = setting(0, "Cap on packed tokens of a micro-batch; 0 takes policy.max_tokens.", minimum=0)
    forward_max_sequences: int = setting(
        0, "Cap on sequences of a micro-batch; 0 takes policy.max_sequences.", minimum=0
    )
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")


NO_CUT = ("temperature", "max_new_tokens")
"""Settings of sampling that leave every token possible."""


@dataclass
class SamplingConfig:
    temperature: float = setting(1.0, "Softmax temperature; 0 is greedy (validation only).", minimum=0, maximum=100)
    top_p: float = setting(1.0, "Nucleus mass.", minimum=0, maximum=1, exclusive_minimum=True)
    top_k: int = setting(0, "Candidates kept; 0 keeps all.", minimum=0)
    max_new_tokens: int = setting(1024, "Longest response, in tokens.", minimum=1)

    @property
    def cuts(self) -> list[str]:
        """The settings that leave tokens out of what is sampled from, as in `top_k=20`."""
        values = ((each, getattr(self, each.name)) for each in fields(self) if each.name not in NO_CUT)
        return [f"{each.name}={value}" for each, value in values if value != each.default]

    @property
    def log_probs_are_whole(self) -> bool:
        """Whether engines give log-probs of the distribution that the trainer computes, which has no cut.

        vLLM gives them before the temperature and the cut, or after both.
        """
        return self.temperature == 1 or not self.cuts


@dataclass
class RolloutConfig:
    only_with = (
        (".max_staleness above 0", "staleness_window, kv_cache_after_update"),
        ("GPUs", "memory_fraction, enforce_eager"),
        ("CPUs", "cpu_kv_cache_gib, threads"),
        (".environment", "max_turns, max_episode_tokens"),
    )

    replicas: int = setting(
        0,
        "vLLM engines; 0 takes as many as fit on all GPUs of the placement, and 1 on CPUs.",
        minimum=0,
        maximum=100_000,
    )
    tensor_parallel: int = setting(1, "GPUs (or processes) that share one engine.", minimum=1, maximum=10_000)
    samples_per_prompt: int = setting(
        8, "Responses sampled for each prompt: the size of a group.", minimum=1, maximum=100_000
    )
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    placement: str = setting(
        "auto",
        "`colocated` shares the policy's GPUs (sleep and wake, weights by ipc); `apart` has its own (weights by nccl); "
        "`shared_memory` is for CPUs. `auto` is shared_memory without GPUs, else colocated.",
        choices=("auto", "colocated", "apart", "shared_memory"),
    )
    max_staleness: int = setting(
        0,
        "Groups are generated ahead for so many more steps while the policy trains, and go on across updates of its "
        "weights; 0 generates a step's samples with the weights that it trains (see docs/asynchronous.md). Above 0 "
        "ratios are taken to the sampler's log-probs, unless algorithm.loss.rollout_correction is set.",
        minimum=0,
        maximum=1000,
    )
    staleness_window: float = setting(
        0.3,
        "Share of the groups under way, from the oldest, within which a finished group is trained before an older one "
        "that is still generated.",
        minimum=0,
        maximum=1,
        exclusive_minimum=True,
    )
    kv_cache_after_update: str = setting(
        "recompute",
        "What becomes of the keys and values of requests that go on with new weights: `recompute` makes them again, so "
        "that a token's log-prob is that of the weights that sampled it; `keep` saves that time, and prompts that "
        "begin alike are then also read with those of older weights.",
        choices=("recompute", "keep"),
    )
    max_model_tokens: int = setting(
        0,
        "Longest prompt plus response an engine takes; 0 takes data.max_prompt_tokens + sampling.max_new_tokens, or "
        "+ rollout.max_episode_tokens with an environment.",
        minimum=0,
    )
    max_concurrent: int = setting(
        256, "Requests that one engine processes at a time; others wait in the router.", minimum=1, maximum=10**6
    )
    memory_fraction: float = setting(
        0.5,
        "Share of a GPU's memory for an engine (weights and KV cache).",
        minimum=0,
        maximum=1,
        exclusive_minimum=True,
    )
    cpu_kv_cache_gib: float = setting(1.0, "KV cache of an engine on CPU, GiB.", minimum=0, exclusive_minimum=True)
    enforce_eager: bool = setting(False, "Do not capture CUDA graphs. On CPU vLLM is always eager here.")
    engine: dict[str, Any] = setting(
        {},
        "Further arguments of vLLM's engines by their names in vLLM, as in `{quantization: fp8}` (see "
        "docs/rollout-engine.md); those that follow from other settings are refused.",
    )
    max_retries: int = setting(
        2, "Number of times that a failed sample is sent again before it is dropped and counted.", minimum=0
    )
    threads: int = setting(0, "CPU threads of an engine; 0 takes all cores of the node.", minimum=0, maximum=10_000)
    hang_timeout_s: float = setting(
        60.0,
        "Seconds without a finished sample after which an engine is asked whether it is alive, and seconds that it "
        "then has to answer; one that does not is replaced.",
        minimum=0,
        exclusive_minimum=True,
    )
    environment: str = setting(
        "",
        "Environment that answers the policy's turns: a class, `module:Class` or `path/file.py:Class` (see "
        "docs/environments.md); without it a sample is one turn. reward.timeout_s and reward.on_failure apply to it "
        "too.",
    )
    max_turns: int = setting(8, "Most turns of the policy in an episode.", minimum=1, maximum=10**6)
    max_episode_tokens: int = setting(
        0,
        "Most tokens of an episode after its prompt: the policy's, each turn up to sampling.max_new_tokens, and the "
        "environment's; 0 takes max_turns * sampling.max_new_tokens.",
        minimum=0,
    )

    def response_limit(self, sampling: SamplingConfig) -> int:
        """Most tokens after a prompt: of a response, or of an episode's turns and observations."""
        if not self.environment:
            return sampling.max_new_tokens
        return self.max_episode_tokens or self.max_turns * sampling.max_new_tokens


@dataclass
class SupervisedLossConfig:
    """Negative log-likelihood of the tokens to learn; formulas: `workers.model.losses.supervised`."""

    only_with = ((".aggregation=sequence_mean_token_sum_norm", "constant_length"),)

    aggregation: str = setting(
        "token_mean",
        "Aggregation of token losses; every denominator is that of the whole step.",
        choices=("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"),
    )
    constant_length: int = setting(
        0, "Tokens that sequence_mean_token_sum_norm divides a sequence's sum by.", minimum=0
    )


POLICY_LOSS_NAMES = ("ppo_clip", "reinforce", "cispo", "gspo", "gmpo", "sapo", "clip_cov", "kl_cov")


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
        "Truncated importance weights of trainer over sampler: of each `token`, or of the whole `sequence`.",
        choices=("none", "token", "sequence"),
    )
    cap: float = setting(2.0, "Upper limit of importance weights.", minimum=0, exclusive_minimum=True)
    rejection: str = setting(
        "none",
        "Leave out each `token` whose ratio, or each `sequence` whose geometric mean of ratios, is outside the bounds.",
        choices=("none", "token", "sequence"),
    )
    rejection_low: float = setting(
        0.5, "Lower bound of the ratios that are kept.", minimum=0, maximum=1, exclusive_minimum=True
    )
    rejection_high: float = setting(2.0, "Upper bound of the ratios that are kept.", minimum=1)

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected."""
        return not self.weights == self.rejection == "none"


@dataclass
class ValueLossConfig:
    """The critic's loss; formulas: `workers.model.losses.value`."""

    only_with = (("several updates", "clip"),)

    clip: float = setting(
        0.2, "Values further than this from those before the update give no gradient; 0 is plain regression.", minimum=0
    )
    aggregation: str = setting(
        "token_mean",
        "Aggregation of token losses; every denominator is that of the whole mini-batch.",
        choices=("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"),
    )


@dataclass
class GaeConfig:
    """Generalised advantage estimation; formulas: `workers.model.losses.returns`."""

    gamma: float = setting(1.0, "Discount per token.", minimum=0, maximum=1)
    lam: float = setting(
        1.0,
        "Lambda, from 0 (the next value alone: little variance, the critic's bias) to 1 (the whole reward to come).",
        minimum=0,
        maximum=1,
    )
    whiten: bool = setting(True, "Normalise the advantages of a step's tokens to mean 0 and standard deviation 1.")


@dataclass
class RewardModelConfig:
    """A model whose score of prompt and response is part of the reward. It shares the policy's ranks, parallelism,
    threads and model settings (without adapters)."""

    only_with = (("GPUs", "cpu_offload"),)

    path: str = setting(
        "",
        "Reward model: a sequence-classification checkpoint in Hugging Face format with one label, which reads the "
        "policy's tokens; empty is none.",
    )
    weight: float = setting(1.0, "Weight of its score in the reward.")
    max_tokens: int = setting(0, "Cap on packed tokens of a micro-batch; 0 takes policy.max_tokens.", minimum=0)
    max_sequences: int = setting(0, "Cap on sequences of a micro-batch; 0 takes policy.max_sequences.", minimum=0)
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")


@dataclass
class KlInRewardConfig:
    """A penalty on the KL to the reference, subtracted from the rewards: per token with algorithm.advantage=gae or
    reinforce_plus_plus (with baseline or not), per sequence otherwise. Formulas: `workers.model.losses.returns` and
    `controller.algorithm.advantages`."""

    only_with = ((".target above 0", "horizon"),)

    coefficient: float = setting(
        0.0, "Weight of the penalty; with a target, that of the first step. 0 is no penalty.", minimum=0
    )
    estimator: str = setting("k1", "Estimator of the KL (Schulman 2020).", choices=("k1", "k2", "k3", "absolute"))
    target: float = setting(
        0.0, "KL of a response, in nats, to which the weight is adapted step by step; 0 keeps the weight.", minimum=0
    )
    horizon: int = setting(
        10000, "Sequences after which a KL far from its target has changed the weight by about a fifth.", minimum=1
    )


@dataclass
class CriticConfig:
    """The model that predicts a value for every token; started only with algorithm.advantage=gae. It shares the
    policy's ranks, parallelism, threads and model settings (without adapters)."""

    only_with = (("GPUs", "cpu_offload"),)

    path: str = setting(
        "",
        "Model that the critic starts from: a reward model, whose head it keeps, or a causal LM, whose head starts at "
        "0; empty takes model.path.",
    )
    max_tokens: int = setting(
        0, "Cap on packed tokens of a training micro-batch; 0 takes policy.max_tokens.", minimum=0
    )
    forward_max_tokens: int = setting(
        0, "Cap on packed tokens of a forward-only micro-batch; 0 takes critic.max_tokens.", minimum=0
    )
    max_sequences: int = setting(
        0, "Cap on sequences of a training micro-batch; 0 takes policy.max_sequences.", minimum=0
    )
    forward_max_sequences: int = setting(
        0, "Cap on sequences of a forward-only micro-batch; 0 takes critic.max_sequences.", minimum=0
    )
    warmup_steps: int = setting(0, "Steps at the start of a run in which only the critic is trained.", minimum=0)
    cpu_offload: bool = setting(False, "Keep parameters, gradients and optimiser state in host memory (FSDP2).")
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    loss: ValueLossConfig = field(default_factory=ValueLossConfig)


@dataclass
class LossConfig:
    """The policy loss; formulas: the functions in `workers.model.losses`."""

    only_with = (
        (".name=custom", "function, columns, old_entropies"),
        (".name=ppo_clip or cispo or gspo or gmpo or clip_cov or custom", "clip_low, clip_high"),
        (".name=ppo_clip or custom", "dual_clip"),
        (".name=sapo or custom", "sapo_tau_positive, sapo_tau_negative"),
        (".name=clip_cov or kl_cov or custom", "covariance_fraction"),
        (".name=clip_cov or custom", "clip_cov_low, clip_cov_high"),
        (".name=kl_cov or custom", "kl_cov_coefficient"),
        ("old policy", "clip_low, clip_high, dual_clip, sapo_tau_positive, sapo_tau_negative"),
        (".aggregation=sequence_mean_token_sum_norm", "constant_length"),
        (".kl_coefficient above 0", "kl_estimator, kl_correction"),
    )

    name: str = setting(
        "ppo_clip", "Policy loss; `custom` takes algorithm.loss.function.", choices=(*POLICY_LOSS_NAMES, "custom")
    )
    function: str = setting(
        "",
        "A custom loss, `module:function` or `path/file.py:function`, decorated with "
        "`workers.model.losses.policy_loss`; every node of the policy has the file under the same path.",
    )
    columns: str = setting(
        "",
        "Columns of the training records that a custom loss reads, by name, as in `level,source`: numbers as tensors, "
        "anything else as objects.",
    )
    old_entropies: bool = setting(
        False,
        "Give a custom loss the entropy of every token before the first update, as the column `old_entropies`; this "
        "takes a forward pass if there is none yet.",
    )
    clip_low: float = setting(
        0.2, "Lower clip: ratios below 1 - clip_low give no gradient (gmpo: of the log-ratio).", minimum=0, maximum=1
    )
    clip_high: float = setting(
        0.2, "Upper clip: ratios above 1 + clip_high give no gradient (gmpo: of the log-ratio).", minimum=0
    )
    dual_clip: float = setting(
        0.0, "Bound on the loss of a token with negative advantage, in advantages; 0 is none, else above 1.", minimum=0
    )
    sapo_tau_positive: float = setting(
        1.0, "Steepness of SAPO's gate at positive advantages.", minimum=0, exclusive_minimum=True
    )
    sapo_tau_negative: float = setting(
        1.05, "Steepness of SAPO's gate at other advantages.", minimum=0, exclusive_minimum=True
    )
    covariance_fraction: float = setting(
        0.0002,
        "Share of a mini-batch's tokens that clip_cov or kl_cov holds back.",
        minimum=0,
        maximum=1,
        exclusive_minimum=True,
    )
    clip_cov_low: float = setting(1.0, "Covariance above which clip_cov draws tokens.")
    clip_cov_high: float = setting(5.0, "Covariance below which clip_cov draws tokens.")
    kl_cov_coefficient: float = setting(1.0, "Weight of kl_cov's penalty.", minimum=0)
    aggregation: str = setting(
        "auto",
        "Aggregation of token losses; every denominator is that of the whole mini-batch. `auto` is that of the loss's "
        "paper.",
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
        0, "Tokens that sequence_mean_token_sum_norm divides a sequence's sum by (Dr. GRPO).", minimum=0
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus.", minimum=0)
    kl_coefficient: float = setting(
        0.0, "Weight of the KL to the reference in the loss; 0 starts no reference.", minimum=0
    )
    kl_estimator: str = setting("k3", "Estimator of the KL (Schulman 2020).", choices=("k1", "k2", "k3", "absolute"))
    kl_correction: str = setting(
        "none",
        "Gradient of the KL. `none`: that of the estimate, which for k1 and k3 is not the KL's. `straight_through`: "
        "that of k2, which is, for samples of the policy itself (verl's `k3+`). `importance`: k1 or k3 times the ratio "
        "to the old policy, right for older samples too (DeepSeek-V3.2).",
        choices=("none", "straight_through", "importance"),
    )
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
