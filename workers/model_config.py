"""Settings of the model that the training roles share; see `workers.config`."""

from dataclasses import dataclass, field, replace

from workers.setting import setting

CUDA_KERNELS = ("varlen", "flash3", "flash")
"""Values of `model.attention` that are kernels of CUDA devices."""


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank * B A, of which A and B alone are trained."""

    only_with = ((".rank above 0", "alpha, target_modules"),)

    rank: int = setting(0, "Rank of the adapters; 0 trains the whole model.", minimum=0, maximum=100_000)
    alpha: float = setting(32.0, "Adapters are scaled by alpha / rank.", minimum=0, exclusive_minimum=True)
    target_modules: str = setting(
        "all-linear",
        "Modules that get an adapter, by the last part of their names, as in `q_proj,v_proj`; `all-linear` is every "
        "linear module except the output layer.",
    )


@dataclass
class ModelConfig:
    only_with = (
        ("forward pass", "forward_layout, forward_length_multiple"),
        (".share_prefixes=auto or always", "min_shared_tokens"),
        (".gradient_checkpointing", "activation_offload"),
        ("GPUs", "activation_offload, compile"),
        ("engines on GPUs", "router_replay"),
    )

    path: str = setting("???", "Folder with a Hugging Face model and tokenizer, or a name in the local hub cache.")
    dtype: str = setting(
        "auto",
        "Parameter and compute type; `auto` is float32 on CPU and bfloat16 on GPU (parameters kept in float32).",
        choices=("auto", "float32", "bfloat16"),
    )
    attention: str = setting(
        "auto",
        "Attention kernel. Packed: `varlen` (CUDA), `flash3` (Hopper, with FlashAttention 3's package), `flash` (CUDA, "
        "the flash-attn package), `sdpa` (one call a sequence, any device). Padded: these, or transformers' own "
        "`sdpa` or `eager`. `auto` picks by device, packages and model.",
        choices=("auto", "varlen", "flash3", "flash", "sdpa", "eager"),
    )
    layout: str = setting(
        "packed",
        "`packed`: a micro-batch is one row without padding. `padded`: one row per sequence, padded to the longest, "
        "for models whose attention cannot keep packed sequences apart.",
        choices=("packed", "padded"),
    )
    length_multiple: int = setting(
        1,
        "Pad each sequence (packed) or row (padded) to a multiple of this many tokens, for kernels that need it.",
        minimum=1,
    )
    forward_layout: str = setting(
        "same",
        "Layout of forward-only passes (log-probs, reference, values, scores); `same` is model.layout.",
        choices=("same", "packed", "padded"),
    )
    forward_length_multiple: int = setting(0, "model.length_multiple of forward-only passes; 0 takes that.", minimum=0)
    share_prefixes: str = setting(
        "auto",
        "Compute tokens with which several sequences of a micro-batch begin, such as the prompt of a group, once. "
        "`auto` does wherever model, layout and attention allow it.",
        choices=("auto", "always", "never"),
    )
    min_shared_tokens: int = setting(
        4, "Beginnings are shared from this many tokens on; shorter ones cost more than they save.", minimum=1
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    activation_offload: bool = setting(
        False, "Keep the layer inputs of gradient checkpointing in host memory until the backward pass (GPU)."
    )
    compile: bool = setting(
        False, "Compile each decoder layer (torch.compile): fewer and larger kernels, minutes at the first step (GPU)."
    )
    logprob_chunk_tokens: int = setting(
        0,
        "Tokens whose logits exist at the same time, which bounds the memory of log-probs (tokens x vocabulary). 0 is "
        "2,048 on a GPU, which adds to the output layer's gradient once a chunk, and 256 on a CPU.",
        minimum=0,
    )
    router_replay: str = setting(
        "none",
        "Experts that engines chose for each token come with its samples (mixtures of experts, engines on GPUs): "
        "`compare` counts how many of them the policy's routers would not choose, `replay` also takes them in the "
        "policy's passes, so that log-probs of engine and trainer differ by rounding alone (R3).",
        choices=("none", "compare", "replay"),
    )
    router_aux_loss_coefficient: float = setting(
        0.0,
        "Weight of the routers' load-balancing loss (mixtures of experts), over each sequence and added up over "
        "layers; it adds to the policy's gradient, not to its metric `loss`.",
        minimum=0,
    )
    router_z_loss_coefficient: float = setting(
        0.0, "Weight of the routers' z-loss, the squared log-sum-exp of their logits; likewise.", minimum=0
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def has_router_losses(self) -> bool:
        """Whether routers have losses of their own."""
        return self.router_aux_loss_coefficient > 0 or self.router_z_loss_coefficient > 0

    def of_another_role(self, path: str) -> "ModelConfig":
        """The same settings for the model at `path` (empty: the same model), without those of the policy alone."""
        return replace(
            self,
            path=path or self.path,
            lora=LoraConfig(),
            router_replay="none",
            router_aux_loss_coefficient=0.0,
            router_z_loss_coefficient=0.0,
        )

    def chunk_tokens(self, device: str) -> int:
        """`logprob_chunk_tokens` on a type of device, as torch names it."""
        return self.logprob_chunk_tokens or (256 if device == "cpu" else 2048)

    def rows(self, *, forward: bool) -> tuple[str, int]:
        """(layout, length multiple) of training passes, or of forward-only ones."""
        if not forward:
            return self.layout, self.length_multiple
        layout = self.layout if self.forward_layout == "same" else self.forward_layout
        return layout, self.forward_length_multiple or self.length_multiple

    def attention_layout(self, *, shared: bool = False) -> str:
        """`packed`: attention is ours, over segments, which padded rows are too. `padded`: transformers' own, by rows.

        shared: whether ranks share sequences or layers, which transformers' attention does not.
        """
        layouts = {self.rows(forward=forward)[0] for forward in (False, True)}
        ours = shared or "packed" in layouts or self.attention in CUDA_KERNELS
        return "packed" if ours else "padded"
