"""Decode ids as a model's tokenizer does, without importing transformers and torch.

    driver: AutoTokenizer --serialize--> JSON of its backend --> reward worker: Decoder, by `tokenizers`

Importing transformers and torch takes 5 CPU seconds and 300 MiB in every process. The driver has both.
The backend is serialized as transformers built it, which the files of a model do not show.
"""

from collections.abc import Sequence
from typing import Any


class Decoder:
    """Decode by a serialized backend. `decode` has the arguments of transformers' tokenizers."""

    def __init__(self, backend: str) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def serialize(tokenizer: Any) -> str:
    """Return a tokenizer's backend as JSON, or an empty string if its decoding is more than the backend's."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    kind = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend):
        return ""
    is_plain = (
        kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is TokenizersBackend._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    return tokenizer.backend_tokenizer.to_str() if is_plain else ""


def load_decoder(path: str, backend: str) -> Any:
    """Return what decodes for the model at `path`. backend: of `serialize`, empty loads the tokenizer."""
    if backend:
        return Decoder(backend)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
