"""Tokenize records once, as an endless stream of prompts with a seeded shuffle.

record --system prompt, Renderer--> Prompt     over-long ones: dropped, truncated or refused
PromptDataset of each source --PromptMixture, by weight--> take(start, count), a pure function of the seed
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from controller.data.data_files import data_folder
from controller.data.records import Record
from controller.observability.slow_work import Log, count_if_slow
from workers.batch.placed_images import Image, Placed
from workers.errors import DataError, ImageError
from workers.rendering import Options, Renderer, options_of

DATA_ORDER = 0  # separates this random stream from others with the same seed
# Above any token's length, so that longer prompts are refused without tokenizing.
CHARACTERS_PER_TOKEN = 128

Curriculum = Callable[[list[Record], int], Sequence[int] | np.ndarray]
"""(records, epoch) -> record numbers in the epoch's order."""


@dataclass(frozen=True)
class Prompt:
    """uid: place in the stream. ids: int32 [P]. columns: for rewards. source: its name in validation.

    options: with which chat messages were rendered. teacher_ids: of the prompt with the teacher's context, or
    empty.
    images: in `ids`, whose data are an ImageSource. `columns` has their names and sizes.
    """

    uid: str
    ids: np.ndarray
    columns: Record
    source: str = ""
    options: Options = field(default_factory=dict)
    teacher_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    images: Placed = ()

    @property
    def image_names(self) -> list[str]:
        return [show_image(image.image) for image in self.images]


class Prompts(Protocol):
    def take(self, start: int, count: int) -> list[Prompt]:
        """Return `count` prompts from place `start` (from 0) of an endless stream, a pure function of the
        seed.
        """


@dataclass(frozen=True)
class PromptRules:
    """How a record becomes a prompt.

    overlong_prompts: `drop` omits prompts above max_prompt_tokens, `truncate` keeps their end, `error`
    refuses them. The first two count them. system_prompt: for chat messages without one. source_key: column
    with a record's source, or empty for the data set's name. options: of the run, for chat messages.
    context_key, context_template: of `TeacherConfig`. image_key: column with images, whose `image_pixels` are
    the fewest and the most.
    """

    prompt_key: str
    max_prompt_tokens: int
    overlong_prompts: str = "drop"
    system_prompt: str = ""
    source_key: str = ""
    options: Options = field(default_factory=dict)
    context_key: str = ""
    context_template: str = ""
    image_key: str = ""
    image_pixels: tuple[int, int] = (0, 2**20)

    def options_of(self, record: Record, place: str) -> Options:
        return (
            {}
            if isinstance(record[self.prompt_key], str)
            else options_of(record, self.options, place)
        )


