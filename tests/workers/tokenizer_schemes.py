"""Tiny tokenizers of the schemes that models have, with the decoders that come with them."""

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

SCHEMES = (
    "prepend",
    "first",
    "always",
    "never",
    "replace",
    "bytes with a blank",
    "bytes",
    "tiktoken",
    "unigram",
)
"""Llama 2 and Mistral, Llama by transformers 5, TinyLlama, models that add no blank, Gemma, OPT, GPT-2, Llama 3
and Qwen, T5."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIECES = (
    ("{blank}", "t"),
    ("t", "w"),
    ("{blank}t", "w"),
    ("tw", "o"),
    ("{blank}tw", "o"),
    ("{blank}", "["),
)


def make_tokenizer(
    scheme: str,
    template: str | None = None,
    *,
    begins: bool = False,
    ends: bool = False,
    thinks: bool = False,
) -> Any:
    """begins, ends: whether texts get the special token. thinks: whether `<think>` and `</think>` are added."""
    backend = (
        _byte_level(scheme)
        if scheme in ("bytes", "bytes with a blank", "tiktoken")
        else _pieces(scheme)
    )
    marks = ["<think>", "</think>"] if thinks else []
    tokenizer = _with_special(backend, template)
    backend = tokenizer.backend_tokenizer
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in marks]
    )
    if begins or ends:
        ids = [(token, backend.token_to_id(token)) for token in SPECIAL.values()]
        single = f"{'<s> ' if begins else ''}$A{' </s>' if ends else ''}"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=ids
        )
    return tokenizer


def make_word_pieces(template: str | None = None) -> Any:
    """A tokenizer that loses blanks and line breaks."""
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "two", "one"]
    backend = Tokenizer(models.WordPiece(_numbered(tokens), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _with_special(backend, template)


def _with_special(backend: Tokenizer, template: str | None) -> Any:
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL.values()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    tokenizer.chat_template = template
    return tokenizer


def _byte_level(scheme: str) -> Tokenizer:
    merges = _merges("Ġ")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(_numbered([*letters, *map("".join, merges)]), merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=scheme == "bytes with a blank"
    )
    if scheme == "tiktoken":
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(scheme: str) -> Tokenizer:
    blank = "▁"
    merges = _merges(blank)
    characters = [blank, *map(chr, range(33, 127))]
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *characters,
        *map("".join, merges),
    ]
    if scheme == "unigram":
        scores = [(token, -float(9 - len(token))) for token in dict.fromkeys(tokens)]
        backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        byte_pairs = models.BPE(
            _numbered(tokens), merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
        )
        backend = Tokenizer(byte_pairs)
    replaced = normalizers.Replace(" ", blank)
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(blank), replaced])
    elif scheme == "replace":
        backend.normalizer = replaced
    else:
        metaspace = "always" if scheme == "unigram" else scheme
        backend.pre_tokenizer = pre_tokenizers.Metaspace(blank, metaspace, split=False)
    steps = [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme not in ("never", "replace"):
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(blank: str) -> list[tuple[str, str]]:
    return [(first.format(blank=blank), second) for first, second in PIECES]


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}
