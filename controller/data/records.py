"""Records of a data set, one mapping each, from files of the usual kinds.

    .jsonl | .parquet | .arrow | a folder of these | a name of the hub --iter_records--> {"prompt": ...}, ...
    reasoning_gym:NAME | verifiers:NAME --workers.user_code.task_sources--/

A folder comes from `datasets.save_to_disk` or a hub repository. Its files are read by name. Reading files
executes nothing.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, cast

from controller.data.data_files import check_beginning, data_files
from controller.data.hub import hub_dataset, hub_records
from controller.observability.shown_text import shorten
from controller.observability.slow_work import Log, count_if_slow
from workers.chat_messages import check_not_blank, clean_prompt
from workers.errors import DataError, clause, why_not_json
from workers.image_parts import with_images
from workers.template_forms import without_nulls
from workers.user_code.task_sources import package_of, task_records

Record = dict[str, Any]
BOM = codecs.BOM_UTF8
DEEPEST = 100  # levels of lists and objects in a line


def read_records(
    path: str, prompt_key: str = "", log: Log = print, image_key: str = ""
) -> list[Record]:
    """Read all records. Raises DataError naming file and record of a malformed record, or one without
    `prompt_key`.

    log: called with progress if reading is slow. image_key: column with a prompt's images. Images in messages
    move there.
    """
    records = list(
        count_if_slow(
            iter_records(path, prompt_key, image_key), f"{path}: records read", log
        )
    )
    if not records:
        raise DataError(f"{path} has no records.")
    return records


def check_loss_columns(path: str, records: Sequence[Record], names: Sequence[str]) -> None:
    """Raise DataError unless every record has the columns `names`, each all numbers or without numbers."""
    for name in names:
        kinds: dict[bool, int] = {}
        for number, record in enumerate(records, start=1):
            if name not in record:
                raise DataError(
                    f"{path}: record {number} lacks {name!r}, which algorithm.loss.columns names."
                )
            kinds.setdefault(isinstance(record[name], Real), number)
        if len(kinds) == 2:
            raise DataError(
                f"{path}: {name!r} of algorithm.loss.columns is a number in record {kinds[True]} and not in "
                f"record {kinds[False]}. Give all records the one or the other."
            )


def check_teachers(
    path: str, records: Sequence[Record], key: str, names: Iterable[str]
) -> None:
    """Raise DataError unless the column `key` of every record is one of the teachers' names."""
    for number, record in enumerate(records, start=1):
        if str(record.get(key)) not in names:
            raise DataError(
                f"{path}: record {number} has {key}={record.get(key)!r}, and teacher.paths has "
                f"{', '.join(names)}. Name one of these in each record, or set teacher.key to the column "
                "that does."
            )


def iter_records(path: str, prompt_key: str = "", image_key: str = "") -> Iterator[Record]:
    """Iterate lazily over the records. Raises as `read_records`."""
    if package_of(path):
        for number, record in enumerate(task_records(path), start=1):
            yield _check(record, f"{path} record {number}", prompt_key, image_key)
        return
    if dataset := hub_dataset(path):
        for place, record in hub_records(path, dataset):
            yield _check(_without_added(record), place, prompt_key, image_key)
        return
    try:
        files = data_files(path)
    except OSError as error:
        raise DataError(
            f"{shorten(path, 80)} cannot be read: {error.strerror or error}."
        ) from None
    for file in files:
        try:
            check_beginning(file)
            for place, record in READERS[file.suffix](file):
                yield _check(record, place, prompt_key, image_key)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}.") from None


def _check(record: Any, place: str, prompt_key: str, image_key: str) -> Record:
    if not isinstance(record, dict) and not prompt_key:
        raise DataError(
            f"{place} is not a record, which gives each column's value by its name."
        )
    if prompt_key and (not isinstance(record, dict) or prompt_key not in record):
        raise DataError(
            f"{place} has no {prompt_key!r}. Set data.prompt_key to the prompt's column."
        )
    for name, value in record.items():
        try:
            json.dumps([name, value], ensure_ascii=False, default=lambda _: "").encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: column {name!a} cannot be encoded as Unicode: {error.reason}."
            ) from None
    if not prompt_key:
        return cast(Record, record)
    prompt, images = with_images(
        clean_prompt(record[prompt_key], place), record.get(image_key), place
    )
    check_not_blank(prompt, place)
    if images and not image_key:
        raise DataError(
            f"{place} has images in its messages. Set data.image_key, where reward functions find them."
        )
    return record | {prompt_key: prompt} | ({image_key: images} if images else {})


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = _parse_json(line, f"{file}:{number}")
                if isinstance(record, list):
                    raise DataError(
                        f"{file}:{number} is a list in place of a record a line. Rename the file to .json."
                    )
                yield f"{file}:{number}", record


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    if _holds_a_record_a_line(file):
        yield from _json_lines(file)
        return
    content = _parse_json(file.read_bytes(), str(file))
    if not isinstance(content, list):
        raise DataError(f"{file} must be a list of records, or hold one record a line.")
    for number, record in enumerate(content, start=1):
        yield f"{file} record {number}", record


def _holds_a_record_a_line(file: Path) -> bool:
    """Whether the first line is a whole record and another follows. `Dataset.to_json` and pandas
    write it so.
    """
    with file.open("rb") as lines:
        lines.seek(len(BOM) if lines.read(len(BOM)) == BOM else 0)
        texts = filter(None, map(bytes.strip, lines))
        first = next(texts, b"")
        try:
            return (
                first.startswith(b"{")
                and isinstance(json.loads(first), dict)
                and next(texts, None) is not None
            )
        except (ValueError, RecursionError):
            return False


def _parse_json(text: bytes, place: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:  # also of bytes that are not UTF-8
        raise DataError(f"{place} is not JSON: {why_not_json(error)}.") from None
    except RecursionError:
        raise _too_deep(place) from None
    if text.count(b"[") + text.count(b"{") > DEEPEST and not _is_flat(value):
        raise _too_deep(place)
    return value


def _too_deep(place: str) -> DataError:
    return DataError(f"{place} is nested more than {DEEPEST} deep. Flatten it.")


def _is_flat(value: Any) -> bool:
    """Whether lists and objects nest at most DEEPEST deep, so that they can be pickled."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return not level


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    with _arrow_errors(file), pyarrow.parquet.ParquetFile(file) as table:
        yield from _rows(file, table.iter_batches())


def _arrow(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa

    with _arrow_errors(file), pa.memory_map(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        batches = (
            (reader.get_batch(i) for i in range(reader.num_record_batches))
            if is_file
            else reader
        )
        yield from _rows(file, batches)


@contextmanager
def _arrow_errors(file: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {clause(error)}.") from None


def _rows(file: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{file} record {number}", _without_added(record)


def _without_added(record: Any) -> Any:
    """Drop nulls of calls in a record of Arrow, which gives calls of different tools one struct of all
    arguments.
    """
    return (
        {name: _with_own_arguments(value) for name, value in record.items()}
        if isinstance(record, dict)
        else record
    )


def _with_own_arguments(value: Any) -> Any:
    if not isinstance(value, list) or not all(
        isinstance(message, dict) for message in value
    ):
        return value
    return [
        message | {"tool_calls": without_nulls(message["tool_calls"])}
        if message.get("tool_calls")
        else message
        for message in value
    ]


READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet, ".arrow": _arrow}
