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
    reference      4 P / s                       where the loss has a KL term
    critic         16 P / s                      of the critic's own P: weights, gradients, AdamW (PPO)
    engine         memory_fraction x GPU         vLLM's share: weights, KV cache, its own workspace

While engines sleep their weights are in host memory. While they generate, the sharded states stay where they are. Not
counted: the CUDA context of each process, NCCL's buffers, fragmentation; for them a tenth of the GPU is left free.

Of a node's host memory, which `host_memory` adds up: 4 P while rank 0 reads the files, 2 P for each sleeping engine,
and what is offloaded.
"""

from dataclasses import dataclass

from controller.config import Config
from controller.model_shape import ModelShape
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
    """

    training: Parts
    generating: Parts
    engine_weights: float
    kv_tokens: int

    @property
    def peak(self) -> float:
        """GiB at the fuller of both times."""
        return max(sum(self.training.values()), sum(self.generating.values()))


def gpu_memory(config: Config, shape: ModelShape, gpu_gib: float, critic: ModelShape | None = None) -> GpuMemory:
    """The estimate for a run on GPUs of `gpu_gib`. critic: the shape of the critic's model, in a run that has one."""
    states = sharded_states(config, shape, critic)
    share = config.rollout.memory_fraction * gpu_gib
    engine_weights = 2 * shape.parameters / config.rollout.tensor_parallel / GIB
    apart = config.rollout_placement == "apart"
    kv_bytes = shape.kv_bytes_per_token / config.rollout.tensor_parallel
    return GpuMemory(
        training=states | working_memory(config, shape),
        generating={"engine": share} if apart else states | {"engine": share},
        engine_weights=engine_weights,
        kv_tokens=max(0, int((share - engine_weights) * GIB / kv_bytes)),
    )


def host_memory(
    config: Config, shape: ModelShape, *, ranks: int, engines: int, critic: ModelShape | None = None
) -> Parts:
    """GiB of the first node's host memory, which has `ranks` policy workers, rank 0 among them, and `engines`."""
    sharers = config.training_workers // config.policy.parallel.replicate
    here = ranks * shape.parameters / sharers / GIB
    parts = {"model as it is read": 4 * shape.parameters / GIB}
    if config.rollout_placement == "colocated":
        parts["engines asleep"] = engines * 2 * shape.parameters / GIB
    if config.policy.cpu_offload:
        parts["policy"] = 4 * here + 12 * here * trained_parameters(config, shape) / shape.parameters
    if config.starts_reference and config.reference.cpu_offload:
        parts["reference"] = 4 * here
    if critic and config.critic.cpu_offload:
        parts["critic"] = 16 * ranks * critic.parameters / sharers / GIB
    if config.model.activation_offload:
        parts["activations"] = ranks * 2 * shape.hidden * shape.layers * config.policy.max_tokens / GIB
    return parts


def sharded_states(config: Config, shape: ModelShape, critic: ModelShape | None = None) -> Parts:
    """What a rank keeps between micro-batches, of all roles that share its GPU."""
    sharers = config.training_workers // config.policy.parallel.replicate
    whole, trained = shape.parameters / sharers / GIB, trained_parameters(config, shape) / sharers / GIB
    parts = {}
    if not config.policy.cpu_offload:
        parts = {"weights": 4 * whole, "gradients": 4 * trained, "AdamW": 8 * trained}
    if config.starts_reference and not config.reference.cpu_offload:
        parts["reference"] = 4 * whole
    if critic and not config.critic.cpu_offload:
        parts["critic"] = 16 * critic.parameters / sharers / GIB
    return parts


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """P, or those of the adapters: rank (inputs + outputs) of every module that has one."""
    lora = config.model.lora
    if not lora.rank:
        return shape.parameters
    names = {name.strip() for name in lora.target_modules.split(",")}
    sizes = [size for name, size in shape.linear_modules.items() if "all-linear" in names or name in names]
    return shape.layers * sum(lora.rank * sum(size) for size in sizes)


def working_memory(config: Config, shape: ModelShape) -> Parts:
    """What a rank needs while it computes a micro-batch that fills its cap."""
    tensor_parallel = config.policy.parallel.tensor_parallel
    width = 4 if config.model.dtype == "float32" else 2
    moving = min(2 * shape.layer_parameters + shape.root_parameters, shape.parameters)
    gathered = (2 * width + 4) * moving
    if not config.policy.reshard_after_forward or config.training_workers == 1:
        gathered += width * (shape.parameters - moving)
    return {
        "gathered": gathered / tensor_parallel / GIB,
        "activations": activations(config, shape) * (width / 2) / GIB,
        "log-probs": 12 * shape.vocabulary / tensor_parallel * config.model.logprob_chunk_tokens / GIB,
    }


def activations(config: Config, shape: ModelShape) -> float:
    """Bytes that a full micro-batch, of the policy or the critic, keeps until its backward pass, in half precision."""
    tokens, tensor_parallel = config.policy.max_tokens, config.policy.parallel.tensor_parallel
    if config.uses_critic:
        tokens = max(tokens, config.critic_max_tokens)
    layer = tokens * shape.activation_bytes_per_token(tensor_parallel)
    if not config.model.gradient_checkpointing:
        return shape.layers * layer
    inputs = 0.0 if config.model.activation_offload else tokens * 2 * shape.hidden * shape.layers / tensor_parallel
    return inputs + layer


def check_memory(config: Config, memory: GpuMemory, gpu_gib: float) -> None:
    """Raise ConfigError, with what to change, if the estimate does not fit into a GPU of `gpu_gib`."""
    room, share = USABLE_SHARE * gpu_gib, config.rollout.memory_fraction * gpu_gib
    if sum(memory.training.values()) > room:
        largest = max(memory.training, key=lambda name: memory.training[name])
        raise ConfigError(
            f"training needs about {sum(memory.training.values()):.1f} GiB of a GPU, {memory.training[largest]:.1f} of "
            f"them for {largest}, and {room:.1f} are to be used; {_advice(config, largest)}."
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


def _advice(config: Config, largest: str) -> str:
    if largest == "activations" and not config.model.gradient_checkpointing:
        return "set model.gradient_checkpointing=true or lower policy.max_tokens"
    if largest == "activations":
        return "lower policy.max_tokens, or raise policy.parallel.context_parallel"
    if largest == "log-probs":
        return "lower model.logprob_chunk_tokens"
    if largest == "gathered":
        return "raise policy.parallel.tensor_parallel"
    return "raise policy.ranks, or set policy.cpu_offload=true"
