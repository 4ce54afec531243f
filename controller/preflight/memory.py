"""Estimate GPU memory in advance: arithmetic on config.json and the settings.

    config.json --> ModelShape --+
    settings --------------------+--> Phases of training | Parts while generating --> the largest against the GPU

P parameters, A of them trained (P, or those of the adapters), s ranks that share them (data-parallel ranks / replicate
* context * tensor parallel); b bytes of the compute type (2 or 4), T the cap on a micro-batch's tokens on one rank; L
one layer's parameters, R those of the root (embedding, output layer), M those of the output layer, h the hidden size, f
the width of a feed-forward block, n layers, c tokens of a chunk of logits. Always present:

    weights        4 P / s                       float32, sharded by FSDP2
    AdamW          8 A / s                       two moments
    reference      4 P / s                       its own P, if there is a KL
    critic         12 P / s                      its own P: weights, AdamW (PPO)
    reward model   4 P / s                       its own P

Roles compute in turn; each pass is a phase with its own cap. An update has gradients, 4 A / s (4 A if their reduction
is deferred), and the largest of three moments:

    output layer, back       b (R + 4 L) + n T b h + 5 T b h + 4 M + max(12 V c, b M + 6 V c)
    last layer, back         b (R + 4 L) + b (M + L) + 8 L + n T b h + T a + 2 T b (2 h + f)
    root reduced             b (R + L) + (b + 4) R + 2 T b h

5 T b h: the last norm keeps a float32 and a bfloat16 row (3), the output layer its input and input gradient (2). a:
`ModelShape.activation_bytes_per_token`. n T b h: inputs of all layers, kept by gradient checkpointing. Without it, n T
a is kept, and T a is not recomputed. Without resharding, add b (P - 2 L - R). Adapters have no gradient of M, L and R.
A forward-only pass needs the larger of

    a layer                  b (R + 2 L) + T b (5 h + 3 f)
    the output layer         b (R + L) + 2 T b h + 12 V c

A token is copied for its k experts: 3 T b k h more in the last layer's backward, 2.5 T b k h in a layer's forward, and
2 n T b k h without gradient checkpointing. With expert_parallel: 6, 4 and 4 n T b k h, for an even load on all ranks; L
and P then count 1 / expert_parallel of the experts where they are gathered or reduced.

Divided by tensor_parallel: L without experts, R, M, V, f, k and the inputs. The terms were found, and are tested, by
measuring the engine on tensors without data (`measure.py`). While engines sample, the states stay in memory besides the
engine's share, gpu_memory_utilization x GPU. Not counted: CUDA contexts, NCCL buffers, kernel workspaces,
fragmentation; a tenth of the GPU is left free for them.

`host_memory` adds up the first node: 4 P while rank 0 reads the largest model, offloaded states, and with checkpoints
the copy being written, 12 A / s and 1 GiB per rank. Sleeping engines keep nothing.

In a pipeline, the estimate is for the stage with most layers, s its ranks, as if it also had embedding and output
layer. It keeps the inputs of as many micro-batches as there are stages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    """GiB of the fullest GPU: in each of `phases` of training, and `generating` while engines sample.

    engine_weights: GiB of one GPU's share of an engine's weights. kv_tokens: tokens that fit its KV cache.
    """

    phases: tuple["Phase", ...]
    generating: Parts
    engine_weights: float
    kv_tokens: int

    @property
    def fullest(self) -> "Phase":
        """Phase of training with the largest need."""
        return max(self.phases, key=lambda phase: sum(phase.parts.values()))

    @property
    def training(self) -> Parts:
        """Parts of the fullest phase."""
        return self.fullest.parts

    @property
    def cap(self) -> str:
        """Setting that limits the activations of the fullest phase."""
        return self.fullest.cap

    @property
    def peak(self) -> float:
        """GiB at the fuller of both times."""
        return max(sum(self.training.values()), sum(self.generating.values()))


Shapes = Mapping[str, ModelShape]
"""Of the training roles beside the policy, by name: reference, critic, reward_model."""
NO_OTHERS: Shapes = {}
BYTES_A_PARAMETER = {"reference": 4, "critic": 12, "reward_model": 4}
"""Of what such a role keeps between passes: weights, and of the critic also AdamW's moments."""


def gpu_memory(config: Config, shape: ModelShape, gpu_gib: float, others: Shapes = NO_OTHERS) -> GpuMemory:
    """Estimate a run on GPUs of `gpu_gib`. shape: the policy's. others: shapes of the other roles."""
    states = sharded_states(config, shape, others)
    share = config.rollout.gpu_memory_utilization * gpu_gib
    engine_weights = 2 * shape.parameters / config.rollout.tensor_parallel / GIB
    apart = config.rollout_placement == "apart"
    kv_bytes = shape.kv_bytes_per_token / config.rollout.tensor_parallel
    return GpuMemory(
        phases=tuple(phases(config, shape, others)),
        generating={"engine": share} if apart else states | {"engine": share},
        engine_weights=engine_weights,
        kv_tokens=max(0, int((share - engine_weights) * GIB / kv_bytes)),
    )


