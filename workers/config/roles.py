"""Settings of the worker roles and engines: plain dataclasses, importable without torch, Ray or vLLM.

Each field declares its default, documentation and range: `setting(default, "What it does.", ...)`. A
section's `only_with` lists conditions and the settings that need them. `controller.config` combines and
checks the sections.
"""

from dataclasses import dataclass, field
from typing import Any

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
        1, "Ranks that share each layer's matrices, heads and vocabulary.", minimum=1, maximum=10_000
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
        1, "Data-parallel ranks: each trains on its own sequences.", minimum=1, maximum=100_000
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
        0, "Cap on sequences of a training micro-batch. 0 means unlimited. If set, use 2 or more.", minimum=0
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
        1, "Minimum micro-batches per rank in a forward-only pass of any training role.", minimum=1
    )
    cpu_offload: str = setting("none", CPU_OFFLOAD, choices=("none", "optimizer", "all"))
    reshard_after_forward: bool = setting(
        True, "Free gathered parameters after each layer's forward pass (FSDP2)."
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
        0, "Cap on packed tokens of a micro-batch. 0 uses policy.max_tokens_per_micro_batch.", minimum=0
    )
    forward_max_sequences_per_micro_batch: int = setting(
        0, "Cap on sequences of a micro-batch. 0 uses policy.max_sequences_per_micro_batch.", minimum=0
    )
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")


@dataclass
class SamplingConfig:
    """As vLLM's SamplingParams. docs/conversations.md says which settings need
    algorithm.loss.rollout_correction.
    """

    only_with = ((".max_thinking_tokens above 0", "end_of_thinking"),)

    temperature: float = setting(
        1.0, "Softmax temperature. 0 is greedy (validation only).", minimum=0, maximum=2
    )
    top_p: float = setting(1.0, "Probability mass of nucleus sampling.", above=0, maximum=1)
    top_k: int = setting(0, "Number of candidate tokens. 0 keeps all.", minimum=0)
    min_p: float = setting(
        0.0, "Minimum probability, relative to the likeliest token's.", minimum=0, maximum=1
    )
    max_new_tokens: int = setting(1024, "Maximum response length, in tokens.", minimum=1)
    min_new_tokens: int = setting(0, "Minimum response length, in tokens: no end token before.", minimum=0)
    stop: list[str] = setting(
        [],
        "Texts that end a response (or a turn), special tokens included. The tokens up to the end of the "
        "text are kept and trained.",
    )
    stop_token_ids: list[int] = setting(
        [],
        "Ids of further end tokens. The model's own, also of generation_config.json, always end a response.",
    )
    max_thinking_tokens: int = setting(
        0,
        "Close reasoning that is still open after this many tokens of a turn, and sample the answer. 0 "
        "never does. See docs/conversations.md.",
        minimum=0,
    )
    end_of_thinking: str = setting(
        "",
        "Text that closes it, with the end marker of the model's reasoning. Empty is that alone, such as "
        "`</think>`.",
    )
    repetition_penalty: float = setting(
        1.0, "Divides positive logits of tokens in prompt or response, and multiplies negative ones.", above=0
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from logits of tokens in the response.", minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted from logits, for each time that a token is in the response.", minimum=-2, maximum=2
    )
    logit_bias: dict[int, float] = setting({}, "Added to the logits of token ids, `{151667: -5}`.")
    bad_words: list[str] = setting([], "Texts whose last token is never sampled after their other tokens.")
    structured_outputs: dict[str, Any] = setting(
        {},
        "Form of a response: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar`, "
        "`structural_tag`.",
    )

    def _changed(self, *names: str) -> list[str]:
        defaults = type(self)()
        values = ((name, getattr(self, name)) for name in names)
        return [f"{name}={value}" for name, value in values if value != getattr(defaults, name)]

    @property
    def cuts(self) -> list[str]:
        """Settings that exclude unlikely tokens from sampling, such as `top_k=20`."""
        return self._changed("top_p", "top_k", "min_p")

    @property
    def changes(self) -> list[str]:
        """Settings with which likely tokens have other probabilities than the policy gives them."""
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return self._changed("min_new_tokens", *penalties, "logit_bias", "bad_words", "structured_outputs")

    @property
    def log_probs_are_whole(self) -> bool:
        """Whether engines report log-probs of the full distribution, as the trainer computes them."""
        # vLLM reports them before temperature, cut and changes, or after all.
        return not self.changes and (self.temperature == 1 or not self.cuts)

    @property
    def undivided(self) -> list[str]:
        """Settings that read the whole response, which must be sampled in one request."""
        return self._changed("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs")

    @property
    def may_continue(self) -> bool:
        """Whether another request can sample the rest of a response, whose beginning it reads as a prompt."""
        return not (self.undivided or self.stop or self.max_thinking_tokens)


HTTP, GATEWAY_KEY = "http", "BALLAST_GATEWAY_KEY"
"""Value of rollout.agent for agents elsewhere, and the environment variable with their key."""


