"""Figures of GPUs from their data sheets, and the share of them that a kind of work reaches."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from balancing.errors import OptionError


@dataclass(frozen=True)
class Machine:
    """One GPU, or one core of a CPU, and what connects it.

    gib: memory. tflops: peak of dense products in bfloat16, tflops32: in float32, in 1e12 FLOP/s. Bandwidths
    in GB/s: bandwidth (of memory), link (to GPUs of the node, one direction), network (to other nodes, each
    GPU's share) and host (PCIe). source: of the figures. kv_block: tokens by which engines find shared
    prompts. In seconds: kernel (launch, which a GPU hides if `launches_ahead`), latency (of a collective),
    engine_step, engine_layer and engine_sequence (what a decoding step adds to bytes and FLOPs), micro_batch
    (host), phase (start and end).
    transfer, weight: seconds of a weight transfer besides bytes, and for each weight.
    sleep: to sleep and wake.
    contention: factor of a role's seconds while others compute on the same CPU.
    """

    name: str
    gib: float
    tflops: float
    tflops32: float
    bandwidth: float
    link: float
    network: float
    source: str = ""
    host: float = 50.0
    kv_block: int = 16
    kernel: float = 6e-6
    latency: float = 2e-5
    launches_ahead: bool = True
    engine_step: float = 2e-3
    engine_layer: float = 2e-5
    engine_sequence: float = 1e-5
    micro_batch: float = 5e-3
    phase: float = 0.1
    transfer: float = 1.0
    weight: float = 1e-4
    sleep: float = 1.0
    contention: float = 1.0

    def flops(self, dtype: str) -> float:
        """Return the peak in FLOP/s."""
        return 1e12 * (self.tflops32 if dtype == "float32" else self.tflops)

    def bus(self, ranks: int, gpus_per_node: int) -> float:
        """Return bytes/s of a collective over neighbouring ranks. Nodes use the network of all their GPUs."""
        if ranks <= gpus_per_node:
            return 1e9 * self.link
        return 1e9 * min(self.link, self.network * gpus_per_node)


TABLE = Path(__file__).parent / "machines.json"
MACHINES = {
    name: Machine(name, **fields)
    for name, fields in json.loads(TABLE.read_text(encoding="utf-8")).items()
}
"""Machines by name. Each names the source of its figures."""


def machine_named(name: str, **fields: float) -> Machine:
    """Return a machine of the table, with other figures if given. `custom` begins with the H100's.

    Raises OptionError for an unknown name.
    """
    if name not in MACHINES and name != "custom":
        raise OptionError(
            f"gpu={name}: unknown. Use {', '.join(MACHINES)}, or custom with its figures."
        )
    return replace(MACHINES.get(name, MACHINES["H100"]), name=name, **fields)  # type: ignore[arg-type]


SPREADS = {"generation": 0.35, "training": 0.2, "collectives": 0.4, "overheads": 0.5}
"""Relative error of a part's seconds without a measurement on the machine."""

ATTENTION_OF_FLASH4 = 0.5
"""Share of the peak that attention reaches with flash-attn-4: that of torch's kernel times the ratio of their
times forward, and forward with backward, at 65,536 tokens on an H200 (docs/gpu-benchmark.md). Not fitted to
a step.
"""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a machine's peak that kinds of work reach, and `spread`, the relative error of a prediction.

    matmul, attention: of FLOP/s, in training. prefill: of FLOP/s, in engines. elementwise, decode: of memory
    bandwidth, in training and in engines. link: of bandwidths between GPUs. overlap: share of the computation
    that hides FSDP2's collectives.

    Defaults: docs/gpu-benchmark.md and docs/gpu-roofline.md measured matmul, attention (torch's own kernel)
    and elementwise on an H200. Nothing was measured of the others, which are usual values.
    """

    matmul: float = 0.69
    attention: float = 0.26
    prefill: float = 0.5
    elementwise: float = 0.78
    decode: float = 0.6
    link: float = 0.7
    overlap: float = 0.8
    spread: dict[str, float] = field(default_factory=lambda: dict(SPREADS), hash=False)
