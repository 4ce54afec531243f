"""`python -m controller.fit --config FILE [key.sub=value ...]`: a configuration in, an exit code out.

    0 the run ended    1 it failed or was stopped    2 the configuration or the data is wrong; nothing was started

Nothing heavy is imported before the configuration has been checked.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from balancing import CostModel
from controller.config import Config, load
from controller.config.functions import (
    check_environment,
    check_rewards,
    load_function,
    pack,
    pack_environment,
    requested_columns,
)
from controller.data import PromptDataset, PromptMixture, PromptRules, Prompts
from controller.preflight.arguments import parse_arguments
from controller.preflight.checks import check
from controller.preflight.cluster import run_on
from controller.preflight.describe import describe
from controller.preflight.describe_cluster import print_cluster
from controller.records import Record, read_records
from controller.recovery import recovering
from controller.rollout.fleet import RestartBudget
from controller.session import exit_code, ray_session, report, session
from workers.errors import DataError
from workers.reward_process import RewardFunction

if TYPE_CHECKING:
    from controller.roles import Roles
    from controller.trainer import Trainer
    from controller.watching.console import Console
    from controller.watching.live import Live


@dataclass(frozen=True)
class Inputs:
    """What a run needs beside its configuration, read and checked before anything starts. environment: the packed class
    of rollout.environment, empty without one."""

    sources: list[PromptDataset]
    validation: PromptDataset | None
    reward_functions: list[RewardFunction]
    cost_model: CostModel
    weights: dict[str, float]
    environment: bytes = b""

    @property
    def prompts(self) -> Prompts:
        """The training prompts: those of the only source, or a mixture."""
        return self.sources[0] if len(self.sources) == 1 else PromptMixture(self.sources, list(self.weights.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return exit_code(partial(_prepare, arguments))


def _prepare(arguments: Sequence[str] | None) -> Callable[[], None] | None:
    request = parse_arguments(arguments)
    config = load(request.config, request.overrides)
    if request.cluster:
        run_on(config, request.cluster)
    check(config)
    if request.dry_run:
        print(describe(config))
        if request.cluster:
            print_cluster(config, request.cluster, measured=request.measure)
        return None
    return partial(run, config, read_inputs(config))


def read_inputs(config: Config) -> Inputs:
    """Data, reward function and cost model. Raises ConfigError or DataError for what cannot be used."""
    data = config.data
    records = {path: read_records(path, data.prompt_key) for path in data.weights}
    held_out = {data.validation: read_records(data.validation, data.prompt_key)} if data.validation else {}
    example = next(iter(records.values()))[0]
    functions = _reward_functions(config, example)
    for path, rows in (records | held_out).items():
        for function in functions:
            _check_columns(path, rows, function)
    cost_model = CostModel.from_model_config(config.model_description())
    curriculum = load_function("data.curriculum", data.curriculum) if data.curriculum else None

    from workers.model.model import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    environment = _environment(config, example, tokenizer) if config.rollout.environment else b""
    rules = PromptRules(data.prompt_key, data.max_prompt_tokens, data.over_long, data.system_prompt, data.source_key)
    dataset = partial(PromptDataset, tokenizer=tokenizer, rules=rules)
    sources = [
        dataset(rows, shuffle=data.shuffle, seed=config.run.seed, name=path, curriculum=curriculum)
        for path, rows in records.items()
    ]
    validation = [dataset(rows, shuffle=False, name=path) for path, rows in held_out.items()]
    held_out_prompts = validation[0] if validation else None
    return Inputs(sources, held_out_prompts, functions, cost_model, data.weights, environment)


def _environment(config: Config, example: Record, tokenizer: Any) -> bytes:
    """The packed environment, tried on the first record; and the chat template, where prompts need one."""
    from workers.rollout.conversation import check_template

    if isinstance(example[config.data.prompt_key], list):
        check_template(tokenizer, config.model.path)
    environment = pack_environment(config.rollout.environment)
    check_environment(environment, example, timeout_s=config.reward.timeout_s)
    return environment


def _reward_functions(config: Config, example: Record) -> list[RewardFunction]:
    """The reward functions, tried on the first record and an empty response: one that cannot work stops here."""
    functions = []
    key = "reward.functions" if config.reward.functions else "reward.function"
    for name, weight in config.reward.weights.items():
        function = load_function(key, name)
        columns = requested_columns(function, example, name)
        functions.append(RewardFunction(name.rpartition(":")[2], weight, function, columns))
    if functions:
        check_rewards(pack(functions), example, timeout_s=config.reward.timeout_s)
    return functions


def _check_columns(path: str, records: list[Record], function: RewardFunction) -> None:
    for number, record in enumerate(records, start=1):
        if missing := set(function.columns) - set(record):
            raise DataError(f"{path}: record {number} lacks {sorted(missing)}, which {function.name} takes.")


def run(config: Config, inputs: Inputs) -> None:
    """Start Ray and the roles, train, write `runs/NAME/`, end what was started."""
    from controller.watching.console import Console

    console = Console()
    for dataset in [*inputs.sources, *([inputs.validation] if inputs.validation else [])]:
        for count, what in ((dataset.dropped, "dropped"), (dataset.truncated, "truncated")):
            if count:
                console.say(f"{dataset.name}: {count} prompts above data.max_prompt_tokens were {what}")

    def attempt(config: Config, budget: RestartBudget) -> None:
        with training(config, inputs, console, budget) as trainer:
            trainer.writer.summary(trainer.fit().summary())

    with ray_session(config, console):
        recovering(attempt, config, console.say)
    report(config, console)


@contextmanager
def training(
    config: Config, inputs: Inputs, console: "Console", budget: RestartBudget | None = None
) -> Iterator["Trainer"]:
    """The roles of a run on a connected Ray, its folder, and a trainer that stands where run.resume says; all end.

    budget: what the run has restarted before; None is nothing.
    """
    from controller.roles import start_roles
    from controller.trainer import Trainer

    budget = budget or RestartBudget(config.run.max_restarts)

    def start(live: "Live") -> AbstractContextManager["Roles"]:
        functions = inputs.reward_functions
        return start_roles(config, functions, console, budget, live=live, environment=inputs.environment)

    with session(config, start, console) as started:
        yield Trainer(
            config,
            started.roles,
            inputs.prompts,
            inputs.validation,
            cost_model=inputs.cost_model,
            writer=started.writer,
            console=console,
            live=started.live,
            progress=started.progress,
        )


if __name__ == "__main__":
    sys.exit(main())
