"""Settings of sampling: vLLM's engines, the options of each request, and the gateway of agents.

Plain dataclasses, as in `roles.py`, which gives them to everybody else.
"""

from dataclasses import dataclass, field
from typing import Any

from workers.config.engine_range import MOST_ENGINES, Count, EngineRange, read_range
from workers.config.sandbox import SandboxConfig
from workers.config.setting import setting


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
    min_new_tokens: int = setting(
        0, "Minimum response length, in tokens: no end token before.", minimum=0
    )
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
        1.0,
        "Divides positive logits of tokens in prompt or response, and multiplies negative ones.",
        above=0,
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from logits of tokens in the response.", minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from logits, for each time that a token is in the response.",
        minimum=-2,
        maximum=2,
    )
    logit_bias: dict[int, float] = setting(
        {}, "Added to the logits of token ids, `{151667: -5}`."
    )
    bad_words: list[str] = setting(
        [], "Texts whose last token is never sampled after their other tokens."
    )
    structured_outputs: dict[str, Any] = setting(
        {},
        "Form of a response: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar`, "
        "`structural_tag`.",
    )

    def _list_changed(self, *names: str) -> list[str]:
        defaults = type(self)()
        values = ((name, getattr(self, name)) for name in names)
        return [
            f"{name}={value}" for name, value in values if value != getattr(defaults, name)
        ]

    @property
    def cuts(self) -> list[str]:
        """Settings that exclude unlikely tokens from sampling, such as `top_k=20`."""
        return self._list_changed("top_p", "top_k", "min_p")

    @property
    def changes(self) -> list[str]:
        """Settings with which likely tokens have other probabilities than the policy gives them."""
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return self._list_changed(
            "min_new_tokens", *penalties, "logit_bias", "bad_words", "structured_outputs"
        )

    @property
    def log_probs_are_whole(self) -> bool:
        """Whether engines report log-probs of the full distribution, as the trainer computes them."""
        # vLLM reports them before temperature, cut and changes, or after all.
        return not self.changes and (self.temperature == 1 or not self.cuts)

    @property
    def undivided(self) -> list[str]:
        """Settings that read the whole response, which must be sampled in one request."""
        return self._list_changed(
            "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs"
        )

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
    port: int = setting(
        8700, "Port that listens for agents elsewhere.", minimum=1, maximum=65535
    )
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
        ("code in a sandbox", "sandbox"),
    )

    replicas: Count = setting(
        0,
        "Number of vLLM engines. 0 uses as many as fit on the placement's GPUs, and 1 on CPUs. A range, "
        "such as `1..4`, starts with its minimum, adds engines up to its maximum where the cluster has "
        "room, and goes on with fewer if they are lost (see docs/placement.md).",
        minimum=0,
        maximum=MOST_ENGINES,
    )
    tensor_parallel: int = setting(
        1, "GPUs (or processes) that share one engine.", minimum=1, maximum=10_000
    )
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
    enforce_eager: bool = setting(
        False, "Disable CUDA graphs. On CPU, vLLM always runs eagerly here."
    )
    engine: dict[str, Any] = setting(
        {},
        "Further vLLM engine arguments, by vLLM's names, such as `{quantization: fp8}` (see "
        "docs/rollout-engine.md). Arguments that other settings determine are refused.",
    )
    max_retries: int = setting(
        2,
        "How often a failed sample is retried before it is dropped and counted.",
        minimum=0,
    )
    threads: int = setting(
        0,
        "CPU threads of an engine. 0 uses all cores of the node.",
        minimum=0,
        maximum=10_000,
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
        "agent (see docs/agents.md). Or Harbor's tasks, `harbor:FOLDER`, in rollout.sandbox (see "
        "docs/tasks.md), or a server of OpenEnv, `openenv:URL`, or a package that has one, "
        "`openenv:PACKAGE` (see docs/openenv.md).",
    )
    max_turns: int = setting(
        8,
        "Maximum turns of the policy in an episode, or in a session of an agent.",
        minimum=1,
        maximum=10**6,
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
        4096,
        "Characters of a tool's result that the policy reads. The rest is cut, with a mark.",
        minimum=1,
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
    agent_timeout_s: float = setting(
        600.0, "Time limit in seconds for one session of an agent.", above=0
    )
    agent_memory_gib: float = setting(
        4.0,
        "Memory of an agent's processes in one session, in GiB. With more, they are killed.",
        above=0,
    )
    agent_processes: int = setting(
        64,
        "Processes of an agent in one session. With more, they are killed.",
        minimum=1,
        maximum=10**6,
    )
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
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
    def engine_range(self) -> EngineRange:
        """Return `replicas` as a range, of 0 for a number that follows from the GPUs. Raises ConfigError."""
        return read_range(self.replicas)

    @property
    def code(self) -> list[str]:
        """What makes samples episodes: one of environment, tools and agents, or nothing."""
        return [
            name
            for name in (self.environment, self.tools, self.agent, self.agent_command)
            if name
        ]

    @property
    def runs_agent(self) -> bool:
        """Whether samples are sessions of an agent at the gateway."""
        return bool(self.agent or self.agent_command) or self.environment.startswith(
            "verifiers:"
        )

    @property
    def plays_episodes(self) -> bool:
        return bool(self.code)

    def response_limit(self, sampling: SamplingConfig) -> int:
        """Maximum tokens after a prompt: of a response, or of an episode's turns and observations."""
        if not self.plays_episodes:
            return sampling.max_new_tokens
        return self.max_episode_tokens or self.max_turns * sampling.max_new_tokens
