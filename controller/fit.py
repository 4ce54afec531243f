"""`python -m controller.fit --config FILE [key.sub=value ...]`: a configuration in, an exit code out.

    0 the run ended    1 it failed or was stopped    2 the configuration or the data is wrong; nothing was started

Nothing heavy is imported before the configuration has been checked.
"""

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from balancing import BalancingError, CostModel
from controller.config import Config, load, to_yaml
from controller.config.functions import (
    check_environment,
    check_rewards,
    load_function,
    pack,
    pack_environment,
    requested_columns,
)
from controller.data import PromptDataset, PromptMixture, PromptRules, Prompts
from controller.layout import reserved
from controller.preflight.arguments import parse_arguments
from controller.preflight.checks import check
from controller.preflight.cluster import run_on
from controller.preflight.describe import describe
from controller.preflight.describe_cluster import print_cluster
from controller.records import Record, check_loss_columns, read_records
from controller.recovery import recovering
from controller.rollout.fleet import RestartBudget
from workers.errors import BallastError, ConfigError, DataError, ResourceError, UnsupportedModelError
from workers.reward_process import RewardFunction

if TYPE_CHECKING:
    from controller.trainer import Trainer
    from controller.watching.console import Console


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
    signal.signal(signal.SIGTERM, interrupt)
    try:
        try:
            request = parse_arguments(arguments)
            config = load(request.config, request.overrides)
            if request.cluster:
                run_on(config, request.cluster)
            check(config)
            if request.dry_run:
                print(describe(config))
                if request.cluster:
                    print_cluster(config, request.cluster, measured=request.measure)
                return 0
            inputs = read_inputs(config)
        except (ConfigError, DataError, UnsupportedModelError, BalancingError) as error:
            return _fail(error, 2)
        run(config, inputs)
    except (BallastError, BalancingError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    return 0


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
    for path, rows in records.items():
        check_loss_columns(path, rows, config.loss_columns)
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
    _report(config, console)
    console.say(f"{config.run_folder}: model, report.html, metrics.jsonl, summary.json, tensorboard")


def _report(config: Config, console: "Console") -> None:
    """The run's report; a run that has ended well does not fail for the lack of it."""
    from controller.watching.report import write_report

    try:
        write_report(config.run_folder)
    except (BallastError, OSError) as error:
        console.say(f"no report was written: {error}")


@contextmanager
def training(
    config: Config, inputs: Inputs, console: "Console", budget: RestartBudget | None = None
) -> Iterator["Trainer"]:
    """The roles of a run on a connected Ray, its folder, and a trainer that stands where run.resume says; all end.

    budget: what the run has restarted before; None is nothing.
    """
    from controller.checkpoint import go_on
    from controller.roles import start_roles
    from controller.trainer import Trainer
    from controller.watching.live import Live
    from controller.watching.metrics import RunWriter
    from controller.watching.trackers.opening import open_trackers
    from controller.watching.trackers.ray_metrics import RayMetrics

    budget = budget or RestartBudget(config.run.max_restarts)
    exported = RayMetrics(config.run.name)
    live = Live(exported.export)
    starting = start_roles(config, inputs.reward_functions, console, budget, live=live, environment=inputs.environment)
    with exported, live.entering("start", starting) as roles:
        progress = go_on(config, roles, console)
        trackers = open_trackers(config, progress, console.say, exported)
        # A run that goes on under its own name keeps what it has recorded; under a new name nothing is there.
        with RunWriter(
            config.run_folder, to_yaml(config), trackers, timeline=config.tracking.timeline, after=progress.step
        ) as writer:
            yield Trainer(
                config,
                roles,
                inputs.prompts,
                inputs.validation,
                cost_model=inputs.cost_model,
                writer=writer,
                console=console,
                live=live,
                progress=progress,
            )


@contextmanager
def ray_session(config: Config, console: "Console") -> Iterator[None]:
    """A Ray connection: to resources.ray_address or RAY_ADDRESS, else to a local Ray that ends with the run."""
    import ray

    # "local", because without an address Ray would join whatever cluster was last started on this machine.
    address = config.resources.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        cores = max(os.cpu_count() or 1, math.ceil(reserved(config, "CPU")))
        options |= {"num_cpus": cores, "include_dashboard": config.resources.dashboard, "dashboard_host": "127.0.0.1"}
    console.say("starting a local Ray" if address == "local" else f"joining the Ray cluster at {address}")
    try:
        context = ray.init(address=address, **options)
    except Exception as error:  # ray.init raises bare Exceptions too, where a local Ray does not come up in time
        if address == "local":
            raise ResourceError(f"a local Ray did not start: {error}; is the machine overloaded?") from error
        raise ResourceError(
            f"Ray at {address} could not be reached: {error}; check resources.ray_address or RAY_ADDRESS, and that "
            "both sides use the same token (RAY_AUTH_MODE)."
        ) from error
    signal.signal(signal.SIGTERM, interrupt)  # ray.init puts a handler of its own in its place
    if context.dashboard_url:
        console.say(f"dashboard: http://{context.dashboard_url} (if it wants a token: ray get-auth-token)")
    try:
        yield
    finally:
        with suppress(KeyboardInterrupt):
            ray.shutdown()


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def interrupt(signum: int, frame: Any) -> None:
    """SIGTERM (what `ray job stop` sends) ends a run as Ctrl-C does."""
    del signum, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
