"""Memory of a GPU, estimated before there is one: plain arithmetic on config.json and the settings.

    config.json --> ModelShape --+
    settings --------------------+--> Parts while training | Parts while generating --> the larger against the GPU

P parameters, s ranks that share them (data-parallel ranks / replicate * context * tensor parallel), b bytes of the
compute type (2 or 4), T the cap on a micro-batch's tokens on one rank, L one layer's parameters, R those of the root
(embedding, output layer):

    weights        4 P / s                       float32, sharded by FSDP2
    gradients      4 P / s                       the same; 4 A / s with adapters of A parameters
    AdamW          8 P / s                       two moments; 8 A / s with adapters
    gathered       (2 b + 4)(2 L + R)            parameters, gradients, and gradients in float32 on their way, of two
                                                 layers and the root; + b (P - 2 L - R) where nothing is resharded
    activations    n T a                         a bytes a token and layer, `ModelShape.activation_bytes_per_token`;
                                                 with gradient checkpointing n T 2 h + T a: inputs of all, one layer
    log-probs      3 x 4 V c                     logits, their softmax and gradient of a chunk of c tokens, float32
    reference      4 P / s                       of its own P, where there is a KL
    critic         16 P / s                      of its own P: weights, gradients, AdamW (PPO)
    reward model   4 P / s                       of its own P
    engine         memory_fraction x GPU         vLLM's share: weights, KV cache, its own workspace

Roles compute in turn: gathered, activations and log-probs are those of the role that needs most of each, with its own
cap. One that is not trained gathers b (2 L + R), and keeps of a micro-batch the T a of the layer it is in.

While engines sleep their weights are in host memory. While they generate, the sharded states stay where they are. Not
counted: the CUDA context of each process, NCCL's buffers, fragmentation; for them a tenth of the GPU is left free.

Of a node's host memory, which `host_memory` adds up: 4 P while rank 0 reads the files of the largest model, 2 P for
each sleeping engine, and what is offloaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from controller.config import Config
from controller.preflight.model_shape import ModelShape
from workers.errors import ConfigError

GIB = 2**30
USABLE_SHARE = 0.9
"""Of a GPU's memory, what the estimate may fill."""

Parts = dict[str, float]
"""GiB by what takes them."""


@dataclass(frozen=True)
class GpuMemory:
    """GiB of the fullest GPU: `training` while a micro-batch is computed, `generating` while engines sample.

    engine_weights and kv_tokens: GiB of one GPU's share of an engine's weights, tokens that its KV cache has room for.
    cap: the setting that limits the activations.
    """

    training: Parts
    generating: Parts
    engine_weights: float
    kv_tokens: int
    cap: str

    @property
    def peak(self) -> float:
        """GiB at the fuller of both times."""
        return max(sum(self.training.values()), sum(self.generating.values()))


Shapes = Mapping[str, ModelShape]
"""Of the training roles beside the policy, by name: reference, critic, reward_model."""
NO_OTHERS: Shapes = {}
BYTES_A_PARAMETER = {"reference": 4, "critic": 16, "reward_model": 4}
"""Of what such a role keeps between micro-batches: weights, and of the critic also gradients and AdamW's moments."""


def gpu_memory(config: Config, shape: ModelShape, gpu_gib: float, others: Shapes = NO_OTHERS) -> GpuMemory:
    """The estimate for a run on GPUs of `gpu_gib`. shape: the policy's. others: of the roles that the run has."""
    states = sharded_states(config, shape, others)
    share = config.rollout.memory_fraction * gpu_gib
    engine_weights = 2 * shape.parameters / config.rollout.tensor_parallel / GIB
    apart = config.rollout_placement == "apart"
    kv_bytes = shape.kv_bytes_per_token / config.rollout.tensor_parallel
    return GpuMemory(
        training=states | working_memory(config, shape, others),
        generating={"engine": share} if apart else states | {"engine": share},
        engine_weights=engine_weights,
        kv_tokens=max(0, int((share - engine_weights) * GIB / kv_bytes)),
        cap=max(passes(config, shape, others), key=partial(activations, config)).cap,
    )


