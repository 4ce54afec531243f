"""Makes the samples of a job, those that its file does not have yet.

lock, file --> [checkpoint as a model] --> roles --> Sampler --a line each--> samples.jsonl --> finish
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from controller.actors.cluster_address import check_cluster
from controller.config import to_yaml
from controller.config.training import counted
from controller.observability.run_log import run_log
from controller.observability.trackers.files import writing
from controller.preflight.machine import check_machine
from controller.run_lock import locked
from controller.sampling.arguments import parse_arguments
from controller.sampling.jobs import Job, Kind, Request, described, read_job
from controller.sampling.output import Key, Line, SamplesFile, as_line, token_columns
from controller.session import ray_session
from workers.errors import RolloutError

if TYPE_CHECKING:
    from controller.observability.console import Console
    from controller.sampling.sampler import Sampled
    from workers.rollout.requests import SampleRequest, SampleResult

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Finished:
    """The samples of a job. lines: in the order of its keys. given_up: of samples that have none, the last failure."""

    job: Job
    lines: list[Line]
    given_up: list["SampleResult"]


Finish = Callable[[Finished, "Console"], None]
"""Turns the samples of a command into its results."""


def prepare(kind: Kind, finish: Finish, arguments: Sequence[str] | None) -> Callable[[], None] | None:
    """From a command line: returns what starts the job; None after a dry run. Raises as `prepare_job`."""
    request, dry_run = parse_arguments(kind, arguments)
    if not dry_run:
        return prepare_job(kind, finish, request)[1]
    print(described(kind, request))
    return None


def prepare_job(kind: Kind, finish: Finish, request: Request) -> tuple[Job, Callable[[], None]]:
    """The job, and what starts it. Raises as `read_job`, and ResourceError if there is no such cluster."""
    job = read_job(kind, request)
    check_machine(job.config, dry_run=False)
    check_cluster(job.config)
    return job, locked(job.config, partial(_run, job, finish))


def _run(job: Job, finish: Finish) -> None:
    from controller.observability.console import Console

    console = Console()
    with run_log(job.folder, console):
        _logged(job, finish, console)


def _logged(job: Job, finish: Finish, console: "Console") -> None:
    for warning in job.warnings:
        console.log(f"warning: {warning}")
    with closing(SamplesFile(job.folder, job.identity)) as file:
        with writing(job.folder / "config.yaml"):
            (job.folder / "config.yaml").write_text(to_yaml(job.config), encoding="utf-8")
        given_up = _complete(job, file, console)
        lines = [file.lines[key] for key in job.keys if key in file.lines]
    if not lines:
        raise RolloutError(f"no sample was finished; the first was given up because {given_up[0].error}")
    if given_up:
        console.log(f"{counted(len(given_up), 'sample')} were given up, the first because {given_up[0].error}")
    finish(Finished(job, lines, given_up), console)


def _complete(job: Job, file: SamplesFile, console: "Console") -> list["SampleResult"]:
    """Make the samples that the file does not have, and return the last failure of each that was given up."""
    keys = job.keys
    missing = [key for key in keys if key not in file.lines]
    console.log(f"{job.folder}: {len(keys) - len(missing):,} of {len(keys):,} samples are there")
    if not missing:
        return []
    try:
        return _sample(job, file, missing, console)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{file.path} has {len(file.lines):,} samples; started again, it goes on") from stop


def _sample(job: Job, file: SamplesFile, missing: Sequence[Key], console: "Console") -> list["SampleResult"]:
    """Make the missing samples on a connected Ray; returns as `_complete`."""
    with ray_session(job.config, console):
        job.model.write(job.config, console)
        return _sampled(job, file, missing, console)


def _sampled(job: Job, file: SamplesFile, missing: Sequence[Key], console: "Console") -> list["SampleResult"]:
    from controller.actors.sampling_roles import start_sampling_roles
    from controller.sampling.sampler import Sampler

    config, inputs, shown = job.config, job.inputs, Progress(len(missing), console)
    with start_sampling_roles(config, inputs.reward_functions, console, environment=inputs.environment) as roles:
        sampler = Sampler(config, roles, inputs.cost_model)
        with console.samples(len(missing)) as advance:
            for sampled in sampler.samples(_requests(job, set(missing)), job.prompts):
                file.append(_line(job, sampled))
                advance(1)
                shown.advance()
        return sampler.dropped


def _requests(job: Job, missing: set[Key]) -> Iterator["SampleRequest"]:
    from controller.collector import sample_requests

    samples = job.config.rollout.samples_per_prompt
    for prompt in job.prompts.values():
        requests = sample_requests(job.config, [prompt], samples, job.kind.step)
        yield from (request for request in requests if request.key in missing)


def _line(job: Job, sampled: "Sampled") -> Line:
    result, config = sampled.result, job.config
    prompt = job.prompts[result.uid]
    line = as_line(result, sampled.score, prompt, config.data.prompt_key, rewarded=config.rewarded)
    return line | token_columns(result, sampled.row()) if job.kind.tokens else line


class Progress:
    """A line from time to time, of samples that are there."""

    def __init__(self, total: int, console: "Console") -> None:
        self._total, self._console, self._done, self._told = total, console, 0, time.monotonic()

    def advance(self) -> None:
        """One more."""
        self._done += 1
        if time.monotonic() - self._told > SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self._console.log(f"{self._done:,} of {self._total:,} samples")
