"""torch.compile of each decoder layer, before FSDP wraps it: norms, rotary embedding and gated products become one
kernel each.

    layer.__call__ --gradient checkpointing--> FSDP gathers --> [compiled: norm, q k v, rotary] --> attention, as it is
                                                            --> [compiled: o, norm, MLP] --> FSDP frees

`forward` is compiled and not the layer, so that FSDP's hooks and checkpointing run around it as without compiling (as
in torchtitan). Attention is a graph break on purpose: traced, it would be compiled again for every layer index that
`ballast_packed` reads, and for every list of segment lengths. Without it all layers of one kind share their graphs, and
rows of any length do: dimensions are dynamic from the start. Compiled apart are only passes with and without gradient,
inputs that require one or do not, and rows of one token; all of them come in the first step.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import AttentionInterface

from workers.model.attention import ATTENTION_NAME, ballast_packed

BACKEND = "inductor"  # tests on a CPU take one that only traces
MOST_GRAPHS = 64
"""Graphs of one function. A family with two kinds of layers and adapters exceeds dynamo's default of 8, beyond which
dynamo runs the function uncompiled, with a warning."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each layer, in place; it happens when each first runs. Before `shard_model`."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(ballast_packed))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND, recompile_limit=MOST_GRAPHS)
