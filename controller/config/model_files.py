"""Facts about a model from its files, before it is loaded: reads config.json, does not import transformers.

model.path --folder or hub cache--> ModelFiles(description, positions, heads, vocabulary)      weights: weight_files
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
OBJECTS = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")
LAYERS = ("full_attention", "sliding_attention")  # of rope_parameters by kind of layer
LISTS = ("architectures", "layer_types", "layers_block_type", "block_types")
NAMES = ("model_type", "rope_type", "type", "quant_method")
FACTORS = ("factor", "attn_logit_softcapping")
WIDTHS = ("intermediate_size", "moe_intermediate_size")  # a number, or one a layer
POSITIVE = ("hidden_size", "n_embd", "num_hidden_layers", "num_attention_heads", "n_head", "vocab_size")
SIZES = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "n_positions", "num_experts", "num_local_experts"),
    *("n_routed_experts", "moe_num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),
    *("original_max_position_embeddings", "keep_window_size", "sliding_window"),
)
LARGEST = 2**40
PACKAGE = "_ray_pkg_"  # how Ray names the copies of --working-dir
FETCH_SECONDS = 10  # until the hub must have begun to answer
SHIPPED = Path(__file__).parent / "models"
"""OWNER/NAME/config.json of the hub's models that examples name: the dry run of a cluster then asks no network."""


@dataclass(frozen=True)
class ModelFiles:
    """Facts that settings must agree with; a size is None if config.json does not give it.

    folder: the model's. description: config.json. positions: longest sequence the model takes. weights, tokenizer:
    whether there are any. chat_template: whether the tokenizer has one. ends: eos_token_id of config.json and
    generation_config.json, without checks of their type. end_of_sequence: whether they or the tokenizer name a token
    that ends a response.
    """

    folder: Path
    description: dict[str, Any]
    positions: int | None
    attention_heads: int | None
    key_value_heads: int | None
    vocabulary: int | None
    weights: bool
    tokenizer: bool
    chat_template: bool
    ends: tuple[Any, ...]
    end_of_sequence: bool

    @property
    def head_size(self) -> int | None:
        """Numbers of an attention head; None for multi-head latent attention, and for sizes that have other names."""
        text = self.description.get("text_config", self.description)
        if any(key == "kv_lora_rank" or key.endswith(("_head_dim", "_per_head")) for key in text):
            return None
        hidden, heads = text.get("hidden_size", text.get("n_embd")), self.attention_heads
        size: int | None = text.get("head_dim") or (hidden // heads if hidden and heads else None)
        return size


def read_model_files(path: str, key: str) -> ModelFiles:
    """The files of model `path`, which setting `key` names: a folder, or a name in the local hub cache or in SHIPPED.

    Raises ConfigError, naming `key`, if config.json is missing or not valid; see `check_whole` for the other files.
    """
    folder = _folder(path, key)
    content = read_json(folder / "config.json", key)
    content = {name: value for name, value in content.items() if name != "text_config" or value is not None}
    _check_types(content, f"{key}: {folder / 'config.json'}")
    text = content.get("text_config", content)  # models that also see keep the language model's sizes in there
    heads = text.get("num_attention_heads", text.get("n_head"))
    named = (text.get("eos_token_id"), _named(folder, key, "generation_config.json", "eos_token_id"))
    ends = tuple(end for ids in named if ids is not None for end in (ids if isinstance(ids, list) else [ids]))
    return ModelFiles(
        folder=folder,
        description=content,
        positions=_positions(text),
        attention_heads=heads,
        key_value_heads=text.get("num_key_value_heads") or heads,
        vocabulary=text.get("vocab_size"),
        weights=_first(folder, WEIGHTS) is not None,
        tokenizer=_first(folder, TOKENIZERS) is not None,
        chat_template=_has_chat_template(folder, key),
        ends=ends,
        end_of_sequence=bool(ends) or any(_named(folder, key, file, "eos_token") for file in TOKENS),
    )


def check_whole(model: ModelFiles, path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, if the model at `path` lacks weights or a tokenizer, or ends with no token."""
    folder = model.folder
    if folder.is_relative_to(SHIPPED):
        raise _missing(path, key)
    if not model.weights:
        raise ConfigError(f"{key}={path}: {folder} has no weights ({', '.join(WEIGHTS)}){_about_pickles(folder)}.")
    if not model.tokenizer:
        raise ConfigError(
            f"{key}={path}: {folder} has no tokenizer ({', '.join(TOKENIZERS)}). Add it: "
            f"tokenizer.save_pretrained({str(folder)!r})."
        )
    for end in model.ends:
        if not isinstance(end, int) or not 0 <= end < (model.vocabulary or end + 1):
            raise ConfigError(
                f"{key}={path}: eos_token_id {end!r} is outside the vocabulary of {model.vocabulary}; mend config.json "
                "or generation_config.json."
            )


def fetch_description(path: str, key: str, say: Callable[[str], None]) -> None:
    """Put config.json of the hub's model `path` into the local hub cache, unless `read_model_files` has one already.

    say: gets a line before the hub is asked. Raises ConfigError, naming `key`, if the hub does not give it.
    """
    if Path(path).is_dir() or _cached(path) or _shipped(path) or not _looks_like_name(path):
        return
    from huggingface_hub import hf_hub_download

    say(f"{key}={path}: asking the hub for config.json")
    try:
        hf_hub_download(path, "config.json", etag_timeout=FETCH_SECONDS)
    except Exception as error:  # requests', httpx's and the hub's own, by version
        raise ConfigError(
            f"{key}={path}: there is no such folder or model in the local hub cache, and the hub did not give its "
            f"config.json ({type(error).__name__}); `hf download {path} config.json` where there is a network, or name "
            "a folder that holds config.json."
        ) from None


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
        if (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"{key}={path}: the folder holds LoRA adapters, not a model. Save the model of "
                "peft_model.merge_and_unload() and name its folder."
            )
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{key}: folder {path} holds no model, it has no config.json.")
        return Path(path)
    found = _cached(path) or _shipped(path)
    if found is None:
        raise _missing(path, key)
    return found


def _missing(path: str, key: str) -> ConfigError:
    advice = f"; a model of the hub is fetched by `hf download {path}`" if _looks_like_name(path) else ""
    return ConfigError(
        f"{key}: there is no folder {path} and no such model in the local hub cache{advice}{about_copy(path)}."
    )


def _shipped(path: str) -> Path | None:
    folder = SHIPPED / path
    return folder if _looks_like_name(path) and (folder / "config.json").is_file() else None


def _cached(path: str) -> Path | None:
    """The folder of model `path` in the local hub cache; None if it is not there, or no name of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # not of the form owner/name: a path
        return None
    return Path(found).parent if isinstance(found, str) else None


def _looks_like_name(path: str) -> bool:
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))


