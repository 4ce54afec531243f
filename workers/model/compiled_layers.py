"""Compile each decoder layer with torch.compile, before FSDP wraps it.

    layer.__call__ --gradient checkpointing--> FSDP gathers --> [compiled: norm, q k v, rotary] --> attention
                                   --> [compiled: o, norm, MLP] --> FSDP frees
                                   --> [compiled: o, norm] --> router, exchange --> [compiled: experts] --> ..

Only `forward` is compiled, so that FSDP's hooks and checkpointing run around it unchanged. Attention is a
graph break on purpose: traced, it would recompile for every layer and every list of segment lengths. So all
layers of one kind and rows of any length share graphs. A router and the exchange of tokens are breaks too:
hooks replace choices, add losses and count, and ranks receive as many tokens as the data says.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from transformers import AttentionInterface

from workers.model.attention.attention import ATTENTION_NAME, ballast_packed
from workers.model.losses.logprobs import MOST_GRAPHS
from workers.model.sharding.tensor_parallel import blocks_with_experts, find_experts

BACKEND = "inductor"  # CPU tests use a backend that only traces


def compile_layers(layers: Iterable[nn.Module], *, shares_experts: bool) -> None:
    """Compile the forward pass of each layer, in place, on its first run. Call before `shard_model`.

    shares_experts: whether ranks share the experts, which then run as they are: their sizes differ in every
    pass.
    """
    compiled = partial(
        torch.compile, dynamic=True, backend=BACKEND, recompile_limit=MOST_GRAPHS
    )
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(ballast_packed))
    for layer in layers:
        experts = find_experts(layer)
        for block in blocks_with_experts(layer):
            for part in block.children():
                # These have shared experts, but no router.
                if not shares_experts if part in experts else any(part.children()):
                    part.forward = compiled(part.forward)
            block.forward = torch.compiler.disable(block.forward)
        layer.forward = compiled(layer.forward)
