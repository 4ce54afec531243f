"""Make the samples of a job that its file does not have yet.

command line --> job --lock, file--> [checkpoint as a model] --> roles
     roles --> requests --a window at a time--> engines --> rewards --a line each--> samples.jsonl --> finish
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from controller.config import to_yaml
from controller.config.sampler import SamplerConfig
from controller.lifecycle.session import prepare_start, ray_session
from controller.observability.failures import (
    FailureCounts,
    Failures,
    failed_sample,
    place_of,
)
from controller.observability.run_folder import writing
from controller.observability.run_log import run_log
from controller.preflight.arguments import OneLineParser
from controller.sampling.jobs import (
    Job,
    JobRequest,
    checked_settings,
    describe_job,
    read_job,
)
from controller.sampling.output import Key, Line, SamplesFile, as_line, token_columns
from workers.batch.remote_batch import fetch_objects
from workers.errors import RolloutError

if TYPE_CHECKING:
    from ray import ObjectRef

    from controller.actors.launch import WorkerGroups
    from controller.observability.console import Console
    from workers.batch.dataproto import DataProto
    from workers.batch.score import Score
    from workers.engine.requests import SampleRequest, SampleResult

SECONDS_BETWEEN_LINES = 10.0
WINDOW = 4
"""Requests in flight, as a multiple of those that the engines process at once, so that no engine waits."""
MODEL_SCORES = 256  # samples that a reward model scores at a time

Finish = Callable[[Job, list[Line], int, "Console"], None]
"""Turns a job, its lines in the order of its keys, and the number of samples given up into a command's
results.
"""


class Sampled(NamedTuple):
    """A finished sample: its tokens are row `result.row` of the DataProto `block`."""

    result: "SampleResult"
    block: "ObjectRef"
    score: "Score"


@dataclass
class Attempts:
    """Failed attempts. dropped, retried: as of `Router`. of_judge: answers' failures, by kind."""

    dropped: list["SampleResult"] = field(default_factory=list)
    retried: list["SampleResult"] = field(default_factory=list)
    of_judge: dict[str, list[str]] = field(default_factory=dict)


def prepare(
    schema: type[SamplerConfig], finish: Finish, arguments: Sequence[str] | None
) -> Callable[[], None] | None:
    parsed = _parser(schema).parse_intermixed_args(arguments)
    request = JobRequest(
        parsed.config,
        parsed.model,
        parsed.output,
        overrides=tuple(parsed.overrides),
        prompts=parsed.prompts,
        trust_run=parsed.trust_run,
    )
    if not parsed.dry_run:
        return prepare_job(schema, finish, request)[1]
    print(describe_job(schema, request))
    return None


def _parser(schema: type[SamplerConfig]) -> argparse.ArgumentParser:
    takes_prompts = not schema.needs_reward
    parser = OneLineParser(
        prog=f"python -m controller.{schema.command}",
        usage=(
            f"python -m controller.{schema.command} [--config FILE] [--model PATH] [--trust-run] [--output "
            f"FOLDER]{' [--prompts N]' if takes_prompts else ''} [--dry-run] [key.sub=value ...]"
        ),
        description=(
            f"{schema.does} A configuration of a training is taken as it is: model, data, rollout and reward."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of settings (default: from --model's run)",
    )
    add(
        "--model",
        default="",
        metavar="PATH",
        help="a model, a run, or a checkpoint of a run (model.path)",
    )
    add(
        "--trust-run",
        action="store_true",
        help="run functions that the settings of --model's run name",
    )
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for samples, which are not made again if they are there",
    )
    parser.set_defaults(prompts=0)
    if takes_prompts:
        add(
            "--prompts",
            type=int,
            default=0,
            metavar="N",
            help="only so many prompts, the first (all)",
        )
    add(
        "--dry-run",
        action="store_true",
        help="read all data and try the reward, and start nothing",
    )
    add(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings that replace the file's",
    )
    return parser


def prepare_job(
    schema: type[SamplerConfig], finish: Finish, request: JobRequest
) -> tuple[SamplerConfig, Callable[[], None]]:
    """Return the narrowed settings and the function that starts the job. Raises as `read_job` and
    `prepare_start`.
    """
    config, model, functions = checked_settings(schema, request)
    read = partial(read_job, config, model, functions, request.prompts)
    return config, prepare_start(config, read, partial(_run, finish))


def _run(finish: Finish, job: Job, console: "Console") -> None:
    folder = job.config.run_folder
    with run_log(folder, console):
        for warning in job.warnings:
            console.log(f"warning: {warning}")
        with closing(SamplesFile(folder, job.identity)) as file:
            with writing(folder / "config.yaml"):
                (folder / "config.yaml").write_text(to_yaml(job.config), encoding="utf-8")
            attempts = _complete(job, file, console)
            lines = [file.lines[key] for key in job.keys if key in file.lines]
        for failures in failures_of(job, attempts, lines):
            console.log(str(failures))
        dropped = attempts.dropped
        if not lines:
            raise RolloutError(
                f"no sample was finished. The first was given up because {dropped[0].error}"
            )
        finish(job, lines, len(dropped), console)


def failures_of(job: Job, attempts: Attempts, lines: Sequence[Line]) -> list[Failures]:
    """Count what failed, a line for each kind and cause. lines: those of an earlier start too."""
    config = job.config
    counts = FailureCounts()
    of_retries = [failed_sample(result) for result in attempts.retried[:1]] * len(
        attempts.retried
    )
    of_rewards = [
        f"{place_of((line['uid'], line['sample']))}: {line['failure']}"
        for line in lines
        if "failure" in line
    ]
    counts.add(
        f"samples given up (rollout.max_retries={config.rollout.max_retries})",
        map(failed_sample, attempts.dropped),
    )
    counts.add("samples retried", of_retries)
    counts.add(f"rewards failed (reward.on_failure={config.reward.on_failure})", of_rewards)
    for kind, failures in attempts.of_judge.items():
        counts.add(kind, failures)
    return counts.take()


def _complete(job: Job, file: SamplesFile, console: "Console") -> Attempts:
    """Make the missing samples."""
    missing = [key for key in job.keys if key not in file.lines]
    console.log(
        f"{file.path.parent}: {len(job.keys) - len(missing):,} of {len(job.keys):,} samples are there"
    )
    if not missing:
        return Attempts()
    try:
        with ray_session(job.config, console):
            job.model.write(job.config, console)
            return sample_missing(job, file, missing, console)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{file.path} has {len(file.lines):,} samples. Started again, it continues"
        ) from stop


