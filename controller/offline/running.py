"""Shared by `controller.sft` and `controller.preferences`:

records --examples--> examples --tokenizer--> SequenceDataset --> Ray, roles, trainer --> report
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from balancing import CostModel
from controller.actors.cluster_address import check_cluster
from controller.checkpoints.progress import check_same_data
from controller.checkpoints.run_lock import locked
from controller.config import load_as
from controller.config.offline import OfflineConfig
from controller.config.training import counted
from controller.data.identity import DataIdentity, offline_identity
from controller.data.records import Record, read_records
from controller.lifecycle.inputs import TRIED_PROMPTS, load_renderer, quoted, try_template, turn_end_warnings
from controller.lifecycle.model_checks import check_models, numerics_lines
from controller.lifecycle.session import finished, run_training, session
from controller.observability.slow_work import Log
from controller.offline.datasets import SequenceDataset, record_name
from controller.offline.tokenized import Example
from controller.preflight.arguments import Command, parse_arguments
from controller.preflight.cluster import check_machine
from controller.preflight.describe import describe
from controller.preflight.offline_checks import check_offline

if TYPE_CHECKING:
    from controller.actors.roles import TrainingRoles
    from controller.observability.console import Console
    from controller.observability.live_metrics import LiveMetrics
    from controller.offline.steps import OfflineRun
    from controller.training_loop import Callback, Outcome

Settings = TypeVar("Settings", bound=OfflineConfig)
Examples = dict[str, list[tuple[Example, ...]]]
"""Of every record, by path."""


@dataclass(frozen=True)
class OfflineCommand(Generic[Settings]):
    """One of the commands. examples: (settings, record, the record's name) -> the record's examples."""

    arguments: Command
    schema: type[Settings]
    examples: Callable[[Settings, Record, str], tuple[Example, ...]]

    def prepare(self, arguments: Sequence[str] | None) -> Callable[[], None] | None:
        """Return the function that starts the run; None after a dry run, or if no steps are left.

        Raises ConfigError or DataError for settings and data that cannot work.
        """
        request = parse_arguments(arguments, self.arguments)
        config = load_as(self.schema, request.config, request.overrides)
        if not request.dry_run:
            return self.prepare_run(config)
        check_offline(config)
        check_machine(config, dry_run=True)
        check_models(config)
        self.dry_run(config, everything=request.everything)
        return None

    def prepare_run(self, config: Settings, callbacks: Sequence["Callback"] = ()) -> Callable[[], None] | None:
        """Check everything, and return the function that starts the run; None if no steps are left.

        callbacks: see `training_loop.train`. Raises as `prepare`, and ResourceError.
        """
        check_offline(config)
        check_machine(config, dry_run=False)
        # With run.steps the end is known before the data is read, with run.epochs by the number of its records.
        if config.run.steps and (done := finished(config, config.run.steps, config.length_setting)):
            print(done)
            return None
        check_cluster(config)
        from controller.observability.console import Console

        console = Console(verbose=config.tracking.verbose)
        with console.waiting("the models"):
            check_models(config)
        with console.waiting("the data"):
            inputs = self.read_inputs(config, console.note)
        if done := finished(config, config.steps_over(len(inputs.train)), config.length_setting):
            print(done)
            return None
        return locked(config, partial(self.run, config, inputs, console, callbacks))

    def dry_run(self, config: Settings, *, everything: bool) -> None:
        """Print what would run and where, then read the data and load small models; raises as these do.

        everything: include default settings.
        """
        print(describe(config, everything=everything))
        print("\n== inputs ==", flush=True)
        inputs = self.read_inputs(config)
        print("\n".join(quoted("the first record, as the model reads it:", inputs.first_text)))
        for dataset in filter(None, (inputs.train, inputs.validation)):
            print("\n".join(_dataset_lines(dataset)))
        for warning in inputs.warnings:
            print(f"warning: {warning}")
        for line in numerics_lines(config):
            print(line, flush=True)

    def read_examples(self, config: Settings) -> tuple[Examples, DataIdentity]:
        """Read the examples of every record, and data.train's identity, without a tokenizer.

        Raises DataError for unreadable data, ConfigError if run.resume has other data or the chat template fails.
        """
        read = {path: read_records(path) for path in (config.data.train, config.data.validation) if path}
        identity = offline_identity(config, read[config.data.train])
        check_same_data(config, identity)
        examples = {
            path: [self.examples(config, record, record_name(path, index)) for index, record in enumerate(records)]
            for path, records in read.items()
        }
        first = [example for records in examples.values() for record in records[:TRIED_PROMPTS] for example in record]
        chats = [[*prompt, *response] for prompt, response in first if isinstance(response, list)]
        try_template(config, chats, answered=True)
        return examples, identity

    def read_inputs(self, config: Settings, log: Log = print) -> "Inputs":
        """Read data and cost model. Raises ConfigError or DataError for unusable ones."""
        examples, identity = self.read_examples(config)
        cost_model = CostModel.from_model_config(config.model_description())
        renderer, data, seed = load_renderer(config, log), config.data, config.run.seed

        def dataset(path: str, *, shuffle: bool) -> SequenceDataset:
            return SequenceDataset(examples[path], renderer, data, name=path, shuffle=shuffle, seed=seed, log=log)

        validation = dataset(data.validation, shuffle=False) if data.validation else None
        train = dataset(data.train, shuffle=data.shuffle)
        identity |= {"records": len(train)}
        check_same_data(config, identity)
        is_chat = isinstance(examples[data.train][0][0][1], list)
        warnings = [*(turn_end_warnings(config, renderer) if is_chat else ()), *train.warnings]
        first_text = renderer.tokenizer.decode(train.first_ids)
        return Inputs(train, validation, cost_model, identity, first_text, warnings)

    def run(self, config: Settings, inputs: "Inputs", console: "Console", callbacks: Sequence["Callback"] = ()) -> None:
        """Start Ray and the roles, train, write `runs/NAME/`, and stop everything started."""
        lines = [f"warning: {warning}" for warning in inputs.warnings]
        for dataset in filter(None, (inputs.train, inputs.validation)):
            if dataset.dropped:
                lines.append(f"{dataset.name}: {dataset.dropped} records above data.max_tokens were dropped")

        def attempt(config: Settings, budget: object) -> None:
            del budget  # of engines: there are none
            with self.training(config, inputs, console) as run:
                self.train(run, callbacks)

        run_training(config, console, lines, attempt)

    def train(self, run: "OfflineRun[Settings]", callbacks: Sequence["Callback"] = ()) -> "Outcome":
        """See `controller.training_loop.train`."""
        from controller.offline.steps import STEPS
        from controller.training_loop import train

        return train(run, STEPS[self.schema], callbacks)

    @contextmanager
    def training(self, config: Settings, inputs: "Inputs", console: "Console") -> Iterator["OfflineRun[Settings]"]:
        """Start the roles on a connected Ray and yield a run, resumed by run.resume."""
        from controller.actors.roles import start_training_roles
        from controller.offline.steps import OfflineRun
        from workers.roles.policy import OfflinePolicyWorker

        total_steps = config.optimizer_steps_over(len(inputs.train))

        def start(live: "LiveMetrics") -> AbstractContextManager["TrainingRoles"]:
            del live
            return start_training_roles(config, OfflinePolicyWorker, console, total_steps=total_steps)

        with session(config, start, console, inputs.identity) as started:
            yield OfflineRun(config, started, inputs.train, inputs.validation, cost_model=inputs.cost_model)


def _dataset_lines(dataset: SequenceDataset) -> list[str]:
    """Lines of a dry run about a data set."""
    tokens = dataset.lengths
    return [
        f"{dataset.name}: {counted(len(dataset) + dataset.dropped, 'record')}",
        f"    {counted(len(tokens), 'sequence')} of {min(tokens)} to {max(tokens)} tokens, "
        f"{sum(tokens) / len(tokens):.0f} on average; {dataset.dropped} above data.max_tokens dropped",
    ]


@dataclass(frozen=True)
class Inputs:
    """Read and checked before anything starts. identity: of the training data, for checkpoints. first_text: of the
    first record, its ids decoded. warnings: lines for the user."""

    train: SequenceDataset
    validation: SequenceDataset | None
    cost_model: CostModel
    identity: DataIdentity
    first_text: str
    warnings: list[str]