class PromptDataset:
    """Prompts of one source, in a fixed or freshly shuffled order every epoch."""

    def __init__(
        self,
        records: list[Record],
        renderer: Renderer,
        rules: PromptRules,
        *,
        shuffle: bool = True,
        seed: int = 0,
        name: str = "data",
        curriculum: Curriculum | None = None,
        log: Log = print,
    ) -> None:
        """Tokenize `records`.

        curriculum: orders every epoch of the kept records. log: called with progress if tokenizing is slow.
        Leaves out records with an image that cannot be read, for the reasons in `unreadable`. Raises
        DataError on a prompt that is overlong (with `error`), empty, or of the wrong type, and if none is
        left.
        """
        self._shuffle = shuffle
        self._seed = seed
        self.name = name
        self._curriculum = curriculum
        self._rules = rules
        self._orders: dict[int, Sequence[int] | np.ndarray] = {}
        self._prompts: list[tuple[np.ndarray, Record, str, np.ndarray, Placed]] = []
        self.dropped = self.truncated = 0
        self.unreadable: list[str] = []
        counted = count_if_slow(
            records, f"{name}: prompts tokenized", log, total=len(records)
        )
        for index, record in enumerate(counted, start=1):
            try:
                self._add(record, renderer, rules, index)
            except ImageError as error:
                self.unreadable.append(str(error))
        if self.unreadable and not self._prompts:
            raise DataError(self.unreadable[0])
        if not self._prompts:
            raise DataError(
                f"{name}: all {len(records)} prompts are longer than "
                f"data.max_prompt_tokens={rules.max_prompt_tokens}. Raise it, or set "
                "data.overlong_prompts=truncate."
            )

    def _add(
        self, record: Record, renderer: Renderer, rules: PromptRules, index: int
    ) -> None:
        place = f"{self.name} record {index}"
        source = str(record.get(rules.source_key, self.name))
        ids = self._tokenize(record, renderer, rules, index)
        if ids is None:
            return
        values = record.get(rules.image_key) or ()
        images = renderer.read_images(
            values, rules.image_pixels, str(data_folder(self.name)), place
        )
        ids, placed = renderer.expand(ids, images, place)
        if images:
            record = record | {rules.image_key: list(map(show_image, images))}
        if len(ids) > rules.max_prompt_tokens and rules.overlong_prompts == "truncate":
            if images:
                raise DataError(
                    f"{place} has images, and {len(ids)} prompt tokens, which "
                    "data.overlong_prompts=truncate would cut. Set drop."
                )
            self.truncated += 1
            ids = ids[-rules.max_prompt_tokens :]
        if len(ids) > rules.max_prompt_tokens:
            self._leave_out(f"{len(ids)} prompt tokens", rules, index)
            return
        taught = (
            self._teacher_ids(record, renderer, place) if rules.context_key else ids[:0]
        )
        self._prompts.append((ids, record, source, taught, placed))

    def _tokenize(
        self, record: Record, renderer: Renderer, rules: PromptRules, index: int
    ) -> np.ndarray | None:
        prompt = record[rules.prompt_key]
        if rules.overlong_prompts != "truncate" and is_too_long(
            prompt, rules.max_prompt_tokens
        ):
            # Tokenizing 60 MB would take minutes.
            self._leave_out(f"{characters(prompt):,} characters", rules, index)
            return None
        place = f"{self.name} record {index}"
        messages = with_system_prompt(prompt, rules.system_prompt, place)
        return renderer.prompt_ids(messages, place, rules.options_of(record, place))

    def _teacher_ids(self, record: Record, renderer: Renderer, place: str) -> np.ndarray:
        if record.get(self._rules.image_key):
            raise DataError(
                f"{place} has images, which teacher.context_key does not support. Remove one of them."
            )
        options = self._rules.options_of(record, place)
        return renderer.prompt_ids(with_context(record, self._rules, place), place, options)

    def _leave_out(self, length: str, rules: PromptRules, index: int) -> None:
        if rules.overlong_prompts == "error":
            raise DataError(
                f"{self.name} record {index} has {length}. Raise data.max_prompt_tokens "
                f"({rules.max_prompt_tokens}) or set data.overlong_prompts=drop."
            )
        self.dropped += 1

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def records(self) -> list[Record]:
        """Return the kept records."""
        return [record for _, record, *_ in self._prompts]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids, *_ in self._prompts]

    @property
    def longest_taught(self) -> int:
        """Most tokens of a prompt with the teacher's context."""
        return max(len(taught) for *_, taught, _ in self._prompts)

    @property
    def most_image_tokens(self) -> int:
        return max(_image_tokens(images) for *_, images in self._prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        return [self.at(position) for position in range(start, start + count)]

    def __iter__(self) -> Iterator[Prompt]:
        for index in range(len(self)):
            yield self.prompt(f"{index}", index)

    def at(self, position: int) -> Prompt:
        """Return the prompt at a place of the endless stream."""
        epoch, index = (
            divmod(position, len(self._prompts))
            if self._curriculum is None
            else self._place(position)
        )
        return self.prompt(f"{position}", self._order(epoch)[index])

    def prompt(self, uid: str, index: int) -> Prompt:
        """Return a record's prompt as `uid`. index: of the kept records."""
        ids, record, source, taught, images = self._prompts[index]
        return Prompt(
            uid, ids, record, source, self._rules.options_of(record, uid), taught, images
        )

    def _place(self, position: int) -> tuple[int, int]:
        epoch = 0  # a curriculum's epochs differ in length
        while position >= len(self._order(epoch)):
            position -= len(self._order(epoch))
            epoch += 1
        return epoch, position

    def _order(self, epoch: int) -> Sequence[int] | np.ndarray:
        if epoch not in self._orders:
            if self._curriculum is not None:
                self._orders[epoch] = self._curriculum(self.records, epoch)
            else:
                count = len(self._prompts)
                self._orders = {
                    epoch: epoch_order(self._seed, epoch, count)
                    if self._shuffle
                    else np.arange(count)
                }
        return self._orders[epoch]


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Shuffle `count` records by seed and epoch: int64 [count]."""
    return np.random.default_rng((seed, DATA_ORDER, epoch)).permutation(count)


class PromptMixture:
    """Several separately shuffled sources, mixed by weight."""

    def __init__(self, sources: Sequence[PromptDataset], weights: Sequence[float]) -> None:
        """weights: positive, one per source. Only ratios count."""
        self._sources = list(sources)
        self._shares = np.asarray(weights, np.float64) / np.sum(weights)
        self._dealt = np.zeros(len(sources), np.int64)
        self._schedule: list[
            tuple[int, int]
        ] = []  # (source, place in it) of every position so far

    def take(self, start: int, count: int) -> list[Prompt]:
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> Prompt:
        while len(self._schedule) <= position:  # take the source furthest behind its share
            source = int(np.argmax(self._shares * (len(self._schedule) + 1) - self._dealt))
            self._schedule.append((source, int(self._dealt[source])))
            self._dealt[source] += 1
        source, place = self._schedule[position]
        return replace(self._sources[source].at(place), uid=f"{position}")


def _image_tokens(images: Placed) -> int:
    return sum(image.tokens for image in images)


def show_image(image: Image) -> str:
    """Name a prompt's image, whose data are an ImageSource, and its size."""
    return f"{image.data.name} {image.width} x {image.height}"


def warn_of_left_out(name: str, unreadable: Sequence[str]) -> list[str]:
    """Return a warning about records that were left out because of an image, if any. unreadable:
    the reasons.
    """
    count = f"{len(unreadable)} record{'s' * (len(unreadable) > 1)}"
    return (
        [f"{name}: {count} left out because of an image, the first: {unreadable[0]}"]
        if unreadable
        else []
    )


def is_too_long(prompt: Any, max_tokens: int) -> bool:
    """Whether a prompt exceeds `max_tokens` with any tokenizer."""
    return characters(prompt) > CHARACTERS_PER_TOKEN * max_tokens


def characters(prompt: Any) -> int:
    """Count the characters of a text, or of chat messages."""
    if isinstance(prompt, str):
        return len(prompt)
    count = 0
    for message in prompt:
        content = message.get("content", "")
        if isinstance(content, str):
            count += len(content)
        else:
            count += sum(len(part.get("text", "")) for part in content)
    return count


def with_context(record: Record, rules: PromptRules, record_place: str) -> Any:
    """Return a record's prompt with its context for the teacher, in a text or the last user message.

    Raises DataError, naming the record `record_place`, without a context or a user message.
    """
    prompt = with_system_prompt(record[rules.prompt_key], rules.system_prompt, record_place)
    if (context := record.get(rules.context_key)) is None:
        raise DataError(
            f"{record_place} lacks {rules.context_key!r}, which teacher.context_key names. Add it."
        )

    def filled(text: str) -> str:
        substitutions = {"{prompt}": text, "{context}": str(context)}
        return re.sub(
            r"\{(?:prompt|context)\}",
            lambda place: substitutions[place[0]],
            rules.context_template,
        )

    if isinstance(prompt, str):
        return filled(prompt)
    asks = [number for number, message in enumerate(prompt) if message["role"] == "user"]
    if not asks:
        raise DataError(
            f"{record_place} has no user message for the context of teacher.context_key. Add one."
        )
    content = prompt[asks[-1]]["content"]
    text = (
        content if isinstance(content, str) else "".join(part["text"] for part in content)
    )
    return [
        m | {"content": filled(text)} if number == asks[-1] else m
        for number, m in enumerate(prompt)
    ]


def with_system_prompt(prompt: Any, system_prompt: str, place: str) -> Any:
    """Put a system message before chat messages that have none, unless `system_prompt` is empty.

    Raises DataError, naming the record `place`, for a text.
    """
    if not system_prompt:
        return prompt
    if isinstance(prompt, str):
        raise DataError(
            f"{place} is a text, but data.system_prompt goes before chat messages. Make it a list of them."
        )
    if prompt[0]["role"] in ("system", "developer"):
        return prompt
    return [{"role": "system", "content": system_prompt}, *prompt]
