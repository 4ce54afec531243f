"""A small policy that calls a tool in two cases of five: the start of this example.

    random Qwen2 (0.4M), Qwen3's template --in the end two of five call, the others guess--> cache/model

`controller.sft` trains it on conversations in this order, by `sft.yaml`, once: `python -m
examples.tools.warm_start`. The examples `agent` and `code` start in the same way.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from transformers.utils.logging import disable_progress_bar

from examples.addition.data import write_records
from examples.addition.warm_start import create_model, train
from examples.tools import data, tools

# Share of conversations: while it learns to copy numbers, and in the last steps.
CALLS_FIRST, CALLS = (1.0, 0.4)
STEPS, LAST_STEPS = 320, 60
BATCH = 32
VOCABULARY = 512
START, END = "<|im_start|>", "<|im_end|>"
SCHEMAS = [get_json_schema(tool) for tool in (tools.add, tools.subtract)]

Conversation = Callable[[random.Random, float], dict[str, Any]]


def conversation(rng: random.Random, calls: float) -> dict[str, Any]:
    """A record of `controller.sft`."""
    each = data.problem(rng, held_out=False)
    turns = data.called(*each) if rng.random() < calls else data.guessed(rng, each[1])
    return {"messages": [*data.question(*each), *turns], "tools": SCHEMAS}


def records(conversation: Conversation, seed: int) -> Iterator[dict[str, Any]]:
    """Return conversations in training order."""
    rng = random.Random(seed)
    for step in range(STEPS):
        calls = CALLS if step >= STEPS - LAST_STEPS else CALLS_FIRST
        yield from (conversation(rng, calls) for _ in range(BATCH))


def tokenizer(conversation: Conversation = conversation) -> PreTrainedTokenizerFast:
    """Qwen3's template. Its texts, those of the tools and numbers are a token each, other texts a token a
    byte.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    )
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=END, pad_token="<|endoftext|>"
    )
    made.add_tokens([START], special_tokens=True)
    made.chat_template = Path(__file__).with_name("chat_template.jinja").read_text()
    said = [
        conversation(random.Random(seed), calls) for seed in range(9) for calls in (0, 1)
    ]
    texts = [
        str(made.apply_chat_template(each["messages"], tools=each["tools"], tokenize=False))
        for each in said
    ]
    marks = sorted(
        {
            mark
            for text in texts
            for mark in re.findall(r"</?(?:think|tool_call|tool_response)>", text)
        }
    )
    repeated = sorted(
        {
            part
            for text in texts
            for part in re.split(
                rf"[\d\n+-]|{'|'.join(map(re.escape, [*marks, END, START]))}", text
            )
        }
    )
    numbers = map(str, range(data.SMALLEST, 2 * data.LARGEST + 1))
    made.add_tokens(
        [
            AddedToken(each, normalized=False)
            for each in [*marks, *filter(None, repeated), *numbers]
        ]
    )
    return made


def create(folder: Path, conversation: Conversation) -> None:
    """Save the random model with its tokenizer."""
    create_model(
        folder,
        0,
        tokenizer(conversation),
        width=128,
        layers=2,
        vocabulary=VOCABULARY,
        positions=256,
        deviation=0.1,
    )


def start(example: Path, conversation: Conversation, write: Callable[..., None]) -> int:
    """Write an example's data and train its model, unless it is there. Returns an exit code."""
    cache = example / "cache"
    model = cache / "model"
    if (model / "config.json").exists():
        print(f"warm start: kept {model}")
        return 0
    print(
        f"warm start: {STEPS} steps on given conversations (some minutes, only once)",
        flush=True,
    )
    disable_progress_bar()  # a small model needs no progress bar
    cache.mkdir(exist_ok=True)
    write(cache / "train.jsonl", 4096, seed=1, held_out=False)
    write(cache / "validation.jsonl", 256, seed=2, held_out=True)
    write_records(cache / "conversations.jsonl", records(conversation, seed=0))
    create(cache / "random", conversation)
    places = {
        "run.dir": cache,
        "model.path": cache / "random",
        "data.train": cache / "conversations.jsonl",
    }
    return train(
        Path(__file__).with_name("sft.yaml"),
        model,
        *(f"{key}={place}" for key, place in places.items()),
    )


if __name__ == "__main__":
    sys.exit(start(Path(__file__).parent, conversation, data.write))
