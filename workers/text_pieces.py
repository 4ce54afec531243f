"""Ids of a text that continues others, and the text of such ids.

Some tokenizers put a blank before every text: Metaspace, the normalizer Prepend, bytes with add_prefix_space.
Behind other tokens the whole text has none there. Such a text is encoded behind a short one, whose ids are
then cut off.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

BLANKS = ("▁", "Ġ")
ANCHORS = ("\n", ".", "0", "a", "<")
"""Texts to encode another behind. The next is tried if the tokenizer joins or changes the one before."""

SPACED = "a ,a"
"""Word pieces are joined by blanks."""

Encode = Callable[[str], list[int]]


def puts_blank(tokenizer: Any) -> bool:
    """Whether a text begins with a blank that it does not hold."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith(BLANKS)


def loses_blanks(tokenizer: Any) -> bool:
    """Whether a text's ids do not tell where its blanks and line breaks are, as with word pieces."""
    ids = tokenizer(SPACED, add_special_tokens=False)["input_ids"]
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).strip(" ")
    return text != SPACED and text.replace(" ", "") == SPACED.replace(" ", "")


def decode_behind(tokenizer: Any, ids: Sequence[int], last: int | None) -> str:
    """Return the text of ids that follow the id `last`. Many tokenizers drop a blank from the first id
    decoded.
    """
    decode = partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    before = str(decode([last])) if last is not None else ""
    text = str(decode([*([] if last is None else [last]), *ids]))
    return text.removeprefix(before) if text.startswith(before) else str(decode(list(ids)))


def find_anchor(
    tokenizer: Any, encode: Encode, text: str, last: int
) -> tuple[str, int] | None:
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
        if (
            both[: len(alone)] == alone
            and str(tokenizer.decode(alone)).strip(" ") == anchor
        ):
            return anchor, len(alone)
    return None
