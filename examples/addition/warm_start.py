"""A small policy that knows how to add and errs often: the start of the quickstart.

    random Qwen2 (3M) --right workings--> knows how --workings with 6 % wrong digits--> errs often: cache/model

Supervised, on the same engine that RL uses, without Ray, and kept for the next run:
`torchrun --nproc-per-node 2 -m examples.addition.warm_start`.
"""

import os
import random
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.addition import data
from workers.config import ModelConfig, OptimizerConfig
from workers.model.engine import Engine
from workers.model.losses import Denominators, sft
from workers.model.packing import Sequences

CACHE = Path(__file__).parent / "cache"
CORRUPTION = 0.06
CLEAN_SHARE = 0.75  # of the steps, the first ones
ANY_LENGTH = 0.2
STEPS = 600
BATCH = 32


def tokenizer(characters: str = data.CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character; <pad>, <eos> and <unk> beside them."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def create_model(
    folder: Path, seed: int, characters: PreTrainedTokenizerFast | None = None, *, width: int = 256, layers: int = 4
) -> None:
    """A random Qwen2, of 3M parameters unless it is told otherwise, with tied embeddings, in Hugging Face format."""
    characters = characters or tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    characters.save_pretrained(folder)


def batch(characters: PreTrainedTokenizerFast, corruption: float, rng: random.Random) -> Sequences:
    """BATCH problems with that share of wrong digits in their solutions; the loss is on the response."""
    rows = []
    for _ in range(BATCH):
        a, b = data.problem(rng, held_out=False, any_length=ANY_LENGTH)
        prompt = characters.encode(data.prompt(a, b))
        response = characters.encode(data.corrupted(data.solution(a, b), corruption, rng))
        ids = torch.tensor([*prompt, *response, characters.eos_token_id])
        rows.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(prompt)})
    return Sequences.from_list(rows)


def train(folder: Path, seed: int) -> None:
    """Supervised training of the model in `folder`, in place; every rank takes its share of each batch."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    characters = tokenizer()
    optimizer = OptimizerConfig(learning_rate=1.5e-3, schedule="cosine", warmup_steps=50, weight_decay=0.01)
    engine = Engine(ModelConfig(path=str(folder)), optimizer=optimizer, total_steps=STEPS, device="cpu")
    share = (rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    rng = random.Random(seed)
    for step in track(range(STEPS), description="warm start", disable=rank != 0):
        sequences = batch(characters, 0.0 if step < CLEAN_SHARE * STEPS else CORRUPTION, rng)
        loss = engine.forward_backward(sequences, [share], sft, Denominators.of(sequences))["loss"].result() * ranks
        engine.optimizer_step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"warm start: step {step + 1}/{STEPS}  loss {loss:.3f}", flush=True)
    engine.save_pretrained(folder)


def prepare(scratch: Path) -> None:
    """The data, and a random model in `scratch`."""
    CACHE.mkdir(exist_ok=True)
    data.write(CACHE / "train.jsonl", 8192, seed=1, held_out=False)
    data.write(CACHE / "validation.jsonl", 512, seed=2, held_out=True)
    create_model(scratch, seed=0)


def main() -> None:
    """Write the data and the model, unless they are there."""
    model, scratch = CACHE / "model", CACHE / "unfinished"
    if (model / "config.json").exists():
        print(f"warm start: kept {model}")
        return
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        prepare(scratch)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    train(scratch, seed=0)
    if first:
        scratch.rename(model)
        print(f"warm start: {model}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