def host_memory(config: Config, shape: ModelShape, *, ranks: int, others: Shapes = NO_OTHERS) -> Parts:
    """Estimate GiB of the first node's host memory, with `ranks` policy workers including rank 0."""
    parts = {"model as it is read": 4 * max(each.parameters for each in (shape, *others.values())) / GIB}
    sharers, shape, others = _sharers(config), of_stage(config, shape), of_stages(config, others)
    here = ranks * shape.parameters / sharers / GIB
    if config.policy.cpu_offload:
        parts["policy"] = 4 * here + 12 * here * trained_parameters(config, shape) / shape.parameters
    for role in others:
        if is_offloaded(config, role):
            parts[role] = (
                (BYTES_A_PARAMETER[role] + 4 * (role == "critic")) * ranks * others[role].parameters / sharers / GIB
            )
    if config.run.checkpoint_every:
        parts["checkpoint"] = staged(config, shape, others) * ranks / sharers / GIB + ranks
    if config.model.activation_offload:
        parts["activations"] = ranks * 2 * shape.hidden * shape.layers * config.policy.max_tokens_per_micro_batch / GIB
    return parts


def staged(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> int:
    """Bytes that a checkpoint copies to host memory: trained weights and AdamW's moments."""
    return 12 * (trained_parameters(config, shape) + (others["critic"].parameters if "critic" in others else 0))


def sharded_states(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> Parts:
    """States that a rank keeps between micro-batches, of all roles on its GPU."""
    sharers, shape, others = _sharers(config), of_stage(config, shape), of_stages(config, others)
    whole, trained = shape.parameters / sharers / GIB, trained_parameters(config, shape) / sharers / GIB
    parts = {}
    if not config.policy.cpu_offload:
        parts = {"weights": 4 * whole, "AdamW": 8 * trained}
    for role in others:
        if not is_offloaded(config, role):
            parts[role] = BYTES_A_PARAMETER[role] * others[role].parameters / sharers / GIB
    return parts


def _sharers(config: Config) -> int:
    """Count the ranks that share a stage's parameters."""
    parallel = config.policy.parallel
    return config.training_workers // (parallel.pipeline_parallel * parallel.replicate)


def of_stage(config: Config, shape: ModelShape) -> ModelShape:
    """Return the part of a model on the fullest stage; all of it without a pipeline."""
    parallel, checkpointing = config.policy.parallel, config.model.gradient_checkpointing
    return shape.of_fullest_stage(parallel.pipeline_parallel, parallel.virtual_stages, checkpointing=checkpointing)


def of_stages(config: Config, shapes: Shapes) -> Shapes:
    """Apply `of_stage` to each."""
    return {role: of_stage(config, shape) for role, shape in shapes.items()}


def is_offloaded(config: Config, role: str) -> bool:
    """Whether a training role keeps its states in host memory."""
    return {
        "policy": config.policy.cpu_offload,
        "reference": config.reference.cpu_offload,
        "critic": config.critic.cpu_offload,
        "reward_model": config.reward.model.cpu_offload,
    }[role]


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """Count trained parameters: P, or of the adapters, rank (inputs + outputs) per adapted module."""
    lora = config.model.lora
    if not lora.rank:
        return shape.parameters
    names = {name.strip() for name in lora.target_modules.split(",")}
    sizes = [size for name, size in shape.linear_modules.items() if "all-linear" in names or name in names]
    return shape.layers * sum(lora.rank * sum(size) for size in sizes)


@dataclass(frozen=True)
class Pass:
    """A pass of a role over micro-batches of at most `tokens` per rank, limited by the setting `cap`.

    call: `update`, which trains, or the forward-only `log_probs`, `values`, `scores`.
    """

    role: str
    call: str
    shape: ModelShape
    tokens: int
    cap: str

    @property
    def trains(self) -> bool:
        """Whether it has a backward pass."""
        return self.call == "update"


@dataclass(frozen=True)
class Phase:
    """A pass with all memory that a GPU holds meanwhile."""

    role: str
    call: str
    tokens: int
    cap: str
    parts: Parts

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.role} {self.call}".replace("_", " ")


def passes(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> Iterator[Pass]:
    """Return every pass of the run's roles over a batch. Roles take turns while engines sleep. shapes: of a stage."""
    shape, others = of_stage(config, shape), of_stages(config, others)
    shapes = {"policy": shape, **others}
    for name, limits in config.limits.items():
        role, call = name.split(".")
        if role in shapes:
            yield Pass(role, call, shapes[role], limits.max_tokens, limits.cap)


def phases(config: Config, shape: ModelShape, others: Shapes = NO_OTHERS) -> list[Phase]:
    """Add to each pass the memory of a full micro-batch and the states of all roles."""
    states = sharded_states(config, shape, others)
    return [
        Phase(
            each.role, each.call, each.tokens, each.cap, states | gradients(config, each) | working_memory(config, each)
        )
        for each in passes(config, shape, others)
    ]


def gradients(config: Config, each: Pass) -> Parts:
    """Size of a training role's gradients: shards, or whole ones that await reduction."""
    if not each.trains:
        return {}
    trained = trained_parameters(config, each.shape) if each.role == "policy" else each.shape.parameters
    parallel = config.policy.parallel
    if parallel.defer_gradient_reduction:
        is_whole = trained == each.shape.parameters  # adapters have no experts
        experts = is_whole * each.shape.layers * each.shape.expert_parameters
        own = (trained - experts) / parallel.tensor_parallel + experts / parallel.expert_parallel
        return {"gradients": 4 * own / GIB}
    # Shards that wait for the sum over copies of the model do so on the GPU, wherever the parameters are.
    on_gpu = not is_offloaded(config, each.role) or parallel.replicate > 1
    return {"gradients": 4 * trained / _sharers(config) / GIB} if on_gpu else {}


def working_memory(config: Config, each: Pass) -> Parts:
    """Memory of a rank for a micro-batch, besides the states, at its peak."""
    found = max(_training_moments(config, each) if each.trains else _forward_moments(config, each), key=_total)
    return {name: size / GIB for name, size in found.items()}


def _total(parts: Parts) -> float:
    return sum(parts.values())


def _forward_moments(config: Config, each: Pass) -> list[Parts]:
    """Bytes inside a layer, and at the output layer, in a forward-only pass."""
    shape, sizes = each.shape, _sizes(config, each)
    row = each.tokens * sizes.width
    layer = row * (5 * shape.hidden + 3 * sizes.feed_forward) + _at_experts(config, each).forward
    return [
        {"gathered": sizes.gathered(2), "activations": layer},
        {"gathered": sizes.gathered(1), "activations": 2 * row * shape.hidden, "log-probs": 12 * sizes.logits},
    ]


def _training_moments(config: Config, each: Pass) -> list[Parts]:
    """Bytes in the output layer's backward, the last layer's backward, and the root's gradient reduction."""
    shape, sizes = each.shape, _sizes(config, each)
    width, row, kept = sizes.width, each.tokens * sizes.width, kept_activations(config, each)
    head, layer, root = (sizes.trained * size for size in (sizes.head, sizes.layer, sizes.root))
    log_probs = 4 * head + max(12 * sizes.logits, width * head + 6 * sizes.logits)
    again = each.tokens * shape.activation_bytes_per_token(sizes.tensor_parallel) * width / 2
    again = again if config.model.gradient_checkpointing else 0.0  # the layer that is computed once more
    return [
        {
            "gathered": sizes.gathered(4),
            "activations": kept + 5 * row * shape.hidden,
            "log-probs": log_probs if sizes.logits else 0.0,
        },
        {
            "gathered": sizes.gathered(4) + width * (head + layer) + 8 * layer,
            "activations": kept
            + again
            + 2 * row * (2 * shape.hidden + sizes.feed_forward)
            + _at_experts(config, each).back,
        },
        {"gathered": sizes.gathered(1) + (width + 4) * root, "activations": 2 * row * shape.hidden},
    ]


@dataclass(frozen=True)
class _Sizes:
    """Parameters of a rank's part of each matrix.

    width: bytes per number in the compute type. logits: numbers in a chunk of logits. head: output layer. trained: 1 if
    these parameters get gradients, else 0. stays: always gathered, besides the root and two layers.
    """

    width: int
    tensor_parallel: int
    layer: float
    root: float
    head: float
    logits: float
    feed_forward: float
    trained: int
    stays: float

    def gathered(self, layers: int) -> float:
        """Bytes of the root, of that many layers or transfer buffers, and of what stays."""
        return self.width * (self.root + layers * self.layer + self.stays)


def _sizes(config: Config, each: Pass) -> _Sizes:
    shape, tensor_parallel = each.shape, config.policy.parallel.tensor_parallel
    has_head = each.call == "log_probs" or (each.trains and each.role == "policy")
    resharded = config.training_workers > config.policy.parallel.pipeline_parallel and (
        config.policy.reshard_after_forward or each.role not in ("policy", "critic")
    )
    experts = shape.expert_parameters
    layer = (shape.layer_parameters - experts) / tensor_parallel + experts / config.policy.parallel.expert_parallel
    adapters = each.role == "policy" and config.model.lora.rank > 0
    return _Sizes(
        width=_width(config),
        tensor_parallel=tensor_parallel,
        layer=layer,
        root=shape.root_parameters / tensor_parallel,
        head=has_head * shape.vocabulary * shape.hidden / tensor_parallel,
        logits=has_head * shape.vocabulary * config.model.chunk_tokens("cuda") / tensor_parallel,
        feed_forward=shape.feed_forward_width / tensor_parallel,
        trained=not adapters,
        stays=0 if resharded else max(0, shape.layers - 2) * layer,
    )


class _AtExperts(NamedTuple):
    """Bytes of a micro-batch's tokens at their experts: in a layer's forward, its backward, and kept."""

    forward: float
    back: float
    kept: float


def _at_experts(config: Config, each: Pass) -> _AtExperts:
    """Every token is copied per expert, and twice as often if it travels."""
    parallel, shape = config.policy.parallel, each.shape
    if not shape.experts:
        return _AtExperts(0.0, 0.0, 0.0)
    copy = each.tokens / parallel.tensor_parallel * _width(config) * shape.hidden * shape.chosen_experts
    copies = (4, 6, 4) if parallel.expert_parallel > 1 else (2.5, 3, 2)
    return _AtExperts(*(number * copy for number in copies))


def _width(config: Config) -> int:
    """Bytes per number in the compute type."""
    return 4 if config.model.dtype == "float32" else 2


def kept_activations(config: Config, each: Pass) -> float:
    """Bytes that layers keep until the backward pass, for a full micro-batch (several in a pipeline)."""
    tensor_parallel, shape, width = config.policy.parallel.tensor_parallel, each.shape, _width(config)
    tokens = each.tokens * _under_way(config)
    if not config.model.gradient_checkpointing:
        a_layer = tokens * shape.activation_bytes_per_token(tensor_parallel) * width / 2
        return shape.layers * (a_layer + _under_way(config) * _at_experts(config, each).kept)
    if config.model.activation_offload:
        return 0.0
    return tokens * width * shape.hidden * shape.layers / tensor_parallel


def _under_way(config: Config) -> float:
    """Micro-batches between forward and backward on stage 0; in v-ths with v virtual stages."""
    parallel = config.policy.parallel
    stages, virtual = parallel.pipeline_parallel, parallel.virtual_stages
    return stages if virtual == 1 else stages + (stages - 1) / virtual


def check_memory(config: Config, memory: GpuMemory, gpu_gib: float) -> None:
    """Raise ConfigError, with advice, if the estimate does not fit a GPU of `gpu_gib`."""
    room, share = USABLE_SHARE * gpu_gib, config.rollout.gpu_memory_utilization * gpu_gib
    if sum(memory.training.values()) > room:
        largest = max(memory.training, key=lambda name: memory.training[name])
        raise ConfigError(
            f"training needs about {sum(memory.training.values()):.1f} GiB of a GPU, {memory.training[largest]:.1f} of "
            f"them for {largest}, and {room:.1f} are to be used; {_advice(config, largest, memory.cap)}."
        )
    if memory.kv_tokens < config.max_model_tokens:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization} gives an engine {share:.1f} GiB "
            f"of a GPU, its weights take {memory.engine_weights:.1f}, and the rest holds {memory.kv_tokens:,} tokens "
            f"of the {config.max_model_tokens:,} of one sequence; raise it, or rollout.tensor_parallel."
        )
    if sum(memory.generating.values()) > room:
        states = sum(memory.generating.values()) - share
        raise ConfigError(
            f"generation needs {share:.1f} GiB of a GPU for an engine beside {states:.1f} of training "
            f"states, and {room:.1f} are to be used; lower rollout.gpu_memory_utilization, share the states "
            "over more ranks (policy.data_parallel), or set rollout.placement=apart."
        )


def check_host(parts: Parts, memory_gib: float) -> None:
    """Raise ConfigError if `parts` of the first node's host memory exceed `memory_gib` (0: unknown)."""
    needed = sum(parts.values())
    if memory_gib and needed > memory_gib:
        raise ConfigError(
            f"node 0 needs about {needed:.1f} GiB of host memory and has {memory_gib:g}; use larger nodes, or fewer "
            "offloaded states on one (policy.cpu_offload)."
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
    return f"raise policy.data_parallel, or set {SECTIONS.get(largest, 'policy')}.cpu_offload=true"
