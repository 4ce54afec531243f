"""A small policy that knows how to add and errs often: the start of the quickstart.

    random Qwen2 (3M) --right workings--> knows how
    --workings with 6 % wrong digits--> errs often: cache/model

`controller.sft` trains it on responses in this order, by `sft.yaml`, and keeps it for the next run:
`python -m examples.addition.warm_start`.
"""

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from controller import sft
from examples.addition import data
from examples.addition.data import write_records

CACHE = Path(__file__).parent / "cache"
CORRUPTION = 0.06
CLEAN_SHARE = 0.75  # share of steps, from the first
ANY_LENGTH = 0.2
STEPS = 600
BATCH = 32
WRONG = 0.1  # share of wrong digits in a rejected response


def tokenizer(characters: str = data.CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character, plus <pad>, <eos> and <unk>."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=128,
    )


def create_model(
    folder: Path,
    seed: int,
    characters: PreTrainedTokenizerFast | None = None,
    *,
    width: int = 256,
    layers: int = 4,
    vocabulary: int = 32,
    positions: int = 128,
    deviation: float = 0.02,
) -> None:
    """Save a random Qwen2 with tied embeddings, by default of 3M parameters, in Hugging Face format."""
    characters = characters or tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=deviation,
        bos_token_id=None,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    characters.save_pretrained(folder)


def records(seed: int) -> Iterator[dict[str, str]]:
    """Return prompts with responses in training order: right responses, then some with wrong digits."""
    rng = random.Random(seed)
    for step in range(STEPS):
        corruption = 0.0 if step < CLEAN_SHARE * STEPS else CORRUPTION
        for _ in range(BATCH):
            a, b = data.problem(rng, held_out=False, any_length=ANY_LENGTH)
            yield {
                "prompt": data.prompt(a, b),
                "response": data.corrupted(data.solution(a, b), corruption, rng),
            }


def pairs(count: int, seed: int, *, held_out: bool) -> Iterator[dict[str, str]]:
    """Return pairs for `controller.preferences`: the right response, and a response with wrong digits."""
    rng = random.Random(seed)
    for _ in range(count):
        a, b = data.problem(rng, held_out=held_out)
        right = wrong = data.solution(a, b)
        while wrong == right:
            wrong = data.corrupted(right, WRONG, rng)
        yield {"prompt": data.prompt(a, b), "chosen": right, "rejected": wrong}


def prepare() -> None:
    """Write the data and a random model."""
    print(
        f"warm start: {STEPS} steps on given responses (some minutes, only once)",
        flush=True,
    )
    disable_progress_bar()  # a small model needs no progress bar
    CACHE.mkdir(exist_ok=True)
    data.write(CACHE / "train.jsonl", 8192, seed=1, held_out=False)
    data.write(CACHE / "validation.jsonl", 512, seed=2, held_out=True)
    write_records(CACHE / "responses.jsonl", records(seed=0))
    write_records(CACHE / "pairs.jsonl", pairs(4096, 3, held_out=False))
    write_records(CACHE / "held_out_pairs.jsonl", pairs(256, 4, held_out=True))
    create_model(CACHE / "random", seed=0)


def main(*overrides: str) -> int:
    """Write the data and train the model, unless it is there. overrides: of settings in sft.yaml."""
    model = CACHE / "model"
    if (model / "config.json").exists():
        print(f"warm start: kept {model}")
        return 0
    prepare()
    return train(Path(__file__).with_name("sft.yaml"), model, *overrides)


def train(settings: Path, model: Path, *overrides: str) -> int:
    """Train `model` by `controller.sft` with a file of settings. Returns its exit code."""
    run = model.with_name("warm_start")
    shutil.rmtree(run, ignore_errors=True)  # from a warm start that was stopped
    code = sft.main(["--config", str(settings), *overrides])
    if code == 0:
        (run / "model").rename(model)
        print(f"warm start: {model}")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
