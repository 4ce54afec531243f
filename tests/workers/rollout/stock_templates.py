"""TRL's stock chat templates, on a tokenizer of bytes that has the templates' own markers as added tokens."""

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
NAMES = sorted(
    path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training")
)
MARKER = re.compile(r"<\|?/?[a-zA-Z_0-9]+\|?>|<[|｜][^|｜>\s]{1,40}[|｜]>|\[/?[A-Z_]+\]")
SPECIAL = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


@cache
def tokenizer(name: str) -> Any:
    """Bytes, two pairs of them, and the markers of the template, with its chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), (".", "Ċ")]
    vocabulary = {
        text: number
        for number, text in enumerate([*alphabet, *("".join(pair) for pair in pairs)])
    }
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    markers = sorted({*MARKER.findall(source(name)), *SPECIAL.values()})
    special = ("<|", "<｜", "[", *SPECIAL.values())
    made.add_tokens(
        [
            AddedToken(each, normalized=False, special=each.startswith(special))
            for each in markers
        ]
    )
    found = PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    found.chat_template = source(name)
    return found


def apart(tokenizer: Any, text: str) -> Any:
    """Ids of a text, int32, a character at a time but for the markers: other tokens than encoding
    would give.
    """
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, added))})", text)
    pieces = [piece for part in parts for piece in ([part] if part in added else part)]
    return np.array(
        [
            i
            for piece in pieces
            for i in tokenizer(piece, add_special_tokens=False)["input_ids"]
        ],
        np.int32,
    )


def shows(tokenizer: Any, ids: Any, text: str) -> bool:
    """Whether a text is shown, as it is or in JSON."""
    shown = tokenizer.decode(ids.tolist())
    return text in shown or json.dumps(text, ensure_ascii=False) in shown
