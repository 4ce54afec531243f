"""Figures of GPUs from their data sheets, and the share of them that a kind of work reaches."""

from dataclasses import dataclass, field, replace

from balancing.errors import OptionError

SOURCES = {
    "H100": "https://www.nvidia.com/en-us/data-center/h100/ and the guide of the DGX H100 (400 Gbit/s a GPU)",
    "H200": "https://www.nvidia.com/en-us/data-center/h200/",
    "B200": "https://www.nvidia.com/en-us/data-center/dgx-b200/ (an eighth of a DGX)",
    "A100": "https://www.nvidia.com/en-us/data-center/a100/ (80 GB SXM) and the guide of the DGX A100",
    "L40S": "https://www.nvidia.com/en-us/data-center/l40s/ (PCIe 4.0 x16)",
    "MI300X": "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    "cpu": "measured on one core with AVX2 (python -m controller.doctor --speed)",
}
"""Where a machine's figures come from."""


@dataclass(frozen=True)
class Machine:
    """One GPU, or one core of a CPU, and what connects it.

    gib: memory. tflops: peak of dense products in bfloat16, tflops32: in float32, in 1e12 FLOP/s. Bandwidths in GB/s:
    bandwidth (of memory), link (to GPUs of the node, one direction), network (to other nodes, each GPU's share) and
    host (PCIe). gpus: of a usual node. kv_block: tokens by which engines find shared prompts. In seconds: kernel
    (launch, which a GPU hides if `launches_ahead`), latency (of a collective), engine_step, engine_layer and
    engine_sequence (what a decoding step adds to bytes and FLOPs), micro_batch (host), phase (start and end), transfer
    (of weights, besides bytes), sleep (and wake).
    """

    name: str
    gib: float
    tflops: float
    tflops32: float
    bandwidth: float
    link: float
    network: float
    gpus: int = 8
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
    sleep: float = 1.0

    def flops(self, dtype: str) -> float:
        """Return the peak in FLOP/s."""
        return 1e12 * (self.tflops32 if dtype == "float32" else self.tflops)

    def bus(self, ranks: int, gpus_per_node: int) -> float:
        """Return bytes/s of a collective over neighbouring ranks. Nodes use the network of all their GPUs."""
        if ranks <= gpus_per_node:
            return 1e9 * self.link
        return 1e9 * min(self.link, self.network * gpus_per_node)


MACHINES = {
    each.name: each
    for each in (
        Machine("H100", 80, 989.4, 67.0, 3350, 450, 50),
        Machine("H200", 140, 989.4, 67.0, 4800, 450, 50),
        Machine("B200", 179, 2250.0, 80.0, 8000, 900, 50),
        Machine("A100", 80, 312.0, 19.5, 2039, 300, 25, host=25),
        Machine("L40S", 45, 362.0, 91.6, 864, 32, 25, host=25),
        Machine("MI300X", 192, 1307.4, 163.4, 5300, 448, 50),
        Machine(
            "cpu", 12, 0.05, 0.05, 8, 1, 1, gpus=2, host=8, kv_block=128, kernel=1e-5, latency=1e-3,
            launches_ahead=False, engine_step=3e-3, engine_layer=5e-4, engine_sequence=3e-5, micro_batch=0.02,
            phase=0.03, transfer=0.2, sleep=0.0,
        ),
    )
}  # fmt: skip
"""Machines by name. See SOURCES."""


def machine_named(name: str, **fields: float) -> Machine:
    """Return a machine of the table, with other figures if given. `custom` begins with the H100's.

    Raises OptionError for an unknown name.
    """
    if name not in MACHINES and name != "custom":
        raise OptionError(f"gpu={name}: unknown. Use {', '.join(MACHINES)}, or custom with its figures.")
    return replace(MACHINES.get(name, MACHINES["H100"]), name=name, **fields)  # type: ignore[arg-type]


SPREADS = {"generation": 0.35, "training": 0.2, "collectives": 0.4, "overheads": 0.5}
"""Relative error of a part's seconds without a measurement on the machine."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a machine's peak that kinds of work reach, and `spread`, the relative error of a prediction.

    matmul, attention: of FLOP/s, in training. prefill: of FLOP/s, in engines. elementwise: of memory bandwidth, in
    training. decode: of memory bandwidth, in engines. link: of bandwidths between GPUs. fitted: the kinds that were
    fitted to measurements. overlap: share of the computation that hides FSDP2's collectives.

    Defaults: docs/gpu-benchmark.md and docs/gpu-roofline.md measured matmul, attention and elementwise on an H200.
    Nothing was measured of the others, which are usual values.
    """

    matmul: float = 0.69
    attention: float = 0.38
    prefill: float = 0.5
    elementwise: float = 0.78
    decode: float = 0.6
    link: float = 0.7
    overlap: float = 0.8
    spread: dict[str, float] = field(default_factory=lambda: dict(SPREADS), hash=False)

    @property
    def fitted(self) -> tuple[str, ...]:
        """Return the phases whose error comes from measurements."""
        return tuple(name for name, spread in self.spread.items() if spread != SPREADS.get(name))
