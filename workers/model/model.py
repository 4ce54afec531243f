"""From a Hugging Face folder to a causal LM that reads packed rows.

config.json --check_supported--> safetensors --> HF model + ballast_packed --> PackedCausalLM
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from workers.config import ModelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.attention import ATTENTION_NAME, PackedAttention
from workers.model.logprobs import linear_log_probs

log = logging.getLogger(__name__)

# float64 is for tests of exactness; the configuration does not offer it.
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Type of activations and gathered parameters for `model.dtype`."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if setting not in COMPUTE_DTYPES:
        raise ConfigError(f"model.dtype={setting} is not one of auto, {', '.join(COMPUTE_DTYPES)}")
    return COMPUTE_DTYPES[setting]


class PackedCausalLM(nn.Module):
    """A Hugging Face causal LM that turns a packed row into log-probs and entropies of its predicted tokens.

    The output layer is applied in here, not outside, so that FSDP has its weight gathered; and only to the hidden
    states that predict a token with `loss_mask`.
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.get_decoder().layers)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predicting: Tensor,
        targets: Tensor,
        attention: PackedAttention,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """input_ids, position_ids int64 [1, T]; the hidden states at `predicting` int64 [N] predict `targets` [N].

        Returns (log_probs [N], entropy [N]), see `linear_log_probs`.
        """
        # Neither cache nor mask: with either, transformers would stop telling the segments of a row apart.
        output = self.model.get_decoder()(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, packed_attention=attention
        )
        head = self.model.get_output_embeddings()
        hidden = output.last_hidden_state[0].index_select(0, predicting)
        return linear_log_probs(
            hidden, head.weight, head.bias, targets, temperature=temperature, chunk_tokens=self.chunk_tokens
        )


def load_model(config: ModelConfig, dtype: torch.dtype) -> PackedCausalLM:
    """Load the model at `config.path` on the CPU with parameters of `dtype`. Remote code is never run.

    Raises ConfigError if there is no complete model, UnsupportedModelError if packing would change what it computes.
    """
    _check_path(config.path)
    try:
        hf_config = AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
        check_supported(hf_config)
        model, info = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=hf_config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.path} cannot be loaded: {_first_line(error)}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(f"model.path={config.path} lacks {len(missing)} weights, the first is {missing[0]}")
    return packed_causal_lm(model, config)


def packed_causal_lm(model: PreTrainedModel, config: ModelConfig) -> PackedCausalLM:
    """Make a loaded or newly built model read packed rows. Raises UnsupportedModelError if it cannot."""
    name = type(model).__name__
    check_supported(model.config)
    if any(parameter_name.endswith("sinks") for parameter_name, _ in model.named_parameters()):
        raise UnsupportedModelError(f"{name} uses attention sinks, which packed attention does not compute")
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME or not hasattr(model.get_decoder(), "layers"):
        raise UnsupportedModelError(f"{name} does not take an attention function of ours, so its rows cannot be packed")
    packed = PackedCausalLM(model, config.logprob_chunk_tokens)
    # Dropout is never active: the policy that learns must be the policy that was sampled.
    packed.eval()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in packed.layers:
            layer.training = (
                True  # read by the layer itself, only to decide on checkpointing; its children stay in eval
            )
    return packed


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError, naming the feature, if the model's configuration asks for one not computed here."""
    text = config.get_text_config()
    features = text.to_dict()
    layer_types = set(features.get("layer_types") or ())
    asked = sorted(layer_types - {"full_attention"})
    if not layer_types and features.get("sliding_window") and features.get("use_sliding_window", True):
        asked.append("sliding_window")
    asked += [name for name in sorted(features) if _changes_logits(name, features[name])]
    if asked:
        raise UnsupportedModelError(
            f"{type(text).__name__} uses {', '.join(asked)}, which packed attention and log-probs do not compute"
        )


def _changes_logits(name: str, value: Any) -> bool:
    """Soft-capping of scores or logits, or a factor on the logits, in the names that model families give them."""
    if "softcap" in name or "soft_cap" in name:
        return bool(value)
    return name in ("logit_scale", "logits_scaling") and value not in (None, 1, 1.0)


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside the model. Raises ConfigError if there is none."""
    _check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path} has no tokenizer: {_first_line(error)}") from error
    # Without tokenizer files, transformers makes some families an empty tokenizer instead of an error.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ConfigError(f"model.path={path} has no tokenizer: its vocabulary is empty")
    return tokenizer


def _check_path(path: str) -> None:
    if path in ("", "???"):
        raise ConfigError("model.path is not set; give a folder with a Hugging Face model and tokenizer")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
