"""`python -m controller.fit --config FILE [key.sub=value ...]`: a configuration in, an exit code out.

    0 success    1 failed or stopped    2 configuration, data or cluster refused, nothing started

Heavy imports wait until the configuration is checked.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from controller.config import Config, load
from controller.config.conditions import leave_out_cpu_settings
from controller.config.model_files import fetch_description, read_model_files
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.engines.fleet import RestartBudget
from controller.lifecycle.input_lines import prompt_lines, token_facts, tried_lines
from controller.lifecycle.inputs import Tried, try_inputs
from controller.lifecycle.model_checks import check_models, numerics_lines
from controller.lifecycle.session import (
    exit_code,
    is_finished,
    prepare_start,
    run_training,
    session,
)
from controller.lifecycle.tokenized_inputs import Inputs, read_inputs, tokenize_inputs
from controller.preflight.arguments import Arguments, parse_arguments
from controller.preflight.checks import check
from controller.preflight.cluster import check_machine, run_on
from controller.preflight.data_checks import is_elsewhere
from controller.preflight.describe import warnings, write_sections
from controller.preflight.describe_cluster import print_cluster
from controller.preflight.describe_time import print_time
from controller.preflight.page import Page, run_command
from workers.errors import Problems

if TYPE_CHECKING:
    from controller.observability.console import Console
    from controller.rollout.buffer import RolloutBuffer
    from controller.run import Run
    from controller.training_loop import Callback, Step


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(exit_code, _prepare, arguments)


def _prepare(arguments: Sequence[str], page: Page) -> Callable[[], None] | None:
    request = parse_arguments(arguments)
    config = load(request.config, request.overrides)
    if not request.dry_run:
        return prepare(config)
    if request.cluster:
        run_on(config, request.cluster)
        for key, path in config.model_paths.items():
            fetch_description(path, key, page.note)  # the page needs no other file
    else:
        leave_out_cpu_settings(config)
    check(config)
    dry_run(config, request, page)
    return None


def prepare(
    config: Config,
    functions: GivenFunctions = NONE_GIVEN,
    callbacks: Sequence["Callback"] = (),
    step: "Step | None" = None,
) -> Callable[[], None] | None:
    """Check everything, and return the function that starts the run, or None for a resumed run without steps
    left.

    functions: passed to the call. step: replaces run.step. callbacks: see `training_loop.train`.
    Raises ConfigError, DataError or ResourceError.
    """
    leave_out_cpu_settings(config)
    check(config, functions)
    if is_finished(config, config.run.steps, f"run.steps={config.run.steps}"):
        return None
    return prepare_start(
        config,
        lambda log: read_inputs(config, log, functions),
        lambda inputs, console: run(config, inputs, console, callbacks, step),
    )


def dry_run(config: Config, request: Arguments, page: Page) -> None:
    """Write the page of a checked configuration. Machine, models, data and users' code are
    refused together.
    """
    elsewhere = [
        path
        for path in [*config.data.weights, config.data.validation]
        if path and is_elsewhere(config, path)
    ]
    trial = None
    problems = Problems()
    with problems.collecting():
        if not request.cluster:
            check_machine(config, dry_run=True)
    with problems.collecting():
        check_models(config, page.note)
    if not problems.errors:
        write_sections(config, page, everything=request.everything)
    with problems.collecting():
        if not elsewhere:  # fails in seconds, and measuring memory takes a minute
            trial = try_inputs(config)
    problems.raise_all()
    if request.cluster:
        print_cluster(config, request.cluster, page, measured=request.measure)
    page.begin("inputs")
    prompts = _write_inputs(config, trial, elsewhere, page)
    if request.cluster:
        print_time(config, request.cluster, request.time, prompts, page)


def _write_inputs(
    config: Config, trial: Tried | None, elsewhere: Sequence[str], page: Page
) -> list[int]:
    """Return the tokens of every prompt, if a tokenizer is there. trial: None if some data is elsewhere."""
    prompts: list[int] = []
    if trial is None:
        page.write(
            f"{', '.join(elsewhere)}: not on this machine, so neither read nor scored"
        )
    else:
        records = {
            str(path): len(rows) for path, rows in (trial.train | trial.held_out).items()
        }
        page.write(*tried_lines(config, trial), records=records)
        if read_model_files(config.model.path, "model.path").tokenizer:
            inputs = tokenize_inputs(config, trial)
            prompts += [tokens for source in inputs.sources for tokens in source.lengths]
            datasets = [
                *inputs.sources,
                *([inputs.validation] if inputs.validation else []),
            ]
            page.write(
                *prompt_lines(inputs), tokens=[token_facts(dataset) for dataset in datasets]
            )
    for line in numerics_lines(config):
        page.write(line)
    return prompts


def run(
    config: Config,
    inputs: Inputs,
    console: "Console",
    callbacks: Sequence["Callback"] = (),
    step: "Step | None" = None,
) -> None:
    from controller.step import step_of
    from controller.training_loop import train

    make_step = step or step_of(inputs.step)
    lines = [
        f"warning: {warning}"
        for warning in (*warnings(config), *inputs.answer_warnings, *inputs.warnings)
    ]
    for dataset in filter(None, (*inputs.sources, inputs.validation)):
        for count, outcome in (
            (dataset.dropped, "dropped"),
            (dataset.truncated, "truncated"),
        ):
            if count:
                lines.append(
                    f"{dataset.name}: {count} prompts above data.max_prompt_tokens were {outcome}"
                )

    def attempt(config: Config, budget: RestartBudget) -> None:
        with training(config, inputs, console, budget) as run:
            train(run, make_step, callbacks)

    run_training(config, console, lines, attempt)


@contextmanager
def training(
    config: Config,
    inputs: Inputs,
    console: "Console",
    budget: RestartBudget | None = None,
    buffer: "Callable[..., RolloutBuffer] | None" = None,
) -> Iterator["Run"]:
    """Start a run's roles on a connected Ray, resume by run.resume and yield the run. Afterwards end them.

    buffer: see `Run`.
    """
    from controller.run import Run

    with session(
        config,
        console,
        inputs.identity,
        total_steps=config.total_optimizer_steps,
        rewards=inputs.reward_functions,
        environment=inputs.environment,
        parser=inputs.parser,
        budget=budget,
    ) as started:
        yield Run(
            config,
            started,
            inputs.prompts,
            inputs.validation,
            cost_model=inputs.cost_model,
            buffer=buffer,
            functions=inputs.functions,
        )


if __name__ == "__main__":
    sys.exit(main())
