"""Facts about a model from its files, before it is loaded: reads config.json, does not import transformers.

model.path --folder or hub cache--> ModelFiles(description, positions, heads, vocabulary)      weights: weight_files
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class ModelFiles:
    """Facts that settings must agree with; a size is None if config.json does not give it.

    folder: the model's. description: config.json. positions: longest sequence the model takes. chat_template: whether
    the tokenizer has one. end_of_sequence: whether a file names a token that ends a response.
    """

    folder: Path
    description: dict[str, Any]
    positions: int | None
    attention_heads: int | None
    key_value_heads: int | None
    vocabulary: int | None
    chat_template: bool
    end_of_sequence: bool


def read_model_files(path: str, key: str) -> ModelFiles:
    """The files of model `path`, which setting `key` names: a folder, or a name in the local hub cache.

    Raises ConfigError, naming `key`, if config.json, weights or tokenizer are missing or config.json is not valid.
    """
    folder = _folder(path, key)
    content = read_json(folder / "config.json", key)
    if not _first(folder, WEIGHTS):
        raise ConfigError(f"{key}={path}: {folder} has no weights ({', '.join(WEIGHTS)}){_about_pickles(folder)}.")
    if not _first(folder, TOKENIZERS):
        raise ConfigError(f"{key}={path}: {folder} has no tokenizer ({', '.join(TOKENIZERS)}).")
    text = content.get("text_config", content)  # models that also see keep the language model's sizes in there
    heads = text.get("num_attention_heads", text.get("n_head"))
    return ModelFiles(
        folder=folder,
        description=content,
        positions=_positions(text),
        attention_heads=heads,
        key_value_heads=text.get("num_key_value_heads") or heads,
        vocabulary=text.get("vocab_size"),
        chat_template=_has_chat_template(folder, key),
        end_of_sequence=_has_end_of_sequence(folder, key, text),
    )


def weight_bytes(path: str, key: str) -> int:
    """Size of the weight files of model `path`, which setting `key` names. Raises ConfigError if there is no model."""
    folder = _folder(path, key)
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern))


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    return next((file for pattern in patterns for file in folder.glob(pattern)), None)


def _about_pickles(folder: Path) -> str:
    found = _first(folder, PICKLES)
    if found is None:
        return ""
    return f"; {found.name} is a pickle, which may run code and is never read: save the model with safetensors"


def _folder(path: str, key: str) -> Path:
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{key}: folder {path} holds no model, it has no config.json.")
        return Path(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # not of the form owner/name: a path
        cached = None
    if not isinstance(cached, str):
        looks_like_name = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
        advice = f"; a model of the hub is fetched by `hf download {path}`" if looks_like_name else ""
        raise ConfigError(f"{key}: there is no folder {path} and no such model in the local hub cache{advice}.")
    return Path(cached).parent


def read_json(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError, naming setting `key`, if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} is not a JSON object.")
    return content


def _positions(text: dict[str, Any]) -> int | None:
    """max_position_embeddings, stretched where rotary scaling multiplies it; never below what the model takes."""
    positions: int | None = text.get("max_position_embeddings", text.get("n_positions"))
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = scaling.get("factor")
    if positions is None or factor is None:
        return positions
    return max(positions, int(factor * scaling.get("original_max_position_embeddings", positions)))


def _has_end_of_sequence(folder: Path, key: str, text: dict[str, Any]) -> bool:
    """Whether one of the files from which engines take it names one: the model's, of generation, or the tokenizer's."""
    places = (
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
    )
    named = [read_json(folder / file, key).get(name) for file, name in places if (folder / file).is_file()]
    return any(value is not None for value in [text.get("eos_token_id"), *named])


def _has_chat_template(folder: Path, key: str) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings, key).get("chat_template"))
