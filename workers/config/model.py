"""Settings of the model, which all training roles share. See `workers.config.roles`."""

from dataclasses import dataclass, field, replace

from workers.config.setting import setting

LIGHTER = {"full": "selective", "selective": "none", "none": "none"}
"""The mode of `model.gradient_checkpointing` that recomputes less."""
ATTENTION_KEPT = "attention"
"""What `selective` does in compiled layers, whose matrix products are inside of graphs."""
RECOMPUTED = {"none": 0.0, "selective": 0.3, ATTENTION_KEPT: 0.8, "full": 1.0, "auto": 1.0}
"""Share of a layer's forward pass that its backward pass computes again."""
CUDA_KERNELS = ("varlen", "flash4", "flash3", "flash")
"""Values of `model.attention` that are kernels of CUDA devices."""
ROUNDED = ("int8", "nf4")
"""Values of `model.base_dtype` that change the weights of modules with adapters."""
ONLY_POLICY = ""
"""The name of the adapters where one policy is trained. Several have names of their own."""
ALL_LINEAR = "all-linear"
"""The value of `model.lora.target_modules` that names every linear module of the decoder."""


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank * B A. Only A and B are trained."""

    only_with = (
        (
            ".rank above 0",
            "alpha, rslora, path, target_modules, target_parameters, policies, sync",
        ),
        (".policies above 1", "versions"),
        ("engines", "sync"),
    )

    rank: int = setting(
        0, "Rank of the adapters. 0 trains the whole model.", minimum=0, maximum=100_000
    )
    alpha: float = setting(32.0, "Adapters are scaled by alpha / rank.", above=0)
    rslora: bool = setting(
        False,
        "Scale adapters by alpha / sqrt(rank), which keeps high ranks effective (rsLoRA, 2023).",
    )
    path: str = setting(
        "",
        "Folder with adapters in peft's format that the policy begins with. Every node needs it. Empty "
        "begins "
        "as the base model, which is the reference in both cases.",
    )
    target_modules: str = setting(
        ALL_LINEAR,
        "Modules that get an adapter, by the last part of their names, such as `q_proj,v_proj`. "
        "`all-linear` is every linear module except the output layer.",
    )
    target_parameters: str = setting(
        "",
        "Fused weights of experts that get an adapter for each expert: `experts.gate_up_proj`, "
        "`experts.down_proj` or both. Empty leaves experts as they are.",
    )
    sync: str = setting(
        "merged",
        "What engines get after an update: all weights with the adapters `merged`, or the `adapters` alone, "
        "which vLLM's LoRA adds to the base model at each token.",
        choices=("merged", "adapters"),
    )
    policies: int = setting(
        1,
        "LoRA policies that are trained from one base model, each by its name (see docs/lora.md). Engines "
        "then take adapters, not merged weights. Above 1 only in a loop of your own (`ballast.open`).",
        minimum=1,
        maximum=1_000,
    )
    versions: int = setting(
        2,
        "Newest published weights of each policy that engines keep, so that earlier ones can still be "
        "sampled. Each takes the memory of its adapters in every engine.",
        minimum=1,
        maximum=1_000,
    )

    @property
    def sends_adapters(self) -> bool:
        """Whether engines get adapters, not merged weights."""
        return self.policies > 1 or self.sync == "adapters"


@dataclass
class ModelConfig:
    only_with = (
        ("forward pass", "forward_layout, forward_length_multiple"),
        (".share_prefixes=auto or always", "min_shared_tokens"),
        (".gradient_checkpointing other than none", "activation_offload"),
        (".gradient_checkpointing=selective or full", "recompute_num_layers"),
        ("GPUs", "activation_offload, batch_invariant, compile"),
        ("engines", "batch_invariant"),
        ("engines on GPUs", "router_replay"),
        (".lora.rank=0", "train_vision"),
        (".lora.rank above 0", "base_dtype"),
    )

    path: str = setting(
        "???",
        "Folder with a Hugging Face model and tokenizer, or a name in the local hub cache.",
    )
    chat_template: str = setting(
        "",
        "Jinja file with a chat template, used instead of the model's own. Every node needs it. Saved "
        "models have it as chat_template.jinja.",
    )
    dtype: str = setting(
        "auto",
        "Parameter and compute type. `auto` is float32 on CPU and bfloat16 on GPU (parameters kept in "
        "float32).",
        choices=("auto", "float32", "bfloat16"),
    )
    base_dtype: str = setting(
        "float32",
        "Type of the trainer's frozen weights below LoRA. `int8` and `nf4` (4 bits, QLoRA) round the modules "
        "with adapters. With these and `bfloat16`, other frozen weights are kept in the type of the "
        "computation. Engines get the rounded weights (see docs/small-machines.md).",
        choices=("float32", "bfloat16", "int8", "nf4"),
    )
    attention: str = setting(
        "auto",
        "Attention kernel. Packed: `varlen` (CUDA), `flash4` (Hopper and Blackwell, flash-attn-4 package), "
        "`flash3` (Hopper, FlashAttention 3 package), `flash` (CUDA, flash-attn package), `sdpa` (one call "
        "per sequence, any device). Padded: these, or transformers' own `sdpa` or `eager`. `auto` chooses by "
        "device, packages and model.",
        choices=("auto", "varlen", "flash4", "flash3", "flash", "sdpa", "eager"),
    )
    layout: str = setting(
        "packed",
        "`packed`: a micro-batch is one row without padding. `padded`: one row per sequence, for models "
        "whose attention cannot separate packed sequences.",
        choices=("packed", "padded"),
    )
    length_multiple: int = setting(
        1,
        "Pad each sequence (packed) or row (padded) to a multiple of this many tokens, for kernels that "
        "need it.",
        minimum=1,
    )
    forward_layout: str = setting(
        "same",
        "Layout of forward-only passes (log-probs, reference, values, scores). `same` is model.layout.",
        choices=("same", "packed", "padded"),
    )
    forward_length_multiple: int = setting(
        0, "model.length_multiple of forward-only passes. 0 uses the same.", minimum=0
    )
    share_prefixes: str = setting(
        "auto",
        "Compute tokens that start several sequences of a micro-batch, such as a group's prompt, only "
        "once. `auto` does so if model, layout and attention allow it.",
        choices=("auto", "always", "never"),
    )
    min_shared_tokens: int = setting(
        4,
        "Minimum length of a shared prefix, in tokens. Shorter ones cost more than they save.",
        minimum=1,
    )
    gradient_checkpointing: str = setting(
        "none",
        "What the backward pass recomputes to save memory. `none`: nothing. `selective`: all but attention "
        "and matrix products (in compiled layers, all but attention). `full`: whole layers. `auto`: the "
        "least that fits into the GPU, measured on a simulated one, layer by layer; `none` on CPUs.",
        choices=("none", "selective", "full", "auto"),
    )
    recompute_num_layers: int = setting(
        0,
        "Layers of each pipeline stage, from its first on, to which gradient_checkpointing applies. 0 is "
        "all. The others recompute less: `selective` instead of `full`, `none` instead of `selective`.",
        minimum=0,
    )
    activation_offload: bool = setting(
        False,
        "Keep the layer inputs of gradient checkpointing in host memory until the backward pass (GPU).",
    )
    compile: str = setting(
        "auto",
        "Compile each decoder layer around its attention (torch.compile): fewer, larger kernels. The first "
        "step takes half a minute longer. `auto` does so on GPUs, without tensor parallelism, for models "
        "without images.",
        choices=("auto", "always", "never"),
    )
    batch_invariant: bool = setting(
        False,
        "Compute by vLLM's batch-invariant kernels, in engines and in the policy's forward pass, so that "
        "both give the same log-probs bit for bit at equal weights. Slower. Dense Qwen3 in bfloat16 on "
        "GPUs, without LoRA or shared layers (see docs/rollout-engine.md).",
    )
    logprob_chunk_tokens: int = setting(
        0,
        "Tokens whose logits exist at the same time. This bounds the memory of log-probs (tokens x "
        "vocabulary). 0 means 2,048 on a GPU and 256 on a CPU. GPUs add to the output layer's gradient "
        "once per chunk.",
        minimum=0,
    )
    router_replay: str = setting(
        "none",
        "Return the experts that engines chose for each token (mixtures of experts, engines on GPUs). "
        "`compare` counts how many differ from the policy's choice. `replay` also uses them in the "
        "policy's passes, so that log-probs of engine and trainer differ only by rounding (R3).",
        choices=("none", "compare", "replay"),
    )
    router_aux_loss_coefficient: float = setting(
        0.0,
        "Weight of the routers' load-balancing loss (mixtures of experts), per sequence and summed over "
        "layers. It affects the policy's gradient, not the metric `loss`.",
        minimum=0,
    )
    router_z_loss_coefficient: float = setting(
        0.0,
        "Weight of the routers' z-loss, the squared log-sum-exp of their logits. It affects the policy's "
        "gradient, not the metric `loss`.",
        minimum=0,
    )
    train_vision: bool = setting(
        False,
        "Train the part of a vision-language model that turns images into embeddings (vision tower and "
        "projector). By default it is frozen.",
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def has_router_losses(self) -> bool:
        return self.router_aux_loss_coefficient > 0 or self.router_z_loss_coefficient > 0

    def of_another_role(self, path: str) -> "ModelConfig":
        """Copy the settings for the model at `path` (empty: the same model), without policy-only settings."""
        return replace(
            self,
            path=path or self.path,
            chat_template="",
            lora=LoraConfig(),
            base_dtype="float32",
            train_vision=False,
            router_replay="none",
            batch_invariant=False,
            router_aux_loss_coefficient=0.0,
            router_z_loss_coefficient=0.0,
        )

    def checkpointing_of(self, layers: int) -> list[str]:
        """Return the mode of gradient checkpointing of each layer of a stage. An `auto` that nobody decided
        is full.
        """
        mode = (
            "full" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing
        )
        count = min(self.recompute_num_layers or layers, layers)
        return [mode] * count + [LIGHTER.get(mode, mode)] * (layers - count)

    def chunk_tokens(self, device: str) -> int:
        return self.logprob_chunk_tokens or (256 if device == "cpu" else 2048)

    def rows(self, *, forward: bool) -> tuple[str, int]:
        """Return (layout, length multiple) of training or forward-only passes."""
        if not forward:
            return self.layout, self.length_multiple
        layout = self.layout if self.forward_layout == "same" else self.forward_layout
        return layout, self.forward_length_multiple or self.length_multiple

    def attention_layout(self, *, shared: bool = False) -> str:
        """Return `packed` if our attention runs, over segments, or `padded` if transformers'
        does, over rows.
        """
        # Transformers' does not support ranks that share sequences or layers.
        layouts = {self.rows(forward=forward)[0] for forward in (False, True)}
        ours = shared or "packed" in layouts or self.attention in CUDA_KERNELS
        return "packed" if ours else "padded"


def checkpointing_words(model: ModelConfig) -> str:
    """Describe what `model.gradient_checkpointing=auto` was decided to be."""
    mode = model.gradient_checkpointing
    layers = model.recompute_num_layers
    layer_words = (
        f"in the first {layers} layers of each stage, {LIGHTER[mode]} in the others"
        if layers
        else "in all layers"
    )
    return f"model.gradient_checkpointing=auto: {mode} {layer_words}"
