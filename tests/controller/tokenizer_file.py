"""A tokenizer of single characters, for model folders whose config.json and weights are made up too."""

import json
import string
from pathlib import Path

END = "<|endoftext|>"
CHARACTERS = [END, *string.printable[:94], "\u0120", "\u010a"]  # space and newline, as byte-level models write them
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
    "model": {"type": "BPE", "vocab": {text: number for number, text in enumerate(CHARACTERS)}, "merges": []},
}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, which every family's class of tokenizer reads."""
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
