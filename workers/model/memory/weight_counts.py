"""Count the weights of a decoder's layers on modules without storage, for families that no formula covers.

    config.json (stdin) --transformers--> modules on the meta device --> weights of each layer (stdout, JSON)

    echo '{...}' | python -m workers.model.memory.weight_counts

Answers with the language model's fields as transformers completes them, and `counted_layers`: of each layer
the weights that a token's products read, an expert by its share, and the weights of one expert.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from balancing.model_fields import Fields
from workers.model.pretrained import decoder_of, layers_of_decoder
from workers.model.skeleton import CLASSES

NO_PRODUCTS = ("A_log", "bias")
"""Names of matrices by which nothing is multiplied."""


def count_weights(description: Mapping[str, Any]) -> dict[str, Any]:
    """description: of config.json. Raises what transformers raises for a model that it cannot build."""
    config = CONFIG_MAPPING[description["model_type"]].from_dict(dict(description))
    text = config.get_text_config()
    model = build_without_storage(config)
    decoder = decoder_of(model)
    layers = list(layers_of_decoder(model) or ())
    fields = Fields(text)
    experts = fields.integer("num_experts", default=0)
    used = fields.integer("num_experts_per_tok") if experts else 0
    tables = {table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    counts = []
    for layer in layers:
        weights, expert = _products(layer.named_parameters(), tables, experts, used)
        counts.append([weights, expert / max(1, experts)])
    of_layers = {parameter for layer in layers for parameter in layer.parameters()}
    head = model.get_output_embeddings()
    around = tables | of_layers | (set() if head is None else {head.weight})
    counts[0][0] += _products(decoder.named_parameters(), around, experts, used)[0]
    return json.loads(text.to_json_string(use_diff=False)) | {"counted_layers": counts}


def build_without_storage(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the text model if transformers has it apart, else the whole one."""
    text = config.get_text_config()
    causal, with_images = CLASSES["lm"]
    with torch.device("meta"):
        if type(text) in causal:
            model: PreTrainedModel = causal[type(text)](text)
        elif type(config) in causal:
            model = causal[type(config)](config)
        else:
            model = with_images[type(config)](config)
    return model


def _products(
    parameters: Iterable[tuple[str, nn.Parameter]],
    left_out: set[nn.Parameter],
    experts: int,
    used: int,
) -> tuple[float, float]:
    """Return the weights that a token reads, and those of all experts."""
    read, of_experts = 0.0, 0.0
    for name, weight in parameters:
        if weight.ndim < 2 or weight in left_out or name.endswith(NO_PRODUCTS):
            continue
        named = ".experts." in f".{name}" and ".router." not in name
        is_expert = named or (weight.ndim == 3 and len(weight) == experts)
        read += weight.numel() * (used / experts if is_expert else 1.0)
        of_experts += weight.numel() if is_expert else 0
    return read, of_experts


if __name__ == "__main__":
    print(json.dumps(count_weights(json.load(sys.stdin))), flush=True)
