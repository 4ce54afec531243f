"""What `controller.sft` and `controller.preferences` share: read, start, train, report."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from balancing import CostModel
from controller.checkpoint import check_same_data
from controller.cluster_address import check_cluster
from controller.config import load_as
from controller.config.offline import OfflineConfig
from controller.data_identity import DataIdentity, offline_identity
from controller.inputs import TRIED_PROMPTS, limited_tokenizer, try_template
from controller.offline.datasets import Item, SequenceDataset
from controller.parity import parity_lines
from controller.preflight.arguments import Command, parse_arguments
from controller.preflight.describe import describe
from controller.preflight.machine import check_machine
from controller.preflight.offline_checks import check_offline
from controller.records import Record, read_records
from controller.recovery import recovering
from controller.run_lock import locked
from controller.session import finished, naming_what_is_left, ray_session, report, session
from controller.watching.shown_text import counted

if TYPE_CHECKING:
    from controller.offline.trainers import OfflineTrainer
    from controller.roles import TrainingRoles
    from controller.watching.console import Console
    from controller.watching.live_metrics import LiveMetrics

Settings = TypeVar("Settings", bound=OfflineConfig)


@dataclass(frozen=True)
class OfflineCommand(Generic[Settings]):
    """One of the commands. tokenize: (settings, tokenizer, record, where it stands) -> its sequences. chats: (settings,
    record) -> its conversations. trainer: gives the class of its trainer, which is imported when it is needed."""

    arguments: Command
    schema: type[Settings]
    tokenize: Callable[[Settings, Any, Record, str], Item]
    chats: Callable[[Settings, Record], list[Any]]
    trainer: Callable[[], type["OfflineTrainer[Settings]"]]

    def prepare(self, arguments: Sequence[str] | None) -> Callable[[], None] | None:
        """What starts the run; None after a dry run. Raises ConfigError or DataError for what cannot be."""
        request = parse_arguments(arguments, self.arguments)
        config = load_as(self.schema, request.config, request.overrides)
        check_offline(config)
        check_machine(config, dry_run=request.dry_run)
        if request.dry_run:
            self.dry_run(config)
            return None
        check_cluster(config)
        inputs = self.read_inputs(config)
        if done := finished(config, config.steps_over(len(inputs.train)), config.length_setting):
            print(done)
            return None
        return locked(config, partial(self.run, config, inputs))

    def dry_run(self, config: Settings) -> None:
        """Print what would run and where, then read the data and load small models; raises as these do."""
        print(describe(config))
        print("\n== inputs ==")
        for path, records in self.try_records(config).items():
            print(f"{path}: {counted(len(records), 'record')}")
        print("records are not counted in tokens: that takes the tokenizer, with which a run begins")
        for line in parity_lines(config):
            print(line)

    def try_records(self, config: Settings) -> dict[str, list[Record]]:
        """The records by path, once the chat template has rendered the first of each.

        Raises DataError for what cannot be read, ConfigError where the template fails or run.resume has other data.
        """
        paths = filter(None, (config.data.train, config.data.validation))
        read = {path: read_records(path) for path in paths}
        check_same_data(config, offline_identity(config, read[config.data.train]))
        first = [record for records in read.values() for record in records[:TRIED_PROMPTS]]
        try_template(config, [chat for record in first for chat in self.chats(config, record)], answered=True)
        return read

    def read_inputs(self, config: Settings) -> "Inputs":
        """Data and cost model. Raises ConfigError or DataError for what cannot be used."""
        read = self.try_records(config)
        cost_model = CostModel.from_model_config(config.model_description())
        tokenize = partial(self.tokenize, config, limited_tokenizer(config))
        data, seed = config.data, config.run.seed

        def dataset(path: str, *, shuffle: bool) -> SequenceDataset:
            return SequenceDataset(read[path], tokenize, data, name=path, shuffle=shuffle, seed=seed)

        validation = dataset(data.validation, shuffle=False) if data.validation else None
        train = dataset(data.train, shuffle=data.shuffle)
        identity = offline_identity(config, read[data.train]) | {"records": len(train)}
        check_same_data(config, identity)
        return Inputs(train, validation, cost_model, identity)

    def run(self, config: Settings, inputs: "Inputs") -> None:
        """Start Ray and the roles, train, write `runs/NAME/`, end what was started."""
        from controller.watching.console import Console

        console = Console()
        for dataset in (inputs.train, inputs.validation):
            if dataset is not None and dataset.dropped:
                console.log(f"{dataset.name}: {dataset.dropped} records above data.max_tokens were dropped")

        def attempt(config: Settings, budget: object) -> None:
            del budget  # of engines: there are none
            with self.training(config, inputs, console) as trainer:
                trainer.fit()

        with ray_session(config, console), naming_what_is_left(config):
            recovering(attempt, config, console.log)
        report(config, console)

    @contextmanager
    def training(self, config: Settings, inputs: "Inputs", console: "Console") -> Iterator["OfflineTrainer[Settings]"]:
        """The roles of a run on a connected Ray, its folder, and a trainer that stands where run.resume says."""
        from controller.roles import start_training_roles
        from workers.offline_policy import OfflinePolicyWorker

        total_steps = config.optimizer_steps_over(len(inputs.train))

        def start(live: "LiveMetrics") -> AbstractContextManager["TrainingRoles"]:
            del live
            return start_training_roles(config, OfflinePolicyWorker, console, total_steps=total_steps)

        with session(config, start, console, inputs.identity) as started:
            yield self.trainer()(config, started, inputs.train, inputs.validation, cost_model=inputs.cost_model)


@dataclass(frozen=True)
class Inputs:
    """What a run needs beside its configuration, read and checked before anything starts. identity: of the training
    data, for its checkpoints."""

    train: SequenceDataset
    validation: SequenceDataset | None
    cost_model: CostModel
    identity: DataIdentity