def host_memory(config: Config, shape: ModelShape, *, ranks: int, engines: int, others: Shapes = NO_OTHERS) -> Parts:
    """GiB of the first node's host memory, which has `ranks` policy workers, rank 0 among them, and `engines`."""
    sharers = _sharers(config)
    here = ranks * shape.parameters / sharers / GIB
    parts = {"model as it is read": 4 * max(each.parameters for each in (shape, *others.values())) / GIB}
    if config.rollout_placement == "colocated":
        parts["engines asleep"] = engines * 2 * shape.parameters / GIB
    if config.policy.cpu_offload:
        parts["policy"] = 4 * here + 12 * here * trained_parameters(config, shape) / shape.parameters
    for role in others:
        if _is_offloaded(config, role):
            parts[role] = BYTES_A_PARAMETER[role] * ranks * others[role].parameters / sharers / GIB
    if config.model.activation_offload:
        parts["activations"] = ranks * 2 * shape.hidden * shape.layers * config.policy.max_tokens / GIB
    return parts


def sharded_states(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> Parts:
    """What a rank keeps between micro-batches, of all roles that share its GPU."""
    sharers = _sharers(config)
    whole, trained = shape.parameters / sharers / GIB, trained_parameters(config, shape) / sharers / GIB
    parts = {}
    if not config.policy.cpu_offload:
        parts = {"weights": 4 * whole, "gradients": 4 * trained, "AdamW": 8 * trained}
    for role in others:
        if not _is_offloaded(config, role):
            parts[role] = BYTES_A_PARAMETER[role] * others[role].parameters / sharers / GIB
    return parts


def _sharers(config: Config) -> int:
    return config.training_workers // config.policy.parallel.replicate


def _is_offloaded(config: Config, role: str) -> bool:
    return {
        "reference": config.reference.cpu_offload,
        "critic": config.critic.cpu_offload,
        "reward_model": config.reward.model.cpu_offload,
    }[role]


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """P, or those of the adapters: rank (inputs + outputs) of every module that has one."""
    lora = config.model.lora
    if not lora.rank:
        return shape.parameters
    names = {name.strip() for name in lora.target_modules.split(",")}
    sizes = [size for name, size in shape.linear_modules.items() if "all-linear" in names or name in names]
    return shape.layers * sum(lora.rank * sum(size) for size in sizes)


@dataclass(frozen=True)
class Pass:
    """What a role does with a micro-batch of at most `tokens` on a rank, as the setting `cap` says: forward alone, or
    backward too."""

    shape: ModelShape
    tokens: int
    cap: str
    trains: bool


def passes(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> Iterator[Pass]:
    """Every pass of the run's roles over a batch; they take turns on a GPU."""
    yield Pass(shape, config.policy.max_tokens, "policy.max_tokens", trains=True)
    yield Pass(shape, config.forward_max_tokens, "policy.forward_max_tokens", trains=False)
    if "reference" in others:
        tokens = config.reference_max_tokens
        yield Pass(others["reference"], tokens, "reference.forward_max_tokens", trains=False)
    if "critic" in others:
        yield Pass(others["critic"], config.critic_max_tokens, "critic.max_tokens", trains=True)
        yield Pass(others["critic"], config.critic_forward_max_tokens, "critic.forward_max_tokens", trains=False)
    if "reward_model" in others:
        yield Pass(others["reward_model"], config.reward_model_max_tokens, "reward.model.max_tokens", trains=False)


def working_memory(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> Parts:
    """What a rank needs while it computes a micro-batch that fills its cap: of each part, the pass that needs most."""
    run = list(passes(config, shape, others))
    width, tensor_parallel = _width(config), config.policy.parallel.tensor_parallel
    return {
        "gathered": max(gathered(config, each) for each in run) / tensor_parallel / GIB,
        "activations": max(activations(config, each) for each in run) * (width / 2) / GIB,
        "log-probs": 12 * shape.vocabulary / tensor_parallel * config.model.logprob_chunk_tokens / GIB,
    }


def _width(config: Config) -> int:
    """Bytes of a number in the compute type."""
    return 4 if config.model.dtype == "float32" else 2


def gathered(config: Config, each: Pass) -> float:
    """Bytes of whole parameters, and where it trains of their gradients, that a rank holds at one time."""
    width, shape = _width(config), each.shape
    moving = min(2 * shape.layer_parameters + shape.root_parameters, shape.parameters)
    stays = (each.trains and not config.policy.reshard_after_forward) or config.training_workers == 1
    whole = width * (shape.parameters - moving) if stays else 0
    return (2 * width + 4 if each.trains else width) * moving + whole


def activations(config: Config, each: Pass) -> float:
    """Bytes that a full micro-batch keeps until its backward pass, or of the layer it is in, in half precision."""
    tensor_parallel, shape = config.policy.parallel.tensor_parallel, each.shape
    layer = each.tokens * shape.activation_bytes_per_token(tensor_parallel)
    if not each.trains:
        return layer
    if not config.model.gradient_checkpointing:
        return shape.layers * layer
    inputs = each.tokens * 2 * shape.hidden * shape.layers / tensor_parallel
    return layer if config.model.activation_offload else inputs + layer


def check_memory(config: Config, memory: GpuMemory, gpu_gib: float) -> None:
    """Raise ConfigError, with what to change, if the estimate does not fit into a GPU of `gpu_gib`."""
    room, share = USABLE_SHARE * gpu_gib, config.rollout.memory_fraction * gpu_gib
    if sum(memory.training.values()) > room:
        largest = max(memory.training, key=lambda name: memory.training[name])
        raise ConfigError(
            f"training needs about {sum(memory.training.values()):.1f} GiB of a GPU, {memory.training[largest]:.1f} of "
            f"them for {largest}, and {room:.1f} are to be used; {_advice(config, largest, memory.cap)}."
        )
    if memory.kv_tokens < config.max_model_tokens:
        raise ConfigError(
            f"rollout.memory_fraction={config.rollout.memory_fraction} gives an engine {share:.1f} GiB of a GPU, its "
            f"weights take {memory.engine_weights:.1f}, and the rest holds {memory.kv_tokens:,} tokens of the "
            f"{config.max_model_tokens:,} of one sequence; raise it, or rollout.tensor_parallel."
        )
    if sum(memory.generating.values()) > room:
        states = sum(memory.generating.values()) - share
        raise ConfigError(
            f"generation needs {share:.1f} GiB of a GPU for an engine beside {states:.1f} of training "
            f"states, and {room:.1f} are to be used; lower rollout.memory_fraction, share the states over more ranks "
            "(policy.ranks), or set rollout.placement=apart."
        )


def check_host(parts: Parts, memory_gib: float) -> None:
    """Raise ConfigError if `parts` of the first node's host memory are above `memory_gib` (0: not known)."""
    needed = sum(parts.values())
    if memory_gib and needed > memory_gib:
        raise ConfigError(
            f"node 0 needs about {needed:.1f} GiB of host memory and has {memory_gib:g}; use larger nodes, or fewer "
            "engines or offloaded states on one (rollout.replicas, policy.cpu_offload)."
        )


SECTIONS = {"reference": "reference", "critic": "critic", "reward_model": "reward.model"}
"""Of the settings of the roles beside the policy."""


def _advice(config: Config, largest: str, cap: str) -> str:
    if largest == "activations" and not config.model.gradient_checkpointing:
        return f"set model.gradient_checkpointing=true or lower {cap}"
    if largest == "activations":
        return f"lower {cap}, or raise policy.parallel.context_parallel"
    if largest == "log-probs":
        return "lower model.logprob_chunk_tokens"
    if largest == "gathered" and (config.uses_critic or config.uses_reward_model):  # no tensor parallelism with these
        return "take smaller models, or larger GPUs"
    if largest == "gathered":
        return "raise policy.parallel.tensor_parallel"
    return f"raise policy.ranks, or set {SECTIONS.get(largest, 'policy')}.cpu_offload=true"
