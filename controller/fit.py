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
from typing import TYPE_CHECKING, Any

from balancing import BalancingError
from controller.cluster_address import check_cluster, cluster_address
from controller.config import Config, load, to_yaml
from controller.inputs import Inputs, read_inputs, tried_lines, try_inputs
from controller.layout import reserved
from controller.parity import parity_lines
from controller.preflight.arguments import Arguments, parse_arguments
from controller.preflight.checks import check
from controller.preflight.cluster import run_on
from controller.preflight.describe import describe, warnings
from controller.preflight.describe_cluster import print_cluster
from controller.preflight.machine import check_machine
from controller.recovery import recovering, what_is_left
from controller.rollout.fleet import RestartBudget
from controller.watching.run_folder import RunFolder
from workers.errors import (
    BallastError,
    ConfigError,
    DataError,
    OutputError,
    ResourceError,
    UnsupportedModelError,
    clause,
)

if TYPE_CHECKING:
    from controller.trainer import Trainer
    from controller.watching.console import Console


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
            if not request.dry_run and (done := finished(config)):
                print(done)
                return 0
            if not request.cluster:
                check_machine(config, dry_run=request.dry_run)
            if request.dry_run:
                dry_run(config, request)
                return 0
            check_cluster(config)
            inputs = read_inputs(config)
        except (ConfigError, DataError, UnsupportedModelError, BalancingError, OSError) as error:
            return _fail(error, 2)
        run(config, inputs)
    except (BallastError, BalancingError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    return 0


def dry_run(config: Config, request: Arguments) -> None:
    """Print what would run and where, then try what a run tries; raises as that and `print_cluster` do."""
    print(describe(config))
    if request.cluster:
        print_cluster(config, request.cluster, measured=request.measure)
    sys.stdout.flush()  # users' code may write there from processes of its own
    print("\n".join(["", "== inputs ==", *tried_lines(config, try_inputs(config))]))
    for line in parity_lines(config):
        print(line)


def run(config: Config, inputs: Inputs) -> None:
    """Start Ray and the roles, train, write `runs/NAME/`, end what was started."""
    from controller.watching.console import Console

    console = Console()
    for warning in warnings(config):
        console.say(f"warning: {warning}")
    for dataset in [*inputs.sources, *([inputs.validation] if inputs.validation else [])]:
        for count, what in ((dataset.dropped, "dropped"), (dataset.truncated, "truncated")):
            if count:
                console.say(f"{dataset.name}: {count} prompts above data.max_prompt_tokens were {what}")

    def attempt(config: Config, budget: RestartBudget) -> None:
        with training(config, inputs, console, budget) as trainer:
            trainer.writer.summary(trainer.fit().summary())

    with ray_session(config, console), naming_what_is_left(config):
        recovering(attempt, config, console.say)
    _report(config, console)
    console.say(f"{config.run_folder}: model, report.html, metrics.jsonl, summary.json, tensorboard")


def finished(config: Config) -> str:
    """What to say instead of resuming a run that has made all its steps; empty where there is something to do."""
    steps = RunFolder(config.run_folder).finished_steps if config.run.resume == "auto" else 0
    if steps < config.run.steps:
        return ""
    return f"{config.run_folder} has ended after step {steps}; raise run.steps={config.run.steps} to go on with it"


@contextmanager
def naming_what_is_left(config: Config) -> Iterator[None]:
    """Inside, an error that a file could not be written says what the run leaves behind."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{clause(error)}; {what_is_left(config)}.") from error


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
        progress = go_on(config, roles, console, inputs.identity)
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

    # Never without an address: Ray would join whatever cluster was last started on this machine.
    address = cluster_address(config)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        cores = max(os.cpu_count() or 1, math.ceil(reserved(config, "CPU")))
        options |= {"num_cpus": cores, "include_dashboard": config.resources.dashboard, "dashboard_host": "127.0.0.1"}
    console.say("starting a local Ray" if address == "local" else f"joining the Ray cluster at {address}")
    try:
        context = ray.init(address=address, **options)
    except Exception as error:  # ray.init raises bare Exceptions too, where a local Ray does not come up in time
        if address == "local":
            raise ResourceError(f"a local Ray did not start: {clause(error)}; is the machine overloaded?") from error
        raise ResourceError(
            f"Ray at {address} could not be reached: {clause(error)}; check resources.ray_address or RAY_ADDRESS, and "
            "that both sides use the same token (RAY_AUTH_MODE)."
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