def sample_missing(
    job: Job, file: SamplesFile, missing: Sequence[Key], console: "Console"
) -> Attempts:
    from controller.actors.launch import launch

    config = job.config
    inputs = job.inputs
    attempts = Attempts()
    last_log = time.monotonic()
    with (
        launch(
            config,
            console,
            rewards=inputs.reward_functions,
            environment=inputs.environment,
            parser=inputs.parser,
        ) as roles,
        console.samples(len(missing)) as advance,
    ):
        for done, sampled in enumerate(
            _sample_requests(job, roles, _requests(job, set(missing)), attempts), start=1
        ):
            file.append(_line(job, sampled))
            advance(1)
            if time.monotonic() - last_log > SECONDS_BETWEEN_LINES:
                last_log = time.monotonic()
                console.log(f"{done:,} of {len(missing):,} samples")
        if roles.judge:
            attempts.of_judge = roles.judge.take_failures()
    return attempts


def _requests(job: Job, missing: set[Key]) -> Iterator["SampleRequest"]:
    from controller.rollout.buffer import sample_requests

    for prompt in job.prompts.values():
        requests = sample_requests(
            job.config,
            [prompt],
            job.config.rollout.samples_per_prompt,
            job.config.seed_step,
        )
        yield from (request for request in requests if request.key in missing)


def _sample_requests(
    job: Job, roles: "WorkerGroups", requests: Iterable["SampleRequest"], attempts: Attempts
) -> Iterator[Sampled]:
    """Yield the scored samples of the requests as they finish. attempts: counts those that fail.

    Raises RolloutError when no engine is left, LostError if a reward worker is lost too often, and
    WorkerError for a failed reward with reward.on_failure=stop.
    """
    samples = _score_samples(job, roles, requests, attempts)
    if roles.reward_model is None:
        yield from samples
        return
    while some := list(islice(samples, MODEL_SCORES)):
        yield from _with_model_scores(job, roles, some)


def _score_samples(
    job: Job, roles: "WorkerGroups", requests: Iterable["SampleRequest"], attempts: Attempts
) -> Iterator[Sampled]:
    from controller.engines.engine_calls import POLL_SECONDS

    rollouts = roles.rollouts
    scoring = roles.scoring(1)
    waiting = iter(requests)
    unscored: dict[Key, tuple[SampleResult, ObjectRef]] = {}

    def score(results: list["SampleResult"], block: "ObjectRef") -> None:
        unscored.update({result.key: (result, block) for result in results})
        scoring.submit(results, block, job.prompts)

    router = rollouts.begin(job.config.rollout.sampling, score).router
    while True:
        engines = max(job.config.engines, len(rollouts.actors))
        window = WINDOW * engines * job.config.rollout.max_concurrent
        router.submit(
            islice(waiting, max(0, window - len(router.unfinished) - len(unscored)))
        )
        if router.done and not unscored:
            return
        if not router.done:
            rollouts.pump_all(POLL_SECONDS)
        attempts.dropped += router.take_dropped()
        attempts.retried += router.take_retried()
        for key, sample_score in scoring.ready(
            POLL_SECONDS if router.done else 0.0
        ).items():
            yield Sampled(*unscored.pop(key), sample_score)


def _with_model_scores(
    job: Job, roles: "WorkerGroups", samples: list[Sampled]
) -> list[Sampled]:
    from controller.planning.planner import Planner
    from controller.rollout.model_scores import with_model_scores
    from controller.rollout.samples import assemble

    assert roles.reward_model is not None
    scores = {sample.result.key: sample.score for sample in samples}
    rollout = assemble([(sample.result, sample.block) for sample in samples], scores)
    planner = Planner(job.config, job.inputs.cost_model)
    rollout = with_model_scores(job.config, roles.reward_model, planner, rollout)
    return [
        sample._replace(score=rollout.by_sample[sample.result.key]) for sample in samples
    ]


def _line(job: Job, sampled: Sampled) -> Line:
    result = sampled.result
    config = job.config
    prompt = job.prompts[result.uid]
    line = as_line(
        result, sampled.score, prompt, config.data.prompt_key, rewarded=config.rewarded
    )
    if not config.writes_tokens:
        return line
    block: DataProto = fetch_objects([sampled.block])[sampled.block]
    return line | token_columns(result, [block.row(row) for row in result.rows])
