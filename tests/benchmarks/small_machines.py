"""Memory of a GPU with optimiser states and frozen weights of few bytes, measured as the dry run does.

    python -m tests.benchmarks.small_machines

Writes a section of docs/small-machines.md. It needs no GPU and no network, 1 GiB and about 10 CPU minutes, less
where ~/.cache/ballast/memory has the answers.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.config import Config, load
from controller.preflight.cluster import Cluster, run_on
from controller.preflight.memory import USABLE_SHARE, check_memory, host_memory, measure
from workers.errors import ConfigError

DOCUMENT = Path("docs/small-machines.md")
BEGIN = "## What a card of 24 GiB holds\n"
NEXT_SECTION = "\n## "
CARD = Cluster(nodes=1, cpus=8, gpus=1, gpu_gib=24)
COMMON = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Fields of their config.json. `COMMON` has the fields in which they agree."""
RUN = (
    "run.name=small-machines",
    "data.train=train.jsonl",
    "data.max_prompt_tokens=1024",
    "rollout.sampling.max_new_tokens=3072",
    "policy.max_tokens_per_micro_batch=4096",
    "model.gradient_checkpointing=full",
)
STATES = ("float32", "bfloat16", "int8")
BASES = ("float32", "bfloat16", "int8", "nf4")
INTRODUCTION = """
Written by `python -m tests.benchmarks.small_machines`, which measures as `--dry-run --cluster
nodes=1,gpus=1,gpu_gib=24,cpus=8` does: one GPU, micro-batches of 4,096 packed tokens, bfloat16,
`gradient_checkpointing: full`, no compiled layers, no reference. Policy and engine take turns on the card. A cell has
GiB between updates and at the peak of an update, while the engine sleeps. Of 24 GiB, 21.6 are to be used.

**Bold** cells fit: with the `rollout.gpu_memory_utilization` that the policy leaves, an engine holds its weights in
bfloat16 and a sequence of 4,096 tokens. A star marks a run whose update fits and whose engine does not:
it needs an engine elsewhere. SFT, preferences and reward models have no engine.

"""


@dataclass(frozen=True)
class Row:
    """GiB of a run. fits: its update and its engine on the card. update_fits: the update."""

    between: float
    peak: float
    fits: bool
    update_fits: bool

    @property
    def cell(self) -> str:
        text = f"{self.between:.1f} / {self.peak:.1f}"
        if self.fits:
            return f"**{text}**"
        return f"{text} *" if self.update_fits else text


def write_config(folder: Path, model: str) -> Path:
    """Write a model's config.json into a folder of its name, and return the folder."""
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(COMMON | MODELS[model]))
    return path


def configure(model: Path, *overrides: str) -> Config:
    config = load((), (*RUN, f"model.path={model}", *overrides))
    run_on(config, CARD)
    return config


def measure_row(model: Path, *overrides: str) -> Row:
    """Measure a configuration, and check it with the engine's share that it leaves."""
    config = configure(model, *overrides)
    memory = measure(config)
    if memory.problem:
        raise RuntimeError(f"{model.name} {' '.join(overrides)}: {memory.problem}")
    usable = USABLE_SHARE * CARD.gpu_gib
    between = sum(memory.kept.values())
    peak = max(sum(parts.values()) for parts in memory.passes.values())
    share = int((usable - between) / CARD.gpu_gib * 100) / 100
    fits = share > 0
    if fits:
        shared = configure(model, *overrides, f"rollout.gpu_memory_utilization={share}")
        try:
            check_memory(shared, memory, host_memory(shared, memory, ranks=1), CARD)
        except ConfigError:
            fits = False
    return Row(between, peak, fits, peak <= usable)


def table(title: str, columns: dict[str, tuple[str, ...]], folder: Path) -> str:
    """Measure all models with the settings of each column, and write a table."""
    lines = [
        f"| {title} | {' | '.join(f'`{name}`' for name in columns)} |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in MODELS:
        model = write_config(folder, name)
        cells = []
        for overrides in columns.values():
            row = measure_row(model, *overrides)
            print(name, *overrides, row, flush=True)
            cells.append(row.cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def section(folder: Path) -> str:
    states = {name: (f"policy.optimizer.state_dtype={name}",) for name in STATES}
    bases = {name: ("model.lora.rank=32", f"model.base_dtype={name}") for name in BASES}
    whole = table("all weights, `state_dtype`", states, folder)
    adapters = table("LoRA of rank 32, `base_dtype`", bases, folder)
    return BEGIN + INTRODUCTION + whole + "\n" + adapters


def main() -> None:
    """Measure, and write the section."""
    with tempfile.TemporaryDirectory() as folder:
        text = section(Path(folder))
    before, _, after = DOCUMENT.read_text().partition(BEGIN)
    _, heading, rest = after.partition(NEXT_SECTION)
    DOCUMENT.write_text(before + text + heading + rest)


if __name__ == "__main__":
    main()
