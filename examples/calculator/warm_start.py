"""A small policy that seldom asks the calculator: the start of this example.

    random Qwen2 (0.3M) --in the end a quarter asks, the others guess--> cache/model

Supervised, on the same engine that RL uses, without Ray, and kept for the next run. What the calculator says is read,
not learned, as in RL: `python -m examples.calculator.warm_start`.
"""

import random
from pathlib import Path

import torch
from rich.progress import track
from transformers import PreTrainedTokenizerFast

from examples.addition.warm_start import create_model, tokenizer
from examples.calculator import data
from workers.config import ModelConfig, OptimizerConfig
from workers.model.engine import Engine
from workers.model.losses import Denominators, sft
from workers.model.packing import Sequences

CACHE = Path(__file__).parent / "cache"
ASKS_FIRST, ASKS = 0.6, 0.25  # of the examples: while it learns to copy the problem, and in the last steps
STEPS, LAST_STEPS = 300, 120
BATCH = 64


def episode(rng: random.Random, asks: float) -> list[tuple[str, bool]]:
    """(text, whether the policy wrote it) of one example: the prompt, then turns and what the calculator said."""
    a, b = data.problem(rng, held_out=False)
    if rng.random() < asks:
        return [(data.prompt(a, b), False), (f"[{a}+{b}]", True), (f"<{a + b}>", False), (str(a + b), True)]
    return [(data.prompt(a, b), False), (str(rng.randint(200, 2 * data.LARGEST)), True)]


def batch(characters: PreTrainedTokenizerFast, rng: random.Random, asks: float) -> Sequences:
    """BATCH examples; every turn of the policy ends with <eos>, and the loss is on its turns."""
    rows = []
    for _ in range(BATCH):
        ids, mask = [], []
        for text, sampled in episode(rng, asks):
            tokens = characters.encode(text) + ([characters.eos_token_id] if sampled else [])
            ids += tokens
            mask += [sampled] * len(tokens)
        rows.append({"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)})
    return Sequences.from_list(rows)


def train(folder: Path, seed: int) -> None:
    """Supervised training of the model in `folder`, in place."""
    characters = tokenizer(data.CHARACTERS)
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=25, weight_decay=0.01)
    engine = Engine(ModelConfig(path=str(folder)), optimizer=optimizer, total_steps=STEPS, device="cpu")
    rng = random.Random(seed)
    for step in track(range(STEPS), description="warm start"):
        sequences = batch(characters, rng, ASKS if step >= STEPS - LAST_STEPS else ASKS_FIRST)
        loss = engine.forward_backward(sequences, [(0, BATCH)], sft, Denominators.of(sequences))["loss"].result()
        engine.optimizer_step()
        if (step + 1) % 50 == 0:
            print(f"warm start: step {step + 1}/{STEPS}  loss {loss:.3f}", flush=True)
    engine.save_pretrained(folder)


def main() -> None:
    """Write the data and the model, unless they are there."""
    model, scratch = CACHE / "model", CACHE / "unfinished"
    if (model / "config.json").exists():
        print(f"warm start: kept {model}")
        return
    CACHE.mkdir(exist_ok=True)
    data.write(CACHE / "train.jsonl", 4096, seed=1, held_out=False)
    data.write(CACHE / "validation.jsonl", 256, seed=2, held_out=True)
    create_model(scratch, 0, tokenizer(data.CHARACTERS), width=128, layers=2)
    train(scratch, seed=0)
    scratch.rename(model)
    print(f"warm start: {model}")


if __name__ == "__main__":
    main()
