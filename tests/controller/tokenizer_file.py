"""A tokenizer of single characters, for model folders whose config.json and weights are made up too."""

import json
import string
from pathlib import Path

END = "<|endoftext|>"
# Those of sums first, for models of few ids; space and newline as byte-level models write them.
CHARACTERS = [
    END,
    *string.digits,
    *string.punctuation,
    *string.ascii_letters,
    "\u0120",
    "\u010a",
]
_BYTES = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": END,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", **_BYTES},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", **_BYTES},
    "model": {
        "type": "BPE",
        "vocab": {text: number for number, text in enumerate(CHARACTERS)},
        "merges": [],
    },
}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, which every family's class of tokenizer reads."""
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