@dataclass
class GatewayConfig:
    """The HTTP server through which agents reach the policy. The run's own agents use 127.0.0.1 and a free
    port.
    """

    only_with = (("rollout.agent=http", "host, port"),)

    host: str = setting("127.0.0.1", "Address that listens for agents elsewhere.")
    port: int = setting(8700, "Port that listens for agents elsewhere.", minimum=1, maximum=65535)
    max_request_mib: float = setting(
        8.0, "Largest body of a request, in MiB. Larger ones are refused.", above=0
    )
    max_concurrent_requests: int = setting(
        64,
        "Requests of one session that are answered at the same time. Others are refused.",
        minimum=1,
        maximum=10**6,
    )


@dataclass
class RolloutConfig:
    only_with = (
        (".max_staleness above 0", "out_of_order_window, kv_cache_after_update"),
        ("GPUs", "gpu_memory_utilization, enforce_eager"),
        ("CPUs", "cpu_kv_cache_gib, threads"),
        ("episodes", "max_turns, max_episode_tokens, tool_parser, history"),
        ("reasoning", "reasoning_parser"),
        (".tools", "max_tool_calls, max_tool_characters"),
        ("an agent", "gateway, agent_timeout_s"),
        ("an agent's process", "agent_memory_gib, agent_processes"),
    )

    replicas: int = setting(
        0,
        "Number of vLLM engines. 0 uses as many as fit on the placement's GPUs, and 1 on CPUs.",
        minimum=0,
        maximum=100_000,
    )
    tensor_parallel: int = setting(1, "GPUs (or processes) that share one engine.", minimum=1, maximum=10_000)
    samples_per_prompt: int = setting(
        8, "Responses sampled per prompt: the group size.", minimum=1, maximum=100_000
    )
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    placement: str = setting(
        "auto",
        "`colocated` shares the policy's GPUs (sleep and wake, weights by ipc). `apart` has its own GPUs "
        "(weights by nccl). `shared_memory` is for CPUs. `auto` is shared_memory without GPUs, else "
        "colocated.",
        choices=("auto", "colocated", "apart", "shared_memory"),
    )
    max_staleness: int = setting(
        0,
        "Generate groups up to this many steps ahead while the policy trains. They continue across weight "
        "updates. 0 generates each step's samples with the current weights (see docs/asynchronous.md). "
        "Above 0, ratios use the sampler's log-probs, unless algorithm.loss.rollout_correction is set.",
        minimum=0,
        maximum=1000,
    )
    out_of_order_window: float = setting(
        0.3,
        "Share of the groups in progress, oldest first, in which a finished group may be trained before an "
        "unfinished older one.",
        above=0,
        maximum=1,
    )
    kv_cache_after_update: str = setting(
        "auto",
        "KV cache of samples that continue after a weight update. `recompute` makes it anew, so log-probs "
        "match the weights that sampled the token. `keep` saves that time, and log-probs are those of old "
        "and new weights together. `auto` keeps it for rollout.max_staleness updates. Samples that begin "
        "later never read it.",
        choices=("auto", "keep", "recompute"),
    )
    weight_sync: str = setting(
        "full",
        "Weights that an update sends to the engines. `delta`: those that changed, for slow networks. "
        "Policy rank 0 and every engine then keep a copy in host memory, of the model's size. Engines on "
        "GPUs of their own get weights by the host, and each can be replaced alone (see "
        "docs/placement.md).",
        choices=("full", "delta"),
    )
    max_model_tokens: int = setting(
        0,
        "Maximum prompt plus response that an engine accepts. 0 uses data.max_prompt_tokens + "
        "sampling.max_new_tokens, or + rollout.max_episode_tokens with an environment or tools.",
        minimum=0,
    )
    max_concurrent: int = setting(
        256,
        "Requests that one engine processes at the same time. Others wait in the router.",
        minimum=1,
        maximum=10**6,
    )
    gpu_memory_utilization: float = setting(
        0.0,
        "Share of a GPU's memory for an engine (weights and KV cache). 0 is 0.5 for colocated engines, and "
        "0.9 for engines with their own GPUs.",
        minimum=0,
        maximum=1,
    )
    cpu_kv_cache_gib: float = setting(1.0, "KV cache of an engine on CPU, in GiB.", above=0)
    enforce_eager: bool = setting(False, "Disable CUDA graphs. On CPU, vLLM always runs eagerly here.")
    engine: dict[str, Any] = setting(
        {},
        "Further vLLM engine arguments, by vLLM's names, such as `{quantization: fp8}` (see "
        "docs/rollout-engine.md). Arguments that other settings determine are refused.",
    )
    max_retries: int = setting(
        2, "How often a failed sample is retried before it is dropped and counted.", minimum=0
    )
    threads: int = setting(
        0, "CPU threads of an engine. 0 uses all cores of the node.", minimum=0, maximum=10_000
    )
    hang_timeout_s: float = setting(
        60.0,
        "After this many seconds without a finished sample, an engine is asked whether it is alive. If it "
        "does not answer within the same time, it is replaced.",
        above=0,
    )
    environment: str = setting(
        "",
        "Environment that answers the policy's turns: a class, `module:Class` or `path/file.py:Class` (see "
        "docs/environments.md). Without it, a sample is one turn. reward.timeout_s and reward.on_failure "
        "apply to it too. Or an environment of the package verifiers, `verifiers:NAME`, which runs as an "
        "agent (see docs/agents.md).",
    )
    max_turns: int = setting(
        8, "Maximum turns of the policy in an episode, or in a session of an agent.", minimum=1, maximum=10**6
    )
    max_episode_tokens: int = setting(
        0,
        "Maximum tokens of an episode after its prompt: the policy's turns (each up to "
        "sampling.max_new_tokens) and the environment's, as far as they are in the next turn's context. 0 "
        "uses max_turns * sampling.max_new_tokens. An agent's requests, with their answers, have at most "
        "data.max_prompt_tokens more.",
        minimum=0,
    )

    tools: str = setting(
        "",
        "Tools that the policy may call: the public functions of a module or of path/file.py, with type "
        "hints and docstrings (see docs/conversations.md). A turn without a call ends the episode, and "
        "reward functions score it. reward.timeout_s applies to each call.",
    )
    max_tool_calls: int = setting(
        16, "Calls of one turn that are made. Others are answered with an error.", minimum=1
    )
    max_tool_characters: int = setting(
        4096, "Characters of a tool's result that the policy reads. The rest is cut, with a mark.", minimum=1
    )
    agent: str = setting(
        "",
        "Agent that asks the policy by OpenAI's or Anthropic's API: a function `run(record, base_url, "
        "api_key)`, `module:function` or `path/file.py:function`, which returns the reward or nothing. "
        "`http`: agents elsewhere, which ask for sessions (see docs/agents.md). reward.on_failure applies "
        "to it too.",
    )
    agent_command: str = setting(
        "",
        "Agent that is a command line, such as `python my_agent.py`. It reads the record as JSON from "
        "standard input, and OPENAI_BASE_URL and OPENAI_API_KEY from its environment.",
    )
    agent_timeout_s: float = setting(600.0, "Time limit in seconds for one session of an agent.", above=0)
    agent_memory_gib: float = setting(
        4.0, "Memory of an agent's processes in one session, in GiB. With more, they are killed.", above=0
    )
    agent_processes: int = setting(
        64, "Processes of an agent in one session. With more, they are killed.", minimum=1, maximum=10**6
    )
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tool_parser: str = setting(
        "",
        "vLLM's parser of tool calls, by name (see docs/conversations.md). Empty finds it from the chat "
        "template.",
    )
    reasoning_parser: str = setting(
        "",
        "vLLM's parser of reasoning, by name, as rollout.tool_parser. Empty finds it from the chat template.",
    )
    history: str = setting(
        "auto",
        "What a turn finds of the turns before it, in a chat. `template`: what the chat template makes of "
        "the whole conversation, as when the model is served. If it drops earlier thoughts, the sample "
        "becomes several rows. `keep`: all sampled tokens as they are. `auto`: `template`, or `keep` if "
        "the algorithm needs one row a sample (see docs/conversations.md).",
        choices=("auto", "keep", "template"),
    )

    def gpu_share(self, placement: str) -> float:
        """Return `gpu_memory_utilization` for engines that are `colocated` or `apart`."""
        return self.gpu_memory_utilization or (0.9 if placement == "apart" else 0.5)

    @property
    def code(self) -> list[str]:
        """What makes samples episodes: one of environment, tools and agents, or nothing."""
        return [name for name in (self.environment, self.tools, self.agent, self.agent_command) if name]

    @property
    def runs_agent(self) -> bool:
        """Whether samples are sessions of an agent at the gateway."""
        return bool(self.agent or self.agent_command) or self.environment.startswith("verifiers:")

    @property
    def plays_episodes(self) -> bool:
        return bool(self.code)

    def response_limit(self, sampling: SamplingConfig) -> int:
        """Maximum tokens after a prompt: of a response, or of an episode's turns and observations."""
        if not self.plays_episodes:
            return sampling.max_new_tokens
        return self.max_episode_tokens or self.max_turns * sampling.max_new_tokens


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
        0, "Cap on packed tokens of a micro-batch. 0 uses policy.max_tokens_per_micro_batch.", minimum=0
    )
    max_sequences_per_micro_batch: int = setting(
        0, "Cap on sequences of a micro-batch. 0 uses policy.max_sequences_per_micro_batch.", minimum=0
    )
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")

    @property
    def named_weights(self) -> dict[str, float]:
        """Weight of each model's score, by name. A single model has none."""
        return {name: self.weights.get(name, self.weight) for name in self.paths} or {"": self.weight}


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
    warmup_steps: int = setting(0, "Steps at the start of a run that train only the critic.", minimum=0)
    cpu_offload: str = setting("none", CPU_OFFLOAD, choices=("none", "optimizer", "all"))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    loss: ValueLossConfig = field(default_factory=ValueLossConfig)
