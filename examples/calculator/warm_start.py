"""A small policy that seldom asks the calculator: the start of this example.

    random Qwen2 (0.3M) --in the end a quarter asks, the others guess--> cache/model

`controller.sft` trains it on conversations in this order, by `sft.yaml`, once. The calculator's answers are
read, not learned, as in RL: `python -m examples.calculator.warm_start`.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.addition.data import write_records
from examples.addition.warm_start import create_model, tokenizer, train
from examples.calculator import data

CACHE = Path(__file__).parent / "cache"
# Share of examples: while it learns to copy the problem, and in the last steps.
ASKS_FIRST, ASKS = (0.6, 0.25)
STEPS, LAST_STEPS = 300, 120
BATCH = 64
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'assistant' %}{% generation %}{{ turn.content }}<eos>{% "
    "endgeneration %}{% else %}{{ turn.content }}{% endif %}{% endfor %}"
)


def episode(rng: random.Random, asks: float) -> list[tuple[str, bool]]:
    """(text, whether the policy wrote it) of one example: the prompt, then turns and what the calculator
    said.
    """
    a, b = data.problem(rng, held_out=False)
    if rng.random() < asks:
        return [
            (data.prompt(a, b), False),
            (f"[{a}+{b}]", True),
            (f"<{a + b}>", False),
            (str(a + b), True),
        ]
    return [(data.prompt(a, b), False), (str(rng.randint(200, 2 * data.LARGEST)), True)]


def conversation(parts: list[tuple[str, bool]]) -> dict[str, list[dict[str, str]]]:
    """A record of `controller.sft`: the policy's turns are the assistant's."""
    return {
        "messages": [
            {"role": "assistant" if own else "user", "content": text} for text, own in parts
        ]
    }


def records(seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Return conversations in training order."""
    rng = random.Random(seed)
    for step in range(STEPS):
        asks = ASKS if step >= STEPS - LAST_STEPS else ASKS_FIRST
        yield from (conversation(episode(rng, asks)) for _ in range(BATCH))


def characters() -> PreTrainedTokenizerFast:
    """One token a character, with a template that puts nothing between turns."""
    made = tokenizer(data.CHARACTERS)
    made.chat_template = TEMPLATE
    return made


def main() -> int:
    """Write the data and train the model, unless it is there."""
    model = CACHE / "model"
    if (model / "config.json").exists():
        print(f"warm start: kept {model}")
        return 0
    print(
        f"warm start: {STEPS} steps on given conversations (a few minutes, only once)",
        flush=True,
    )
    disable_progress_bar()  # a small model needs no progress bar
    CACHE.mkdir(exist_ok=True)
    data.write(CACHE / "train.jsonl", 4096, seed=1, held_out=False)
    data.write(CACHE / "validation.jsonl", 256, seed=2, held_out=True)
    write_records(CACHE / "conversations.jsonl", records(seed=0))
    create_model(CACHE / "random", 0, characters(), width=128, layers=2)
    return train(Path(__file__).with_name("sft.yaml"), model)


if __name__ == "__main__":
    sys.exit(main())
