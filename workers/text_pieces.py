"""Ids of a text that continues others.

Some tokenizers put a blank before every text: Metaspace, the normalizer Prepend, bytes with add_prefix_space.
Behind other tokens the whole text has none there. Such a text is encoded behind a short one, whose ids are
then cut off.
"""

from collections.abc import Callable
from typing import Any

BLANKS = ("▁", "Ġ")
ANCHORS = ("\n", ".", "0", "a", "<")
"""Texts to encode another behind. The next is tried if the tokenizer joins or changes the one before."""

Encode = Callable[[str], list[int]]


def puts_blank(tokenizer: Any) -> bool:
    """Whether a text begins with a blank that it does not hold."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith(BLANKS)


def find_anchor(tokenizer: Any, encode: Encode, text: str, last: int) -> tuple[str, int] | None:
    """Return a text to encode `text` behind, and the number of its ids, or None if none stays apart.

    last: the id before `text`. An added token has its own rules for what follows, so that it is its own
    anchor.
    """
    if last in tokenizer.added_tokens_decoder:
        anchor = str(tokenizer.added_tokens_decoder[last])
        ids = encode(anchor + text)
        return (anchor, ids.index(last) + 1) if last in ids else None
    for anchor in ANCHORS:
        alone = encode(anchor)
        both = encode(anchor + text)
        if both[: len(alone)] == alone and str(tokenizer.decode(alone)).strip(" ") == anchor:
            return anchor, len(alone)
    return None
