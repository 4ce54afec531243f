"""Load a Hugging Face folder as a causal LM that reads packed or padded rows.

config.json --check_layout--> safetensors --> HF model + ballast_packed --> PackedCausalLM     packed layout
                                          --> HF model + its own attention --> PackedCausalLM  padded layout

Shapes: R rows of W cells (R = 1 when packed), N predicted tokens.
"""

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.config.roles import ModelConfig
from workers.errors import ConfigError, UnsupportedModelError, clause
from workers.model.activations import activations_on_host
from workers.model.attention.attention import ATTENTION_NAME
from workers.model.attention.mixers import check_mixers, find_mixers, split_by_segment
from workers.model.attention.selected_attention import (
    NO_MASK,
    find_indexers,
    select_by_segment,
)
from workers.model.attention.states import sharing_problem
from workers.model.losses.logprobs import Head, OutputLayer, log_probs_of
from workers.model.optimizer.optimizer import is_vector
from workers.model.pretrained import (
    LanguageModel,
    check_complete,
    decoder_of,
    layers_of_decoder,
    read_pretrained,
)
from workers.model.rows.packing import ModelInput
from workers.model.rules.families import (
    IMAGES_SEE_AHEAD,
    KERNEL_FEATURES,
    SELECTION,
    final_softcap,
    head_sizes,
    logit_factor,
    required_features,
)
from workers.model.rules.model_rules import check_kernel_features, check_layout
from workers.model.sharding.parallel import full_tensor
from workers.model.sharding.stage_layers import Part, Passing, carried
from workers.model.sharding.tensor_parallel import find_experts, own_vocabulary
from workers.model.vision.tower import Vision
from workers.model.weight_files import Shapes

