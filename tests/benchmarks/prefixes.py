"""What it buys to compute shared prompts once, as ratios within one run on CPU.

    python -m tests.benchmarks.prefixes [--repeats 3] [--output docs/prefixes-benchmark.md]                or make bench

One micro-batch through a 20M model, forward and backward, with model.share_prefixes=never and auto in turns.
Times are medians of CPU seconds. The ratio of FLOPs is that of the plan's cost model; that of memory is of
the bytes that tensors hold at most during a pass, beyond the parameters. Workloads with images go through a
Qwen2.5-VL, its tower frozen. Those of a family with states go through four of its layers, the last with
attention.
"""

from dataclasses import dataclass
from functools import cache
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import PIL.Image
import torch
from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration

from balancing import CostModel
from examples.vision import warm_start
from tests.benchmarks.command import read_options, write_page
from tests.benchmarks.engine import CPU, VOCABULARY, model_of_20m
from tests.tensor_memory import peak_tensor_bytes
from tests.workers.model.tiny import tiny_config
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image, PlacedImage
from workers.config.roles import ModelConfig
from workers.images.images import digest_of, png_of
from workers.model.layout import RowLayout
from workers.model.model import PackedCausalLM, packed_causal_lm

HEADER = """# Shared prompts

Written by `python -m tests.benchmarks.prefixes`: forward and backward of one micro-batch with one or several groups,
through a 20M model in float32 on one core, without and with `model.share_prefixes` in turns. Times are medians of CPU
seconds. Memory is the peak of bytes in tensors, without the parameters. Workloads with an image go through a
Qwen2.5-VL with a frozen vision tower of 7M. An image of 448 x 448 pixels has 1,024 patches and 256 tokens. The tower
computes it once either way. Workloads of a family with states go through four of its layers, the last with attention,
of hidden size 256.

| prompt / response / samples x groups | tokens | FLOPs | seconds without | with | faster | memory |
| --- | --- | --- | --- | --- | --- | --- |
"""


