"""What a layer with states costs over a packed row: a call for each sequence, and all sequences at once.

    python -m tests.benchmarks.state_layers

One mixer of each kind, forward and backward in float32 on one thread, at the sizes below. Both ways run in
turn; medians and their ratio are printed as a table. Beside the time stand the operators that are called,
without views: a GPU launches one kernel or more for each, and these layers wait for launches.
"""

import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.benchmarks.families.shrinking import tiny_config
from workers.model.attention.attention import RowAttention
from workers.model.attention.mixers import find_mixers, split_by_segment
from workers.model.attention.state_rows import StateRow

TOKENS = 4096
ROUNDS = 5
FAMILIES = {
    "gated delta net": "qwen3_5_text",
    "Kimi's delta attention": "kimi_linear",
    "Mamba-2": "nemotron_h",
    "short convolution": "lfm2",
}


def rows() -> dict[str, list[int]]:
    """Lengths of rows with `TOKENS` tokens."""
    draw = random.Random(0)
    tail = sorted((draw.paretovariate(1.0) for _ in range(31)), reverse=True)
    lengths = [max(8, int(TOKENS * length / sum(tail))) for length in tail]
    lengths[0] += TOKENS - sum(lengths)
    return {
        "1 sequence": [TOKENS],
        "16 alike": [TOKENS // 16] * 16,
        "64 alike": [TOKENS // 64] * 64,
        "31, a long tail": lengths,
    }


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden: Tensor, packed_attention: object = None) -> Tensor:
        output: Tensor = self.mixer(hidden)
        return output


def build_layer(family: str) -> tuple[Layer, int]:
    """Return a layer with a family's mixer, and its hidden size."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(family), dtype=torch.float32
    ).eval()
    mixers = [mixer for layer in model.base_model.layers for mixer in find_mixers(layer)]
    return Layer(mixers[0]), model.config.get_text_config().hidden_size


class Launches(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not operator.is_view
        return operator(*args, **(kwargs or {}))


def launches(compute: Callable[[], Tensor]) -> int:
    with Launches() as counted:
        compute().square().sum().backward()
    return counted.count


def seconds(compute: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    compute().square().sum().backward()
    return time.perf_counter() - start


def compare(family: str, lengths: list[int]) -> tuple[list[float], list[int]]:
    """Return the median seconds, and the operators, of a call for each sequence and of all at once."""
    alone, size = build_layer(family)
    together, _ = build_layer(family)
    split_by_segment([together])
    hidden = torch.randn(1, sum(lengths), size)

    def one_by_one() -> Tensor:
        return torch.cat([alone(part) for part in hidden.split(lengths, dim=1)], dim=1)

    def at_once() -> Tensor:
        row = StateRow(lengths, hidden.device)
        return together(hidden, packed_attention=RowAttention(torch.zeros_like, row))

    ways = (one_by_one, at_once)
    counts = [launches(way) for way in ways]
    rounds = [[seconds(way) for way in ways] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)], counts


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| layer | row | ms, one by one | ms, at once | faster | operators | at once | fewer |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, family in FAMILIES.items():
        for row, lengths in rows().items():
            (alone, together), (many, few) = compare(family, lengths)
            times = f"{1e3 * alone:.0f} | {1e3 * together:.0f} | {alone / together:.1f}"
            print(
                f"| {name} | {row} | {times} | {many} | {few} | {many / few:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
