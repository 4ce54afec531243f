"""Start the roles of an open run, and end them.

prepared: checks, the run's lock --> with _started(): Ray, the run's log --> running: roles --> OpenRun
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial

from ballast.loop.open_run import OpenRun
from controller.checkpoints.run_lock import lock_run
from controller.config import Config
from controller.config.conditions import leave_out_cpu_settings
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.fit import training
from controller.lifecycle.session import naming_what_is_left, ray_session, ready, report
from controller.lifecycle.tokenized_inputs import (
    Inputs,
    inputs_without_data,
    prompt_renderer,
    read_inputs,
)
from controller.observability.console import Console
from controller.observability.run_log import run_log
from controller.observability.slow_work import Log
from controller.preflight.checks import check
from controller.rollout.buffer import RolloutBuffer
from workers.errors import ConfigError


def prepare_run(
    config: Config, functions: GivenFunctions = NONE_GIVEN
) -> Callable[[], AbstractContextManager[OpenRun]]:
    """Check a configuration, and lock the run's folder. Returns how to start the roles, which end after the
    block.

    functions: passed to the call. Neither data nor a reward is needed. Raises as
    `controller.fit.prepare`.
    """
    leave_out_cpu_settings(config)
    check(config, functions, needs_data=False)
    if config.rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness}: your loop decides when to sample and "
            "publish. Remove it."
        )
    if config.run.peer_copies:
        raise ConfigError(
            f"run.peer_copies={config.run.peer_copies}: a loss ends your loop, and no copy would be "
            "read. Remove it, and call save()."
        )

    def read(log: Log) -> Inputs:
        return (
            read_inputs(config, log, functions)
            if config.has_data
            else inputs_without_data(config)
        )

    inputs, console = ready(config, read)
    return partial(_start, config, inputs, console, lock_run(config, lambda: None))


@contextmanager
def _start(
    config: Config, inputs: Inputs, console: Console, release: Callable[[], None]
) -> Iterator[OpenRun]:
    with ExitStack() as stack:
        stack.callback(release)
        stack.enter_context(run_log(config.run_folder, console))
        console.log(f"the run is written to {config.run_folder}")
        stack.enter_context(ray_session(config, console))
        stack.enter_context(naming_what_is_left(config))
        with running(config, inputs, console) as run:
            yield run
        report(config, console)


@contextmanager
def running(config: Config, inputs: Inputs, console: Console) -> Iterator[OpenRun]:
    """Start the roles on a connected Ray, and end them after the block."""
    with training(config, inputs, console, buffer=RolloutBuffer) as run:
        run.begin()
        renderer, rules = prompt_renderer(config, inputs.tools, console.note)
        with closing(OpenRun(run, renderer, rules)) as mine:
            yield mine
