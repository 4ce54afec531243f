"""The small policy that samples and trains, and the data that it can read.

--model, or the warm start of examples/addition --tokenizer: what can it express?--> SmallPolicy
    records that it can express --> a file of some of them, and a configuration of the run that reads it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ballast.certify.environment.policies import answer_of
from ballast.certify.subject import Subject
from ballast.records import data_file
from controller.config import to_yaml
from controller.config.model_files import positions, read_model_files
from controller.data.records import Record
from workers.errors import ConfigError

TINY = Path(__file__).parents[1] / "examples" / "addition" / "cache" / "model"
MAKE_IT = "python -m examples.addition.warm_start"
ANSWER = "certify_answer"  # column with the records' answers, in the files of certify
FEWEST = 8  # records, below which shares say nothing


class NoPolicyError(Exception):
    """The check is left out: a small policy is missing, or cannot express the records."""


@dataclass(frozen=True)
class SmallPolicy:
    """path: the model's folder. records, numbers: those that it can express, and their numbers from 1.

    unexpressed: why the first other record is left out, or "".
    """

    path: str
    records: list[Record]
    numbers: list[int]
    unexpressed: str = ""


def load_tokenizer(path: str) -> Any:
    # Imported here, because a quick level needs no tokenizer.
    from workers.rollout.turn_sampler import load_tokenizer

    return load_tokenizer(path)


def find_policy(subject: Subject) -> SmallPolicy:
    """Return the policy of --model, or the tiny one. Raises NoPolicyError, also if too few records fit it."""
    model = subject.model
    if not model and not (TINY / "config.json").is_file():
        raise NoPolicyError(
            f"no small policy: give --model, or make the tiny one by `{MAKE_IT}`"
        )
    path = model or str(TINY)
    try:
        read_model_files(path, "--model")
    except ConfigError as error:
        raise NoPolicyError(str(error).rstrip(".")) from None
    tokenizer = load_tokenizer(path)
    records = []
    numbers = []
    unexpressed = ""
    for number, record in enumerate(subject.records, start=1):
        reason = why_unexpressed(tokenizer, record, subject.prompt_key, subject.answer_key)
        if reason:
            unexpressed = unexpressed or f"record {number} {reason}"
        else:
            records.append(record)
            numbers.append(number)
    if len(records) < FEWEST:
        raise NoPolicyError(
            f"{path} cannot express these records: {unexpressed or f'there are only {len(records)}'}. "
            "Give --model, a small model of the records' language"
        )
    return SmallPolicy(path, records, numbers, unexpressed)


def why_unexpressed(
    tokenizer: Any, record: Record, prompt_key: str, answer_key: str
) -> str:
    """Return why a tokenizer cannot express prompt and answer of a record, or ""."""
    prompt = record[prompt_key]
    if isinstance(prompt, list):
        if not tokenizer.chat_template:
            return "has a prompt of chat messages, and the model has no chat template"
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False)
    texts = {"prompt": prompt, "answer": answer_of(record, answer_key)}
    for name, text in texts.items():
        if lost := _lost_characters(tokenizer, text):
            return f"has {lost[:20]!r} in its {name}, which the model's vocabulary lacks"
    return ""


def _lost_characters(tokenizer: Any, text: str) -> str:
    """Return the characters that a text loses as ids. Some tokenizers drop unknown ones."""

    def restore(part: str) -> str:
        ids = tokenizer.encode(part, add_special_tokens=False)
        return _plain(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    if restore(text) == _plain(text):
        return ""
    characters = dict.fromkeys(_plain(text))
    return "".join(
        character for character in characters if character not in restore(character)
    )


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def spread(records: Sequence[Record], count: int) -> list[int]:
    """Return positions of records from all over the data."""
    step = max(1, len(records) // count)
    return list(range(0, len(records), step))[:count]


def write_configuration(
    subject: Subject, policy: SmallPolicy, folder: Path, chosen: Sequence[int]
) -> Path:
    """Write the records at positions `chosen` and a configuration that reads them. Returns its file."""
    data = write_records(subject, policy, folder, "records", chosen)
    config = subject.config
    config = replace(
        config,
        data=replace(
            config.data, train=data, sources={}, shuffle=False, curriculum="", sampler=""
        ),
        model=replace(config.model, path=policy.path),
    )
    file = folder / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    return file


def write_records(
    subject: Subject, policy: SmallPolicy, folder: Path, name: str, chosen: Sequence[int]
) -> str:
    """Write records to a file, with their answers in the column ANSWER. Returns its path."""
    rows = []
    for position in chosen:
        record = policy.records[position]
        rows.append(record | {ANSWER: answer_of(record, subject.answer_key)})
    return data_file(rows, name, str(folder))


def room(subject: Subject, policy: SmallPolicy) -> int:
    """Return tokens that a response may have: as configured, or fewer where the model takes no more."""
    wanted = subject.config.rollout.sampling.max_new_tokens
    most = positions(read_model_files(policy.path, "--model").text)
    if most is None:
        return wanted
    tokenizer = load_tokenizer(policy.path)
    longest = max(
        len(tokenizer.encode(str(record[subject.prompt_key]))) for record in policy.records
    )
    return max(1, min(wanted, most - longest))
