"""Find a model's files, and read them without transformers. `controller.lifecycle.model_checks` reads the
rest.

model.path --folder or hub cache--> ModelFiles(description, weights, tokenizer, chat_template, ends)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError
from workers.json_file import read_json

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
PACKAGE = "_ray_pkg_"  # how Ray names the copies of --working-dir
FETCH_SECONDS = 10  # until the hub must answer
SHIPPED = Path(__file__).parent / "models"
"""OWNER/NAME/config.json of hub models in the examples, so that a dry run of a cluster needs no network."""


@dataclass(frozen=True)
class ModelFiles:
    """Facts about a model that need no transformers.

    description: config.json. weights, tokenizer, chat_template: whether they exist. ends: eos_token_id of
    config.json and generation_config.json, of any type. end_of_sequence: whether these or the tokenizer name
    an end token.
    """

    folder: Path
    description: dict[str, Any]
    weights: bool
    tokenizer: bool
    chat_template: bool
    ends: tuple[Any, ...]
    end_of_sequence: bool

    @property
    def text(self) -> dict[str, Any]:
        """The language model's part of config.json, for multimodal models."""
        part = self.description.get("text_config")
        return part if isinstance(part, dict) else self.description


def positions(text: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of a language model by its config, or None without a limit."""
    count = text.get("max_position_embeddings")
    if not isinstance(count, int) or count < 1:
        return None
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return max(
        count,
        int(
            (scaling.get("factor") or 1)
            * scaling.get("original_max_position_embeddings", count)
        ),
    )


def read_model_files(path: str, key: str) -> ModelFiles:
    """Find the files of model `path`, set by `key`: a folder, or a name in the local hub cache or SHIPPED.

    Raises ConfigError, naming `key`, if config.json is missing or invalid. `check_whole` checks the other
    files.
    """
    folder = _folder(path, key)
    content = read_json(folder / "config.json", key)
    content = {
        name: value
        for name, value in content.items()
        if name != "text_config" or value is not None
    }
    part = content.get("text_config", content)
    named = (
        part.get("eos_token_id") if isinstance(part, dict) else None,
        _named(folder, key, "generation_config.json", "eos_token_id"),
    )
    ends = tuple(
        end
        for ids in named
        if ids is not None
        for end in (ids if isinstance(ids, list) else [ids])
    )
    return ModelFiles(
        folder=folder,
        description=content,
        weights=_first(folder, WEIGHTS) is not None,
        tokenizer=_first(folder, TOKENIZERS) is not None,
        chat_template=_has_chat_template(folder, key),
        ends=ends,
        end_of_sequence=bool(ends)
        or any(_named(folder, key, file, "eos_token") for file in TOKENS),
    )


def check_whole(model: ModelFiles, path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, if the model lacks weights or a tokenizer."""
    folder = model.folder
    if folder.is_relative_to(SHIPPED):
        raise _missing(path, key)
    if not model.weights:
        raise ConfigError(
            f"{key}={path}: {folder} has no weights ({', '.join(WEIGHTS)}){_about_pickles(folder)}."
        )
    if not model.tokenizer:
        raise ConfigError(
            f"{key}={path}: {folder} has no tokenizer ({', '.join(TOKENIZERS)}). Add it: "
            f"tokenizer.save_pretrained({str(folder)!r})."
        )


def fetch_description(path: str, key: str, log: Callable[[str], None]) -> None:
    """Fetch config.json from the hub into the local cache, unless `read_model_files` finds it.

    log: called with a line before the request. Raises ConfigError, naming `key`, if the hub does not provide
    it.
    """
    if Path(path).is_dir() or _cached(path) or _shipped(path) or not _looks_like_name(path):
        return
    from huggingface_hub import hf_hub_download

    log(f"{key}={path}: asking the hub for config.json")
    try:
        hf_hub_download(path, "config.json", etag_timeout=FETCH_SECONDS)
    except Exception as error:  # from requests, httpx or the hub, by version
        raise ConfigError(
            f"{key}={path}: there is no such folder or model in the local hub cache, and the hub did not "
            f"give its config.json ({type(error).__name__}). `hf download {path} config.json` where there "
            "is a network, or name a folder that holds config.json."
        ) from None


def weight_bytes(path: str, key: str) -> int:
    """Measure the model's weight files. Raises ConfigError, naming `key`, if the model is missing."""
    folder = _folder(path, key)
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern))


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    return next((file for pattern in patterns for file in folder.glob(pattern)), None)


def _about_pickles(folder: Path) -> str:
    pickle_file = _first(folder, PICKLES)
    if pickle_file is None:
        return ""
    return (
        f"; {pickle_file.name} is a pickle, which may run code and is never read: save the model with "
        "safetensors"
    )


def _folder(path: str, key: str) -> Path:
    if Path(path).is_dir():
        if (Path(path) / "adapter_config.json").is_file() and not (
            Path(path) / "config.json"
        ).is_file():
            raise ConfigError(
                f"{key}={path}: the folder holds LoRA adapters, not a model. Save the model of "
                "peft_model.merge_and_unload() and name its folder."
            )
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"{key}: folder {path} holds no model, it has no config.json."
            )
        return Path(path)
    folder = _cached(path) or _shipped(path)
    if folder is None:
        raise _missing(path, key)
    return folder


def _missing(path: str, key: str) -> ConfigError:
    advice = (
        f". A model of the hub is fetched by `hf download {path}`"
        if _looks_like_name(path)
        else ""
    )
    return ConfigError(
        f"{key}: there is no folder {path} and no such model in the local hub "
        f"cache{advice}{about_copy(path)}."
    )


def _shipped(path: str) -> Path | None:
    folder = SHIPPED / path
    return folder if _looks_like_name(path) and (folder / "config.json").is_file() else None


def _cached(path: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # not of the form owner/name: a path
        return None
    return Path(file).parent if isinstance(file, str) else None


def _looks_like_name(path: str) -> bool:
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))


def _named(folder: Path, key: str, file: str, name: str) -> Any:
    """Read `name` from a JSON file, or None without the file. Raises as `read_json`."""
    return read_json(folder / file, key).get(name) if (folder / file).is_file() else None


def _has_chat_template(folder: Path, key: str) -> bool:
    if (folder / "chat_template.jinja").is_file() or (
        folder / "chat_template.json"
    ).is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings, key).get("chat_template"))


def special_tokens(folder: Path) -> dict[str, int]:
    """Return texts and ids of the tokenizer's special tokens. Empty if its files do not list them."""
    file = folder / "tokenizer.json"
    settings = folder / "tokenizer_config.json"
    tokens = read_json(file, "model.path").get("added_tokens") if file.is_file() else None
    if not tokens and settings.is_file():
        by_id = read_json(settings, "model.path").get("added_tokens_decoder") or {}
        tokens = [{"id": int(number), **token} for number, token in by_id.items()]
    return {token["content"]: token["id"] for token in tokens or [] if token.get("special")}


def is_job_copy(folder: Path) -> bool:
    """Whether the absolute `folder` is in a Ray job's copy of --working-dir.

    The copy omits files that git ignores, and is removed after the job.
    """
    return any(part.startswith(PACKAGE) for part in folder.parts)


def about_copy(path: str) -> str:
    """Hint at a missing relative path in a job's copy, or empty elsewhere."""
    if Path(path).is_absolute() or not is_job_copy(Path.cwd()):
        return ""
    return (
        ". This Ray job works in a copy of its --working-dir, without files that git ignores: give an "
        "absolute path that every node has"
    )
