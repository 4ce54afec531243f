"""Identity of the training data: a resumed run continues the stream of prompts only if its data are the same.

    records, tokenizer, settings of the order --data_identity--> Progress.data of every checkpoint
    both identities --differences--> differences in words, which controller.checkpoints.progress refuses

It excludes paths, because data may move, and settings that users change, such as run.steps.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.model_files import TOKENIZERS, read_model_files
from controller.config.offline import LearnedDataConfig, OfflineConfig
from controller.data.records import Record
from workers.chat_templates import template_of

DataIdentity = dict[str, Any]
"""JSON. `sources`: [records, SHA-256] each, with `weights`. `tokenizer`: SHA-256. `settings` of the order.
Number of `prompts` of each source, or of `records`, within the token limit.
"""

CONTENT_SETTINGS = (
    *(
        "data.prompt_key",
        "data.image_key",
        "data.image_pixels.min",
        "data.image_pixels.max",
        "data.system_prompt",
    ),
    *("data.continue_last_message", "data.chat_template_arguments"),
    *("data.shuffle", "data.curriculum", "data.sampler"),
)


def data_identity(config: Config, train: Mapping[str, Sequence[Record]]) -> DataIdentity:
    """Identify the training records by path, without `prompts`."""
    keys = [
        *CONTENT_SETTINGS,
        *(["run.seed"] if config.data.shuffle and not config.data.curriculum else []),
    ]
    total = sum(config.data.weights.values())
    return {
        "sources": [
            [len(records), _digest_of_records(records)] for records in train.values()
        ],
        "weights": [weight / total for weight in config.data.weights.values()],
        "tokenizer": _digest_of_tokenizer(config),
        "settings": {key: value_of(config, key) for key in keys},
    }


def offline_identity(config: OfflineConfig, train: Sequence[Record]) -> DataIdentity:
    """Identify data.train of training on given sequences, without `records`."""
    columns = [
        f"data.{field.name}" for field in fields(config.data) if field.name.endswith("_key")
    ]
    keys = [
        *columns,
        "data.image_pixels.min",
        "data.image_pixels.max",
        "data.chat_template_arguments",
        *(["data.train_on"] if isinstance(config.data, LearnedDataConfig) else []),
        "data.shuffle",
        *(["run.seed"] if config.data.shuffle else []),
    ]
    return {
        "sources": [[len(train), _digest_of_records(train)]],
        "tokenizer": _digest_of_tokenizer(config),
        "settings": {key: value_of(config, key) for key in keys},
    }


def differences(now: DataIdentity, then: DataIdentity) -> list[str]:
    """Describe the differences. A part that one side lacks, such as an older checkpoint, counts as equal."""
    lines = [
        f"{key}={settings_now} was {settings_then!r}"
        for key, settings_then in then.get("settings", {}).items()
        if (settings_now := now["settings"].get(key, settings_then)) != settings_then
    ]
    if _differ(now, then, "tokenizer"):
        lines.append("the tokenizer or chat template is another")
    if _differ(now, then, "sources"):
        lines.append(
            f"data.train or data.sources has {_sizes(now)} records of other content than the {_sizes(then)} "
            "then"
        )
    elif _differ(now, then, "weights"):
        lines.append(
            f"data.sources has weights {now['weights']}, as shares, that were {then['weights']}"
        )
    elif _differ(now, then, "prompts"):
        lines.append(
            f"data.max_prompt_tokens or data.overlong_prompts keeps {now['prompts']} prompts of each "
            f"source, and kept {then['prompts']}"
        )
    elif _differ(now, then, "records"):
        counts = f"keeps {now['records']} records, and kept {then['records']}"
        lines.append(f"data.max_tokens or data.overlong_records {counts}")
    return lines


def _differ(now: DataIdentity, then: DataIdentity, part: str) -> bool:
    return part in now and part in then and now[part] != then[part]


def _sizes(identity: DataIdentity) -> str:
    return " + ".join(f"{records:,}" for records, _ in identity["sources"])


def _digest_of_records(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _digest_of_tokenizer(config: TrainingConfig) -> str:
    digest = hashlib.sha256()
    folder = read_model_files(config.model.path, "model.path").folder
    for name in TOKENIZERS:
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    template = template_of(folder, config.model.chat_template)
    digest.update(template.text.encode() if template else b"")
    return digest.hexdigest()