IMAGE, PATCH = 448, 14
GATED_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
HYBRIDS: dict[str, dict[str, int]] = {
    "qwen3_5": GATED_DELTA,
    "qwen3_next": GATED_DELTA | {"moe_intermediate_size": 256},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "chunk_size": 64,
    },
    "lfm2": {},
    "kimi_linear": {
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "moe_intermediate_size": 256,
    },
}
"""Sizes of families with states."""
IMAGE_TOKENS = (IMAGE // PATCH // 2) ** 2


def image_token() -> int:
    return int(warm_start.tokenizer().convert_tokens_to_ids("<|image_pad|>"))


def hybrid_model(family: str) -> PackedCausalLM:
    """Return a model with three layers with a state and one with attention."""
    kinds = tiny_config(family).layer_types
    sizes = HYBRIDS[family] | {"layer_types": [*kinds[:1] * 3, *kinds[1:]]}
    config = tiny_config(
        family,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        **sizes,
    )
    torch.manual_seed(0)
    return packed_causal_lm(
        AutoModelForCausalLM.from_config(config), ModelConfig(layout="packed")
    )


def noise(generator: torch.Generator) -> Image:
    pixels = torch.randint(256, (IMAGE, IMAGE, 3), generator=generator, dtype=torch.uint8)
    picture = PIL.Image.fromarray(pixels.numpy())
    return Image(digest_of(picture), *picture.size, png_of(picture))


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def vision_model_of_20m() -> PackedCausalLM:
    """A text model as `model_of_20m`, which reads the images of the vision example."""
    processor = warm_start.processor()
    processor.image_processor.size = {"shortest_edge": PATCH**2, "longest_edge": IMAGE**2}
    processor.tokenizer.model_max_length = 2 * IMAGE_TOKENS
    processor.save_pretrained(_folder().name)
    config, text = (
        warm_start.config(processor.tokenizer),
        model_of_20m("packed").model.config,
    )
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        setattr(config.text_config, name, getattr(text, name))
    config.text_config.layer_types = text.layer_types
    config.text_config.rope_parameters["mrope_section"] = [8, 12, 12]  # half of a head
    tower = {
        "depth": 6,
        "hidden_size": 256,
        "intermediate_size": 768,
        "out_hidden_size": text.hidden_size,
    }
    for name, value in tower.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.name_or_path = _folder().name
    module = packed_causal_lm(model, ModelConfig(layout="packed"))
    module.set_trained(True, train_vision=False)
    return module


@dataclass(frozen=True)
class Workload:
    """Groups of samples that share a prompt; lengths in tokens. vary: responses of 1/2 to 3/2 of their
    length.

    image: the prompt's first tokens are those of an image of IMAGE pixels a side. family: one of HYBRIDS.
    """

    prompt: int
    response: int
    samples: int
    groups: int = 1
    vary: bool = False
    image: bool = False
    family: str = ""

    def __str__(self) -> str:
        prompt = (
            f"{IMAGE_TOKENS} of an image + {self.prompt - IMAGE_TOKENS}"
            if self.image
            else self.prompt
        )
        model = f"{self.family}: " * bool(self.family)
        return f"{model}{prompt} / {self.response} / {self.samples} x {self.groups}"

    def model(self) -> PackedCausalLM:
        if self.family:
            return hybrid_model(self.family)
        return vision_model_of_20m() if self.image else model_of_20m("packed")

    @property
    def sequences(self) -> DataProto:
        """Random ids; responses are predicted."""
        generator, rows, images = torch.Generator().manual_seed(0), [], []
        for _ in range(self.groups):
            prompt = torch.randint(VOCABULARY, (self.prompt,), generator=generator)
            if self.image:
                prompt[:IMAGE_TOKENS] = image_token()
                placed = (PlacedImage(noise(generator), 0, IMAGE_TOKENS),)
                images += [placed] * self.samples
            for sample in range(self.samples):
                spread = (sample + 0.5) / self.samples + 0.5 if self.vary else 1.0
                response = torch.randint(
                    VOCABULARY,
                    (max(1, round(spread * self.response)),),
                    generator=generator,
                )
                ids = torch.cat([prompt, response])
                rows.append(
                    {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= self.prompt}
                )
        batch = DataProto.from_list(rows)
        if self.image:
            batch.objects["images"] = object_column(images)
        return batch

    @property
    def saved(self) -> tuple[float, float]:
        """The ratios of tokens and of FLOPs, without sharing / with it."""
        lengths = self.sequences.lengths.numpy()
        cost = CostModel.from_model_config(self.model().model.config)
        again = self.groups * (self.samples - 1)
        tokens, work = float(lengths.sum()), float(cost.workload(lengths).sum())
        less = again * float(cost.workload([self.prompt])[0])
        return tokens / (tokens - again * self.prompt), work / (work - less)


WORKLOADS = (
    Workload(512, 64, 16),
    Workload(1024, 1024, 8),
    Workload(8, 24, 8, groups=4, vary=True),  # the quickstart's micro-batch of 1,024 tokens
    Workload(128, 512, 8, groups=2, vary=True),
    Workload(8, 500, 4, groups=2, vary=True),
    Workload(1, 64, 1, groups=16, vary=True),  # nothing to share
    Workload(IMAGE_TOKENS + 32, 64, 8, image=True),
    Workload(IMAGE_TOKENS + 32, 32, 8, groups=2, image=True, vary=True),
    *[Workload(1024, 128, 16, family=family) for family in HYBRIDS],
)


class Passes:
    """Forward and backward of one micro-batch."""

    def __init__(self, workload: Workload, share_prefixes: str) -> None:
        self._sequences = workload.sequences
        self._module = workload.model()
        config = ModelConfig(share_prefixes=share_prefixes)
        self._layout = RowLayout(config, None, self._module, CPU, torch.float32)

    def run(self) -> float:
        """CPU seconds of one pass."""
        start = process_time()
        log_probs, _ = self._module(self._layout.lay_out(self._sequences), temperature=1.0)
        log_probs.mean().backward()
        self._module.zero_grad()
        return process_time() - start


def measured(workload: Workload, repeats: int) -> str:
    """A line of the table."""
    ways = {share: Passes(workload, share) for share in ("never", "auto")}
    for passes in ways.values():
        passes.run()
    turns = [
        {share: passes.run() for share, passes in ways.items()} for _ in range(repeats)
    ]
    without, shared = (median(turn[share] for turn in turns) for share in ways)
    before, after = (peak_tensor_bytes(passes.run) for passes in ways.values())
    tokens, work = workload.saved
    return (
        f"| {workload} | {tokens:.2f}x | {work:.2f}x | {without:.3f} | {shared:.3f} | "
        f"{without / shared:.2f}x | {before / after:.2f}x |"
    )


def main() -> None:
    """Measure all workloads and print the table."""
    arguments = read_options(__doc__, repeats=3, threads=1, output=None)
    torch.set_num_threads(arguments.threads)
    lines = []
    for workload in WORKLOADS:
        lines.append(measured(workload, arguments.repeats))
        print(lines[-1], flush=True)
    write_page(arguments.output, HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