log = logging.getLogger(__name__)


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and gathered parameters for `model.dtype`. Tests of exactness use
    float64.
    """
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, setting)


class PackedModel(nn.Module):
    """Run a Hugging Face decoder on rows of tokens. Subclasses turn its hidden states into outputs.

    `forward` applies the output layer, where FSDP has its weight gathered, only to cells that predict.
    """

    def __init__(self, model: PreTrainedModel, activation_offload: bool = False) -> None:
        super().__init__()
        self.model = model
        self.activation_offload = activation_offload
        names = [name for name, _ in model.named_parameters()]
        self.required_features = required_features(model.config, names)
        self.head_sizes = head_sizes(model.config)
        self.softcap = final_softcap(model.config)
        self.logit_factor = logit_factor(model.config)
        sees = (
            hasattr(model, "get_image_features")
            and getattr(model.config, "image_token_id", None) is not None
        )
        sees = sees and model.config.model_type not in IMAGES_SEE_AHEAD
        self.vision = (
            Vision(model, decoder_of(model))
            if sees and model.get_output_embeddings() is not None
            else None
        )
        # Families that use only distances of positions (ALiBi) take none.
        self.takes_positions = (
            "position_ids" in inspect.signature(decoder_of(model).forward).parameters
        )

    @property
    def name(self) -> str:
        return described(self.model)

    @property
    def layers(self) -> list[nn.Module]:
        layers = layers_of_decoder(self.model)
        return [] if layers is None else list(layers.children())

    @property
    def layer_matrices(self) -> set[nn.Parameter]:
        """Return the weights of the layers that are matrices, and those of experts, [E, A, B]."""
        experts = {
            parameter
            for module in find_experts(self.model)
            for parameter in module.parameters()
        }
        named = [item for layer in self.layers for item in layer.named_parameters()]
        matrices = [
            parameter for name, parameter in named if not is_vector(name, parameter)
        ]
        return {
            parameter
            for parameter in matrices
            if parameter.ndim == 2 or (parameter.ndim == 3 and parameter in experts)
        }

    @property
    def vectors(self) -> set[nn.Parameter]:
        """Return the parameters that do not decay, unless all do."""
        return {
            parameter
            for name, parameter in self.named_parameters()
            if is_vector(name, parameter)
        }

    def layers_of(self, part: Part) -> list[nn.Module]:
        """Return a part's layers, and those of a trained tower, which are sharded one by one."""
        layers = layers_of_decoder(self.model)
        tower = self.tower_blocks if part.first else []
        return tower + (
            []
            if layers is None
            else [layers.get_submodule(str(index)) for index in part.layers]
        )

    @property
    def tower(self) -> set[nn.Parameter]:
        return self.vision.parameters if self.vision else set()

    @property
    def frozen_tower(self) -> set[nn.Parameter]:
        return set() if self.vision and self.vision.trains else self.tower

    @property
    def frozen_names(self) -> frozenset[str]:
        """Return the names of `frozen_tower` in the whole model."""
        return (
            frozenset() if self.vision is None or self.vision.trains else self.vision.names
        )

    @property
    def tower_blocks(self) -> list[nn.Module]:
        """Return the layers of a trained tower."""
        return self.vision.blocks if self.vision and self.vision.trains else []

    @property
    def indexers(self) -> list[nn.Module]:
        """Return the parts that select tokens. They are frozen, because selection has no gradient."""
        return find_indexers(self.model) if SELECTION in self.required_features else []

    def set_trained(self, trained: bool, train_vision: bool) -> None:
        """Choose the parameters that have gradients, in place. Adapters choose theirs later."""
        self.requires_grad_(trained)
        if self.vision:
            self.vision.trains = trained and train_vision
        for parameter in self.frozen_tower:
            parameter.requires_grad_(False)
        indexers = self.indexers
        for indexer in indexers:
            indexer.requires_grad_(False)
        if trained and indexers:
            log.info(
                "%s: its %d indexers are frozen: selection has no gradient",
                self.name,
                len(indexers),
            )

    def place_tower(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move a frozen tower to `device`, in the dtype of the computation."""
        for parameter in self.frozen_tower:
            parameter.data = parameter.data.to(device, dtype)

    @property
    def has_states(self) -> bool:
        """Return whether a layer carries a state from token to token."""
        return any(find_mixers(layer) for layer in self.layers)

    def unshared_states(self, ranks: int) -> str:
        """Return which layers with a state so many ranks cannot share, or an empty string. 1: which prompts
        cannot hand on.
        """
        return sharing_problem(
            [mixer for layer in self.layers for mixer in find_mixers(layer)], ranks
        )

    def hidden_states(self, rows: ModelInput, passing: Passing | None = None) -> Tensor:
        """Return the last hidden states [N, H] of the cells `predicting`, or on a non-final part of all cells
        [R, W, H].
        """
        # Packed rows get neither cache nor mask: with either, transformers would not tell their segments
        # apart.
        arguments: dict[str, Any] = (
            {"position_ids": rows.position_ids} if self.takes_positions else {}
        )
        if rows.attention is None:
            arguments["attention_mask"] = rows.attention_mask
        else:
            arguments["packed_attention"] = rows.attention
            if SELECTION in self.required_features:
                arguments["attention_mask"] = NO_MASK
        read: dict[str, Any] = {"input_ids": rows.input_ids}
        if passing is not None and passing.received is not None:
            read = {"inputs_embeds": passing.received}
        elif self.vision is not None and rows.images is not None:
            read = self.vision.embedded(rows)
        with (
            activations_on_host(rows.input_ids.device)
            if self.activation_offload
            else nullcontext(),
            carried(layers_of_decoder(self.model), passing),
        ):
            output = decoder_of(self.model)(use_cache=False, **read, **arguments)
        if passing is not None and not passing.part.last:
            return passing.result()
        # Under tensor parallelism every rank has a part of the tokens, and of the vocabulary.
        return (
            full_tensor(output.last_hidden_state)
            .flatten(0, 1)
            .index_select(0, rows.predicting)
        )


Read = Callable[[ModelInput, OutputLayer], tuple[Tensor, ...]]
"""Makes a causal LM's outputs [N, ...] from its output layer and the hidden states of the cells
`predicting`.
"""


def read_log_probs(rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
    return log_probs_of(layer, rows.targets)


class PackedCausalLM(PackedModel):
    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        super().__init__(model, config.activation_offload)
        self.chunk_tokens = config.chunk_tokens
        self.read_log_probs: Read = read_log_probs

    def forward(
        self,
        rows: ModelInput,
        temperature: float,
        passing: Passing | None = None,
        read: Read | None = None,
    ) -> tuple[Tensor, ...] | Tensor:
        """Return (log_probs [N], entropy [N]) of the targets, see `linear_log_probs`, or what `read` makes.

        On a non-final part: the hidden states for the next.
        """
        hidden = self.hidden_states(rows, passing)
        if passing is not None and not passing.part.last:
            return hidden
        layer, shared = own_vocabulary(self.model.get_output_embeddings())
        head = Head(temperature, self.softcap, self.logit_factor, *shared)
        return (read or self.read_log_probs)(
            rows, OutputLayer(hidden, *layer, head, self.chunk_tokens(hidden.device.type))
        )


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    skeleton: bool = False,
    shapes: Shapes | None = None,
) -> PackedCausalLM:
    """Load the model at `config.path` on the CPU with parameters of `dtype`. Remote code is never run.

    skeleton: only modules, names and shapes, on the meta device. shapes: of the weight files, to compare.

    Raises ConfigError if the model is missing or incomplete, UnsupportedModelError if packing would change
    its results.
    """
    model, missing = read_pretrained(LanguageModel, config, dtype, skeleton, shapes)
    check_complete(config.path, missing)
    return packed_causal_lm(model, config)


def packed_causal_lm(model: PreTrainedModel, config: ModelConfig) -> PackedCausalLM:
    return read_rows(PackedCausalLM(model, config), config)


Packed = TypeVar("Packed", bound=PackedModel)


def read_rows(packed: Packed, config: ModelConfig) -> Packed:
    """Make a loaded or new model read the rows of `config.layout`, in place.

    Raises UnsupportedModelError if it cannot, ConfigError for settings that conflict.
    """
    model = packed.model
    layout = config.attention_layout()
    check_layout(model.config.get_text_config().to_dict(), layout, packed.name)
    _check_layers(packed)
    if config.activation_offload and "none" in config.checkpointing_of(len(packed.layers)):
        raise ConfigError(
            "model.activation_offload=true: a layer without checkpointing would save gathered weights. Set "
            "model.gradient_checkpointing=full."
        )
    if layout == "packed":
        _use_packed_attention(packed)
        check_mixers(packed.layers, model.config)
        split_by_segment(packed.layers)
        if SELECTION in packed.required_features:
            select_by_segment(packed.layers, packed.name)
    else:
        _use_own_attention(packed, config.attention)
    # Dropout is never active: the trained policy must be the sampled policy.
    packed.eval()
    return packed


def described(model: Any) -> str:
    config = getattr(model, "config", model)
    return f"model.path={config.name_or_path} ({config.model_type})"


def _check_layers(packed: PackedModel) -> None:
    problem = ""
    owners = [set(map(id, layer.parameters())) for layer in packed.layers]
    if layers_of_decoder(packed.model) is None:
        problem = "has no list of layers"
    elif sum(map(len, owners)) > len(set().union(*owners)):
        problem = "has layers that share parameters"
    if problem:
        raise UnsupportedModelError(
            f"{packed.name} {problem}, so it cannot be sharded by layer. Take another model."
        )


def _use_packed_attention(packed: PackedModel) -> None:
    use_attention(packed.model, ATTENTION_NAME)
    problem = ""
    if packed.model.config.get_text_config()._attn_implementation != ATTENTION_NAME:
        problem = "does not take an attention function, so its rows cannot be packed"
    elif not packed.takes_positions:
        problem = (
            "takes no position_ids, so in a packed row positions would continue "
            "from one sequence to the next"
        )
    if problem:
        raise UnsupportedModelError(f"{packed.name} {problem}. Set model.layout=padded.")


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of a model's decoder, in place. A vision tower keeps its own."""
    is_whole = model.config.get_text_config() is model.config
    model.set_attn_implementation(name if is_whole else {"text_config": name})


def _use_own_attention(packed: PackedModel, setting: str) -> None:
    """Use transformers' attention for padded rows: `sdpa`, or `eager` if sdpa is missing or lacks
    a feature.
    """
    model = packed.model
    features = packed.required_features
    check_kernel_features(setting, "padded", features, packed.name)
    wanted = (
        ("sdpa" if features <= KERNEL_FEATURES["padded"]["sdpa"] else "eager")
        if setting == "auto"
        else setting
    )
    try:
        model.set_attn_implementation(wanted)
    except ValueError as error:
        if setting != "auto":
            raise UnsupportedModelError(
                f"{packed.name} has no attention {wanted}: {clause(error)}."
            ) from error
        model.set_attn_implementation("eager")  # every family accepts it
    used = model.config._attn_implementation
    if used != wanted and setting != "auto":
        raise UnsupportedModelError(
            f"model.attention={wanted}: {packed.name} computes its own ({used}). Set auto."
        )
