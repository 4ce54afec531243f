"""Count the layers that carry a state from token to token instead of attending.

| kind | weights of the projections | state of a sequence |
| --- | --- | --- |
| Mamba-1 | in (2 inner), x (rank + 2 states), dt, out | inner x states |
| Mamba-2 | in (2 inner + 2 groups of states + heads), out | inner x states |
| gated delta net | q, k, v, gate, two numbers a head, out | heads x key size x value size |
| Kimi's delta attention | q, k, v, two gates of one head's size, a number a head, out | heads x size x size |
| short convolution | in (3 hidden), out | the last tokens |
| lightning attention | q, k, v, gate, out | heads x size x size |

A kernel's least work: it multiplies with the state once to read and once to add, delta rules once more to
forget. Convolutions are left out of the products: they are below 0.2 % of a layer.
"""

from typing import NamedTuple

from balancing.layer_kinds import CONV
from balancing.model_fields import Fields


class StateCounts(NamedTuple):
    """weights: of the projections. products: multiplications of a token with the state. state: numbers that a
    sequence keeps.
    """

    weights: int = 0
    products: int = 0
    state: int = 0


def count_state(fields: Fields, kind: str) -> StateCounts:
    """Count a layer with a state by the sizes in its config. Raises CostModelError for a missing key."""
    if kind == CONV:
        return _short_convolution(fields)
    if fields.get("linear_num_value_heads"):
        return _gated_delta_net(fields)
    if fields.get("linear_num_heads") or fields.part("linear_attn_config"):
        return _kimi_delta_attention(fields)
    if fields.get("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):
        return _mamba_2(
            fields, fields.integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
        )
    if fields.get("model_type") == "mamba2":
        return _mamba_2(fields, fields.integer("num_attention_heads"))
    if fields.get("mamba_dt_rank", "time_step_rank"):
        return _mamba_1(fields)
    return _lightning_attention(fields)


def _short_convolution(fields: Fields) -> StateCounts:
    hidden = fields.integer("hidden_size")
    reach = fields.integer("conv_L_cache", default=3)
    return StateCounts(4 * hidden**2, 0, hidden * (reach - 1))


def _gated_delta_net(fields: Fields) -> StateCounts:
    hidden = fields.integer("hidden_size")
    heads = fields.integer("linear_num_value_heads")
    key_size = fields.integer("linear_key_head_dim")
    keys = fields.integer("linear_num_key_heads") * key_size
    values = heads * fields.integer("linear_value_head_dim")
    reach = fields.integer("linear_conv_kernel_dim", default=4)
    return StateCounts(
        weights=hidden * (2 * keys + 3 * values + 2 * heads),
        products=3 * key_size * values,
        state=key_size * values + (2 * keys + values) * (reach - 1),
    )


def _kimi_delta_attention(fields: Fields) -> StateCounts:
    part = Fields(fields.part("linear_attn_config"), nested="")
    hidden = fields.integer("hidden_size")
    heads = fields.integer("linear_num_heads", default=0) or part.integer("num_heads")
    size = fields.integer("linear_head_dim", default=0) or part.integer("head_dim")
    reach = fields.integer("linear_conv_kernel_dim", default=4)
    width = heads * size
    gates = 2 * size * (hidden + width)
    return StateCounts(
        weights=hidden * (4 * width + heads) + gates,
        products=3 * size * width,
        state=size * width + 3 * width * (reach - 1),
    )


def _mamba_2(fields: Fields, heads: int) -> StateCounts:
    hidden = fields.integer("hidden_size")
    inner = heads * fields.integer(
        "mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim"
    )
    size = fields.integer("ssm_state_size", "mamba_d_state", "state_size")
    states = size * fields.integer("n_groups", "mamba_n_groups", "mamba_ngroups")
    reach = fields.integer("conv_kernel", "mamba_d_conv", default=4)
    return StateCounts(
        weights=hidden * (3 * inner + 2 * states + heads),
        products=2 * inner * size,
        state=inner * size + (inner + 2 * states) * (reach - 1),
    )


def _mamba_1(fields: Fields) -> StateCounts:
    hidden = fields.integer("hidden_size")
    inner = hidden * fields.integer("mamba_expand", "expand", default=2)
    if fields.get("state_size"):  # Mamba's own models name the width
        inner = fields.integer("intermediate_size", default=inner)
    size = fields.integer("mamba_d_state", "state_size")
    rank = fields.get("mamba_dt_rank", "time_step_rank")
    rank = -(-hidden // 16) if rank == "auto" else int(rank)
    reach = fields.integer("mamba_d_conv", "conv_kernel", default=4)
    return StateCounts(
        weights=inner * (3 * hidden + 2 * rank + 2 * size),
        products=2 * inner * size,
        state=inner * (size + reach - 1),
    )


def _lightning_attention(fields: Fields) -> StateCounts:
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    size = fields.integer("head_dim", default=hidden // heads)
    return StateCounts(5 * hidden * heads * size, 2 * heads * size**2, heads * size**2)
