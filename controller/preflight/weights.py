"""Checks a model's weight files against its config.json, by reading their headers alone, before Ray starts.

    headers --names, shapes--> compared with the sizes in config.json --> nothing, or the first weight that differs

For the dense families of `model_shape` every weight is compared, for their mixtures all but the experts, for other
families the embedding and the output layer. Other differences are found when the model is loaded.
"""

import re

from controller.config.model_files import ModelFiles
from controller.config.weight_files import Shapes, weight_shapes
from controller.preflight.model_shape import FAMILIES, ModelShape, model_shape
from workers.errors import ConfigError

EMBEDDING = re.compile(r"((model|transformer|gpt_neox|language_model)\.)*(embed_tokens|wte|word_embeddings|embed_in)")
LAYER = re.compile(r"layers\.(\d+)\.")
PART = re.compile(r"layers\.\d+\.(self_attn\.(?!rotary_emb)|\w+_layernorm\.|mlp\.\w+_proj\.bias).*|norm\..*")
HEAD, SCORE = "lm_head", "score"


def check_weights(model: ModelFiles, key: str, path: str, *, output: str = "") -> None:
    """Raise ConfigError if a weight file is torn, or does not hold the weights that config.json describes.

    key, path: the setting that names the model, and its value. output: HEAD or SCORE, the layer without which the model
    cannot do its part; a tied HEAD is the embedding.
    """
    found = weight_shapes(model.folder, key)
    if "quantization_config" in model.description:  # stored in shapes of its own
        return
    known = model.description.get("model_type") in FAMILIES
    if known:
        _check_family(model, found, f"{key}={path}")
    _check_vocabulary(model, found, f"{key}={path}")
    # Other families may tie it without a word in their file, or store it under another name.
    elsewhere = output == HEAD and (not known or model.description.get("tie_word_embeddings"))
    if output and not elsewhere and f"{output}.weight" not in found:
        raise ConfigError(f"{key}={path}: the weight files have no {output}.weight; take a folder that has one.")


def _check_vocabulary(model: ModelFiles, found: Shapes, which: str) -> None:
    """Embedding and output layer [vocabulary, hidden], which most families have under one of few names."""
    text = model.description.get("text_config", model.description)
    hidden = text.get("hidden_size", text.get("n_embd"))
    for name, shape in found.items():
        layer = name.removesuffix(".weight")
        if None not in (model.vocabulary, hidden) and (layer == HEAD or EMBEDDING.fullmatch(layer)):
            _check_shape(which, name, shape, (model.vocabulary, hidden))


def _check_family(model: ModelFiles, found: Shapes, which: str) -> None:
    shape = model_shape(model.description)
    # A base model saved alone has no `model.` before its names; transformers takes both.
    plain = {name.removeprefix("model."): found_shape for name, found_shape in found.items()}
    expected_shapes = expected_weights(shape)
    for name, expected in expected_shapes.items():
        if name not in plain:
            raise ConfigError(f"{which}: the weight files lack {name}, which config.json asks for; fetch them again.")
        _check_shape(which, name, plain[name], expected)
    layers = {int(match[1]) for name in plain if (match := LAYER.match(name))}
    if len(layers) > shape.layers:
        raise ConfigError(
            f"{which}: the weight files hold {len(layers)} layers and config.json says {shape.layers}, so that the "
            "others would be left out; put the config.json of these weights beside them."
        )
    biased = model.description.get("attention_bias") or model.description.get("mlp_bias")
    for name in plain.keys() - expected_shapes.keys():
        if PART.fullmatch(name) and not (biased and name.endswith(".bias")):
            raise ConfigError(
                f"{which}: the model that config.json describes has no {name}, which would be left out; put the "
                "config.json of these weights beside them."
            )


def _check_shape(which: str, name: str, found: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    if found != expected:
        raise ConfigError(
            f"{which}: {name} is {_sizes(found)} in the weight files and {_sizes(expected)} by config.json; put the "
            "config.json of these weights beside them."
        )


def _sizes(shape: tuple[int | None, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def expected_weights(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes [outputs, inputs] of the weights that a model of `shape` cannot do without, by name after `model.`.

    Neither experts nor the output layer are among them.
    """
    weights: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "norm.weight": (shape.hidden,),
    }
    for layer in range(shape.layers):
        weights |= {f"layers.{layer}.{name}": size for name, size in _layer_weights(shape).items()}
    return weights


def _layer_weights(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {
        f"{_block(name)}.{name}.weight": (outputs, inputs) for name, (inputs, outputs) in shape.linear_modules.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = (shape.hidden,)
    if shape.query_key_value_bias:
        biased = {name: shape.linear_modules[f"{name}_proj"][1] for name in "qkv"}
        weights |= {f"self_attn.{name}_proj.bias": (outputs,) for name, outputs in biased.items()}
    if shape.head_norms:
        weights |= {f"self_attn.{name}_norm.weight": (shape.head,) for name in "qk"}
    return weights


def _block(linear_module: str) -> str:
    return "self_attn" if linear_module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
