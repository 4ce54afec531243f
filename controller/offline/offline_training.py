"""Prepare and run `controller.sft`, `controller.preferences` and `controller.reward_model`.

records --examples--> examples --tokenizer--> SequenceDataset --> Ray, roles, trainer --> report
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balancing import CostModel
from controller.checkpoints.progress import check_same_data
from controller.config import load_as
from controller.config.offline import OfflineConfig, PreferencesConfig, SftConfig
from controller.config.training import count_noun
from controller.data.data_files import data_folder
from controller.data.identity import DataIdentity, offline_identity
from controller.data.image_columns import (
    COMPARED,
    blind_images,
    image_columns,
    reads_images,
    texts_of,
)
from controller.data.records import Record, read_records
from controller.data.unread_columns import CHATS, names_in, unread_columns
from controller.engines.fleet import RestartBudget
from controller.lifecycle.chat_inputs import TRIED_PROMPTS, try_template
from controller.lifecycle.input_lines import quote_lines, token_facts
from controller.lifecycle.model_checks import check_models, numerics_lines
from controller.lifecycle.session import is_finished, prepare_start, run_training, session
from controller.lifecycle.tokenized_inputs import load_renderer
from controller.observability.slow_work import Log
from controller.offline.datasets import SequenceDataset, record_name
from controller.offline.examples import (
    Example,
    preference_examples,
    reading_images,
    reward_examples,
    sft_examples,
    with_options,
)
from controller.planning.planner import counted_costs
from controller.preflight.arguments import Command, parse_arguments
from controller.preflight.cluster import check_machine
from controller.preflight.describe import write_sections
from controller.preflight.offline_checks import check_offline
from controller.preflight.page import Page
from workers.errors import check_together
from workers.rendering import Options

if TYPE_CHECKING:
    from controller.observability.console import Console
    from controller.offline.steps import OfflineRun
    from controller.training_loop import Callback

Examples = dict[str, list[tuple[Example, ...]]]
"""Of every record, by path."""


@dataclass(frozen=True)
class OfflineInputs:
    """identity: of the training data, for checkpoints. first_text: decoded ids of the first record. warnings:
    for the user.
    """

    train: SequenceDataset
    validation: SequenceDataset | None
    cost_model: CostModel
    identity: DataIdentity
    first_text: str
    warnings: list[str]


def prepare_command(
    command: Command, arguments: Sequence[str], page: Page
) -> Callable[[], None] | None:
    """Return the function that starts the run, or None after a dry run. Raises as `prepare`."""
    request = parse_arguments(arguments, command)
    config: Any = load_as(command.schema, request.config, request.overrides)
    if not request.dry_run:
        return prepare(config)
    check_offline(config)
    check_together(
        lambda: check_machine(config, dry_run=True), lambda: check_models(config, page.note)
    )
    dry_run(config, page, everything=request.everything)
    return None


def prepare(
    config: OfflineConfig, callbacks: Sequence["Callback"] = ()
) -> Callable[[], None] | None:
    """Check everything, and return the function that starts the run, or None if no steps are left."""
    check_offline(config)
    # run.steps sets the end before the data is read, run.epochs needs the number of records.
    if config.run.steps and is_finished(config, config.run.steps, config.length_setting):
        return None
    return prepare_start(
        config,
        lambda log: read_inputs(config, log),
        lambda inputs, console: run(config, inputs, console, callbacks),
    )


def dry_run(config: OfflineConfig, page: Page, *, everything: bool) -> None:
    write_sections(config, page, everything=everything)
    page.begin("inputs")
    inputs = read_inputs(config, page.note)
    page.write(*quote_lines("the first record, as the model reads it:", inputs.first_text))
    datasets = [inputs.train, *([inputs.validation] if inputs.validation else [])]
    for dataset in datasets:
        page.write(*_dataset_lines(dataset))
    page.write(
        *(f"warning: {warning}" for warning in inputs.warnings),
        tokens=[token_facts(dataset) for dataset in datasets],
    )
    for line in numerics_lines(config):
        page.write(line)


def _dataset_lines(dataset: SequenceDataset) -> list[str]:
    tokens = dataset.lengths
    return [
        f"{dataset.name}: {count_noun(len(dataset) + dataset.dropped, 'record')}",
        f"    {count_noun(len(tokens), 'sequence')} of {min(tokens)} to {max(tokens)} tokens, "
        f"{sum(tokens) / len(tokens):.0f} on average; {dataset.dropped} above data.max_tokens dropped",
    ]


def _read_examples(config: OfflineConfig) -> tuple[Examples, DataIdentity, list[str]]:
    """Return the examples, their identity, and warnings of the chat template."""
    read = {
        path: read_records(path)
        for path in (config.data.train, config.data.validation)
        if path
    }
    identity = offline_identity(config, read[config.data.train])
    check_same_data(config, identity)
    examples: Examples = {}
    chats = []
    for path, records in read.items():
        examples[path] = []
        for index, record in enumerate(records):
            record_examples = _examples_of(config, record, path, record_name(path, index))
            examples[path].append(record_examples)
            if index < TRIED_PROMPTS:
                chats += _chats_of(record_examples)
    trial = try_template(config, chats, config.data.chat_template_arguments, answered=True)
    blind = _blind_images(config, read, examples)
    has_tools = any(options.get("tools") for _, options in chats)
    unread = _unread_columns(config, read, blind, chats=bool(chats))
    return (
        examples,
        identity,
        [*(trial.warnings(tools=has_tools) if trial else []), *blind, *unread],
    )


def _chats_of(examples: Iterable[Example]) -> list[tuple[list[Any], Options]]:
    """Return messages and options of the examples whose response is chat messages."""
    chats = []
    for example in examples:
        if isinstance(example.response, list):
            chats.append(([*example.prompt, *example.response], example.options))
    return chats


def _unread_columns(
    config: OfflineConfig,
    data: Mapping[str, list[Record]],
    blind: Sequence[str],
    *,
    chats: bool,
) -> list[str]:
    """Return warnings of columns that nothing reads. blind: warnings of `blind_images`, which name columns
    too.
    """
    names = {
        name
        for records in data.values()
        for record in records[:COMPARED]
        for name in record
    }
    read = names_in(config.data, names) | (CHATS if chats else set())
    if isinstance(config, SftConfig) and config.data.messages_key in names:
        read -= {config.data.prompt_key, config.data.response_key} - {
            config.data.messages_key
        }
    of_images = {
        name
        for rows in data.values()
        for name in image_columns(rows, config.data.image_key)
        if blind
    }
    return unread_columns(data, read | of_images)


def _blind_images(
    config: OfflineConfig, data: Mapping[str, list[Record]], examples: Examples
) -> list[str]:
    """Return warnings of images that the model would not see. Raises as `blind_images`."""
    warnings: list[str] = []
    if not reads_images(config):
        return warnings
    for path, records in data.items():
        read = ((_has_images(row), _texts(row)) for row in examples[path])
        warnings += blind_images(path, records, read, config.data.image_key)
    return warnings


def _has_images(row: Sequence[Example]) -> bool:
    return any(example.images for example in row)


def _texts(row: Sequence[Example]) -> Iterator[str]:
    for example in row:
        yield from texts_of(example.prompt)
        yield from texts_of(example.response)


def _examples_of(
    config: OfflineConfig, record: Record, path: str, place: str
) -> tuple[Example, ...]:
    data: Any = config.data
    examples: Sequence[Example]
    if isinstance(config, SftConfig):
        examples = sft_examples(
            record, (data.messages_key, data.prompt_key, data.response_key), place
        )
    elif isinstance(config, PreferencesConfig):
        examples = preference_examples(
            record, (data.prompt_key, data.chosen_key, data.rejected_key), place
        )
    else:
        examples = reward_examples(record, data, config.loss.name, place)
    images = record.get(data.image_key), data.image_pixels.limits, str(data_folder(path))
    return with_options(
        reading_images(examples, *images, place),
        record,
        data.chat_template_arguments,
        place,
    )


def read_inputs(config: OfflineConfig, log: Log = print) -> OfflineInputs:
    examples, identity, warnings = _read_examples(config)
    cost_model = counted_costs(config)
    renderer = load_renderer(config, log)
    data = config.data
    seed = config.run.seed

    def dataset(path: str, *, shuffle: bool) -> SequenceDataset:
        return SequenceDataset(
            examples[path], renderer, data, name=path, shuffle=shuffle, seed=seed, log=log
        )

    validation = dataset(data.validation, shuffle=False) if data.validation else None
    train = dataset(data.train, shuffle=data.shuffle)
    identity |= {"records": len(train)}
    check_same_data(config, identity)
    first = train.first_ids
    pad = renderer.tokenizer.pad_token
    if config.head == "value" and first[-1] == renderer.tokenizer.pad_token_id:
        warnings.append(
            f"{pad} pads and ends responses, so transformers reads a score one token before reward.model"
        )
    first_text = renderer.tokenizer.decode(first)
    return OfflineInputs(
        train,
        validation,
        cost_model,
        identity,
        first_text,
        [*warnings, *renderer.unread.values(), *train.warnings],
    )


def run(
    config: OfflineConfig,
    inputs: OfflineInputs,
    console: "Console",
    callbacks: Sequence["Callback"] = (),
) -> None:
    from controller.offline.steps import STEPS
    from controller.training_loop import train

    if is_finished(config, config.steps_over(len(inputs.train)), config.length_setting):
        return
    lines = [f"warning: {warning}" for warning in inputs.warnings]
    for dataset in filter(None, (inputs.train, inputs.validation)):
        if dataset.dropped:
            lines.append(
                f"{dataset.name}: {dataset.dropped} records above data.max_tokens were dropped"
            )

    def attempt(config: OfflineConfig, budget: RestartBudget) -> None:
        del budget  # no engines to restart
        with training(config, inputs, console) as run:
            train(run, STEPS[type(config)], callbacks)

    run_training(config, console, lines, attempt)


@contextmanager
def training(
    config: OfflineConfig, inputs: OfflineInputs, console: "Console"
) -> Iterator["OfflineRun[Any]"]:
    from controller.offline.steps import OfflineRun

    total_steps = config.optimizer_steps_over(len(inputs.train))
    with session(config, console, inputs.identity, total_steps=total_steps) as started:
        yield OfflineRun(
            config, started, inputs.train, inputs.validation, cost_model=inputs.cost_model
        )