def read_json(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError, naming setting `key`, if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits are ValueErrors, too
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} is not a JSON object.")
    return content


def _check_types(content: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a value that is read here, or in a check, is not of the type that transformers writes."""

    def size(value: Any) -> bool:
        return type(value) is int and -1 <= value <= LARGEST

    def names(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    kinds: tuple[tuple[Sequence[str], str, Callable[[Any], bool]], ...] = (
        (OBJECTS, "an object", lambda value: isinstance(value, dict)),
        (LISTS, "a list of names", names),
        (NAMES, "a name", lambda value: isinstance(value, str)),
        (FACTORS, "a number above 0", lambda value: type(value) in (int, float) and 0 < value <= LARGEST),
        (SIZES, "a whole number", size),
        (POSITIVE, "a whole number above 0", lambda value: size(value) and value > 0),
        (WIDTHS, "a whole number", lambda value: all(map(size, value)) if isinstance(value, list) else size(value)),
    )
    for known, kind, fits in kinds:
        for name in known:
            if content.get(name) is not None and not fits(content[name]):
                raise ConfigError(f"{where} says {name}={reprlib.repr(content[name])}, which is not {kind}.")
    for name, part in content.items():
        if isinstance(part, dict) and name in (*OBJECTS, *LAYERS):
            _check_types(part, where)


def _positions(text: dict[str, Any]) -> int | None:
    """max_position_embeddings, stretched where rotary scaling multiplies it; never below what the model takes."""
    positions: int | None = text.get("max_position_embeddings", text.get("n_positions"))
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = scaling.get("factor")
    if positions is None or factor is None:
        return positions
    return max(positions, int(factor * scaling.get("original_max_position_embeddings", positions)))


def _named(folder: Path, key: str, file: str, name: str) -> Any:
    """The value of `name` in a JSON file, None without the file. Raises as `read_json`."""
    return read_json(folder / file, key).get(name) if (folder / file).is_file() else None


def _has_chat_template(folder: Path, key: str) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings, key).get("chat_template"))


def is_job_copy(folder: Path) -> bool:
    """Whether `folder`, absolute, lies in the copy of --working-dir that a Ray job works in.

    It leaves out what git ignores, and is removed after the job.
    """
    return any(part.startswith(PACKAGE) for part in folder.parts)


def about_copy(path: str) -> str:
    """A hint about a relative path that is not there; empty outside of a job, and for an absolute one."""
    if Path(path).is_absolute() or not is_job_copy(Path.cwd()):
        return ""
    return (
        "; this Ray job works in a copy of its --working-dir, without what git ignores: give an absolute path that "
        "every node has"
    )
