"""A small policy that counts dots and errs often: the start of this example.

    random Qwen2.5-VL (2M) --right answers--> counts --answers that miss some dots--> errs often: cache/model

`controller.sft` trains it on records in this order, by `sft.yaml`, once: `python -m
examples.vision.warm_start`.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.utils.logging import disable_progress_bar

from examples.addition.data import write_records
from examples.addition.warm_start import train
from examples.vision import data

CACHE = Path(__file__).parent / "cache"
CORRUPTION = 0.13
CLEAN_SHARE = 0.75  # share of steps, from the first
STEPS = 300
BATCH = 32
WIDTH, VISION_WIDTH = 192, 96
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}:\
{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}\
{% if add_generation_prompt %}assistant:{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a role, a word of the question, a character of the answer."""
    texts = ["user:", "assistant:", *data.QUESTION.split(), *data.CHARACTERS, " "]
    vocabulary = {
        text: i for i, text in enumerate(["<pad>", "<eos>", "<unk>", *SPECIAL, *texts])
    }
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"[a-z]+[:.]?|Count|."), behavior="isolated"
    )
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=SPECIAL,
        model_max_length=128,
    )


def processor() -> Qwen2_5_VLProcessor:
    """Return Qwen2.5-VL's processor with this tokenizer."""
    size = {"shortest_edge": data.CELL**2, "longest_edge": (data.LONGEST * data.CELL) ** 2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=data.CELL // 2, size=size),
        tokenizer=tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def config(tokens: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """A text model of 1.6M parameters, and a vision tower of 0.6M."""
    start, end, image, video = tokens.convert_tokens_to_ids(SPECIAL)
    text = {
        "vocab_size": 32,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH * 8 // 3,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": None,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": VISION_WIDTH,
        "out_hidden_size": WIDTH,
        "num_heads": 4,
        "intermediate_size": VISION_WIDTH * 8 // 3,
        "patch_size": data.CELL // 2,
        "window_size": 2 * data.CELL,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )


def create_model(folder: Path, seed: int) -> None:
    """Save a random Qwen2.5-VL of 2M parameters with its processor, in Hugging Face format."""
    parts = processor()
    torch.manual_seed(seed)
    Qwen2_5_VLForConditionalGeneration(config(parts.tokenizer)).save_pretrained(folder)
    parts.save_pretrained(folder)


def records(folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Return questions with answers in training order: right answers, then some that miss dots."""
    rng = random.Random(seed)
    for number, (file, dots) in enumerate(data.pictures(folder, STEPS * BATCH, seed)):
        corruption = 0.0 if number < CLEAN_SHARE * STEPS * BATCH else CORRUPTION
        answer = data.solution(data.corrupted(dots, corruption, rng))
        yield {"prompt": data.question(), "images": [file], "response": answer}


def main() -> int:
    """Write the data and train the model, unless it is there."""
    model = CACHE / "model"
    if (model / "config.json").exists():
        print(f"warm start: kept {model}")
        return 0
    print(
        f"warm start: {STEPS} steps on given answers (some minutes, only once)", flush=True
    )
    disable_progress_bar()  # a small model needs no progress bar
    data.write(CACHE / "train.jsonl", 2048, seed=1)
    data.write(CACHE / "validation.jsonl", 256, seed=2)
    write_records(CACHE / "answers.jsonl", records(CACHE / "answers", seed=0))
    create_model(CACHE / "random", seed=0)
    return train(Path(__file__).with_name("sft.yaml"), model)


if __name__ == "__main__":
    sys.exit(main())
