"""Common parts of every command: exit codes, preparation, Ray, run folder, recovery.

    prepare --wrong: 2--> Ray --> roles, trackers, folder --> train --failed, stopped: 1--> report, hub --> 0
                              ^                                 |
                              '-- run.resume=auto <--LostError--'

After losing an actor, a run resumes from its last checkpoint in the same process. All roles restart, because
surviving ranks cannot reuse their process group. Data order follows from the seed, so repeated steps equal
the lost ones.
"""

import gc
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from balancing import BalancingError
from controller.actors.cluster_address import (
    check_cluster,
    cluster_address,
    set_local_token,
)
from controller.actors.layout import idle_gpus, sum_reserved
from controller.checkpoints.peer_copies import stop_copies
from controller.checkpoints.progress import checkpoints_at
from controller.checkpoints.run_lock import lock_run
from controller.config import TrainingConfig, to_yaml
from controller.config.role_table import LEARNING_ROLES
from controller.engines.fleet import RestartBudget
from controller.lifecycle.interrupts import heeded_signals, in_main_thread
from controller.lifecycle.local_ray import ray_folder, started_apart
from controller.lifecycle.model_checks import check_models
from controller.lifecycle.planner_code import compiling_planner
from controller.observability.run_folder import RunFolder
from controller.observability.run_log import rays_logging_in, run_log
from controller.observability.slow_work import Log, log_if_slow
from controller.preflight.cluster import check_machine
from controller.preflight.memory import fit_checkpointing
from workers.errors import (
    BallastError,
    CombinedConfigError,
    ConfigError,
    DataError,
    LostError,
    OutputError,
    Problems,
    ResourceError,
    UnsupportedModelError,
    clause,
    one_line,
    without_control,
)

if TYPE_CHECKING:
    from controller.actors.launch import WorkerGroups
    from controller.checkpoints.progress import Progress
    from controller.observability.console import Console
    from controller.observability.run_record import RunRecord

Found = TypeVar("Found")
Settings = TypeVar("Settings", bound=TrainingConfig)

BESIDE = ("adapters", *(role for role in LEARNING_ROLES if role != "policy"))
"""Folders of a run that a repository of the hub gets beside the model."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the garbage collector's thresholds. With Python's it takes a sixth of the checks before a run,
    which import torch and transformers, and a quarter of a step of 65,536 samples.
    """
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 10)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@rare_collections()
def exit_code(prepare: Callable[[], Callable[[], None] | None]) -> int:
    """Run a command: 0 success, 1 failed or stopped, 2 refused before anything started.

    prepare: reads, checks, and returns the function that starts the run, or None.
    """
    for number in heeded_signals():
        signal.signal(number, interrupt)
    try:
        try:
            start = prepare()
        except (
            ConfigError,
            DataError,
            ResourceError,
            UnsupportedModelError,
            BalancingError,
            OSError,
        ) as error:
            return _fail(error, 2)
        if start is not None:
            start()
    except (BallastError, BalancingError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt as stop:
        print(": ".join(["stopped", *map(str, stop.args)]), file=sys.stderr)
        return 1
    return 0


def prepare_start(
    config: TrainingConfig,
    read: Callable[[Log], Found],
    start: Callable[[Found, "Console"], None],
) -> Callable[[], None]:
    """Check machine, cluster and models, read the inputs, and lock the run's folder. Returns how to start the
    run.

    read: returns the inputs, and logs slow work. Raises ResourceError, ConfigError, and as `read`.
    """
    inputs, console = ready(config, read)
    return lock_run(config, partial(start, inputs, console))


def ready(config: TrainingConfig, read: Callable[[Log], Found]) -> tuple[Found, "Console"]:
    """Check machine, cluster and models, and read the inputs. Raises as `prepare_start`."""
    from controller.observability.console import Console

    console = Console(verbose=config.tracking.verbose)
    problems = Problems()
    with problems.collecting():
        check_machine(config, dry_run=False)
        check_cluster(config)
    with problems.collecting(), console.waiting("the models"):
        check_models(config, console.note)
    problems.raise_all()  # reading the data may take minutes
    with console.waiting("the data"):
        return read(console.note), console


@dataclass(frozen=True)
class Session:
    roles: "WorkerGroups"
    progress: "Progress"
    record: "RunRecord"


@contextmanager
def session(
    config: TrainingConfig, console: "Console", data: dict[str, Any], **launched: Any
) -> Iterator[Session]:
    """Launch the roles on a connected Ray, resume by run.resume, and open the run's folder. Close all
    afterwards.

    data: identity of the training data, see `controller.data.identity`. launched: arguments of `launch`.
    """
    from controller.actors.launch import launch
    from controller.checkpoints.checkpoint_writer import resume
    from controller.observability.live_metrics import LiveMetrics
    from controller.observability.ray_metrics import RayMetrics
    from controller.observability.run_folder import RunWriter
    from controller.observability.run_record import RunRecord
    from controller.observability.trackers import open_trackers

    exported = RayMetrics(config.run.name)
    live = LiveMetrics(exported.export)
    with exported, ExitStack() as stack:
        with live.phase("start"), compiling_planner() as wait_for_planner:
            roles = stack.enter_context(
                launch(config, console, live=live, fit=fit_checkpointing, **launched)
            )
            with console.waiting("the planner, which is compiled once"):
                wait_for_planner()
        with console.waiting("the checkpoint that run.resume names, or the models"):
            progress = resume(config, roles, console.log, data)
        trackers, ids = open_trackers(
            config, progress.trackers, progress.step, console.log, exported
        )
        progress = replace(progress, trackers=ids)
        # A run that resumes under its own name keeps its records. Under a new name there are none.
        with RunWriter(
            config.run_folder,
            to_yaml(config),
            trackers,
            timeline=config.tracking.timeline,
            last_step=progress.step,
        ) as writer:
            yield Session(
                roles, progress, RunRecord(console, live, writer, samples=config.samples)
            )


def is_finished(config: TrainingConfig, last_step: int, setting: str) -> bool:
    """Whether a resumed run has no steps left, and say so. setting: `key=value` that determines
    `last_step`.
    """
    steps = (
        RunFolder(config.run_folder).finished_steps if config.run.resume == "auto" else 0
    )
    if steps < last_step:
        return False
    print(
        f"{config.run_folder} has ended after step {steps}. Raise {setting} to continue it"
    )
    return True


def run_training(
    config: Settings,
    console: "Console",
    lines: Iterable[str],
    attempt: Callable[[Settings, RestartBudget], object],
) -> None:
    """Start Ray, train, write `runs/NAME/`, push the model, and stop everything started. lines: printed
    first.
    """
    with run_log(config.run_folder, console):
        for line in (f"the run is written to {config.run_folder}", *lines):
            console.log(line)
        with ray_session(config, console), naming_what_is_left(config), rare_collections():
            recovering(attempt, config, console.log)
        report(config, console)
        push_to_hub(config, console.log)


def recovering(
    attempt: Callable[[Settings, RestartBudget], Found],
    config: Settings,
    log: Callable[[str], None],
) -> Found:
    """Return `attempt(config, budget)`, repeated after each LostError with a config that resumes.

    Raises LostError, the cause first, if run.checkpoint_every and run.peer_copies are 0, or if
    run.max_restarts are used up.
    """
    budget = RestartBudget(config.run.max_restarts)
    try:
        while True:
            try:
                return attempt(config, budget)
            except LostError as error:
                _check_recoverable(config, budget, error)
                budget.recoveries += 1
                config = resuming(config)
                log(f"{clause(error)}; restarting all roles")
    finally:
        stop_copies(config.run_folder)


def _check_recoverable(
    config: TrainingConfig, budget: RestartBudget, error: LostError
) -> None:
    if not config.run.checkpoint_every and not config.run.peer_copies:
        raise LostError(
            f"{clause(error)}; a run with run.checkpoint_every above 0 would continue."
        ) from error
    if budget.left <= 0:
        raise LostError(
            f"{clause(error)}; all of run.max_restarts={budget.limit} are used up."
        ) from error


def resuming(config: Settings) -> Settings:
    has_copies = bool(config.run.peer_copies) and config.run.resume == "never"
    # If no copy in memory is complete, a run that began with run.resume=PATH begins there again.
    if not has_copies and not checkpoints_at(config.run_folder):
        return config
    going_on = copy(config)
    going_on.run = replace(config.run, resume="auto")
    return going_on


def what_is_left(config: TrainingConfig) -> str:
    checkpoints = checkpoints_at(config.run_folder)
    models = sorted(
        path.parent.name for path in config.run_folder.glob("model*/config.json")
    )
    models_text = f"saved are {', '.join(models)}" if models else "no model is saved"
    if not checkpoints:
        return f"there is no checkpoint to resume from, and {models_text}"
    return f"run.resume=auto resumes from {checkpoints[0]}, and {models_text}"


@contextmanager
def naming_what_is_left(config: TrainingConfig) -> Iterator[None]:
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{clause(error)}; {what_is_left(config)}.") from error
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(what_is_left(config)) from stop


def report(config: TrainingConfig, console: "Console") -> None:
    from controller.observability.report import write_report

    try:
        with console.waiting("the report"):
            write_report(config.run_folder)
    except (BallastError, OSError) as error:
        console.log(f"no report was written: {error}")
    adapters = ", adapters" if (config.run_folder / "adapters").exists() else ""
    console.log(
        f"{config.run_folder}: model{adapters}, report.html, metrics.jsonl, summary.json, run.log, "
        "tensorboard"
    )


def push_to_hub(config: TrainingConfig, log: Callable[[str], None]) -> None:
    """Upload model, adapters and critic to run.push_to_hub, created as private. Raises OutputError with
    advice.
    """
    repository = config.run.push_to_hub
    if not repository:
        return
    from huggingface_hub import HfApi

    api = HfApi()
    folder = config.run_folder
    try:
        with log_if_slow(log, f"pushing {folder / 'model'} to {repository}"):
            address = api.create_repo(repository, private=True, exist_ok=True)
            message = f"{config.run.name}: {config.headline}"
            api.upload_folder(
                repo_id=repository, folder_path=folder / "model", commit_message=message
            )
            for name in BESIDE:
                if (folder / name).is_dir():
                    api.upload_folder(
                        repo_id=repository,
                        folder_path=folder / name,
                        path_in_repo=name,
                        commit_message=message,
                    )
    except Exception as error:  # errors of the hub and its client differ by version
        raise OutputError(
            f"run.push_to_hub={repository}: {type(error).__name__}: {clause(error)}. The model is in "
            f"{folder}, and `hf upload {repository} {folder / 'model'} .` uploads it."
        ) from error
    log(f"pushed to {address}")


@contextmanager
def ray_session(config: TrainingConfig, console: "Console") -> Iterator[None]:
    """Connect to resources.ray_address or RAY_ADDRESS, else start a local Ray that ends with the run. A
    connected Ray, such as a notebook's, is kept.
    """
    import ray

    if ray.is_initialized():
        console.log("using the Ray that this process is connected to")
        _warn_of_idle_gpus(config, console)
        yield
        return
    # Without an address, Ray would join the cluster last started on this machine.
    address = cluster_address(config)
    options: dict[str, Any] = {
        "log_to_driver": console.kept is not None,
        "logging_level": "ERROR",
    }
    if address == "local":
        set_local_token()
        cores = max(os.cpu_count() or 1, math.ceil(sum_reserved(config, "CPU")))
        options |= {
            "num_cpus": cores,
            "include_dashboard": config.resources.dashboard,
            "dashboard_host": "127.0.0.1",
        }
        options["_temp_dir"] = str(ray_folder())
    console.log(
        "starting a local Ray"
        if address == "local"
        else f"joining the Ray cluster at {address}"
    )
    try:
        with (
            console.waiting("Ray"),
            started_apart() if address == "local" else nullcontext(),
        ):
            context = ray.init(address=address, **options)
    # ray.init raises bare Exceptions too, where a local Ray does not come up in time.
    except Exception as error:
        if address == "local":
            late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
            hint = (
                "Is the machine overloaded?"
                if late
                else f"Ray's logs are below {ray_folder()}."
            )
            raise ResourceError(
                f"a local Ray did not start: {clause(error)}. {hint}"
            ) from error
        raise ResourceError(
            f"Ray at {address} could not be reached: {clause(error)}. Check resources.ray_address or "
            "RAY_ADDRESS, and that both sides use the same token (RAY_AUTH_MODE)."
        ) from error
    if in_main_thread():
        signal.signal(signal.SIGTERM, interrupt)  # ray.init replaces this handler
    if context.dashboard_url:
        console.log(
            f"dashboard: http://{context.dashboard_url} (if it wants a token: ray get-auth-token)"
        )
    with ExitStack() as stack:
        if console.kept is not None:
            stack.enter_context(rays_logging_in(console.kept))
        stack.callback(_shut_down, console)
        if address == "local":
            # Until the shutdown begins, which ends the raylet.
            stack.enter_context(_raylet_watched(config))
        _warn_of_idle_gpus(config, console)
        yield


def _shut_down(console: "Console") -> None:
    import ray

    with suppress(KeyboardInterrupt), console.aside():  # the last lines of actors
        ray.shutdown()


def _warn_of_idle_gpus(config: TrainingConfig, console: "Console") -> None:
    import ray

    gpus = int(ray.available_resources().get("GPU", 0)) if config.uses_gpus else 0
    for warning in idle_gpus(config, gpus):
        console.log(f"warning: {warning}")


@contextmanager
def _raylet_watched(config: TrainingConfig) -> Iterator[None]:
    """Print an error if a local raylet ends in the block, because Ray then ends this process silently."""
    import psutil

    raylets = [
        child.pid for child in psutil.Process().children() if child.name() == "raylet"
    ]
    over = threading.Event()

    def watch(pid: int) -> None:
        end = None
        with suppress(ChildProcessError):  # another thread has waited for it
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if not over.is_set():
            print(
                f"error: Ray's raylet ended with {_raylet_end(end)}; {what_is_left(config)}.",
                file=sys.stderr,
            )

    for pid in raylets:
        threading.Thread(target=watch, args=(pid,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _raylet_end(end: os.waitid_result | None) -> str:
    if end is None:
        return "an unknown code"
    if end.si_code == os.CLD_EXITED and end.si_status == 0:
        return "code 0, as when somebody sends it SIGTERM"
    kind = "code" if end.si_code == os.CLD_EXITED else "signal"
    return f"{kind} {end.si_status}, as when memory is short"


def _fail(error: Exception, code: int) -> int:
    errors = error.errors if isinstance(error, CombinedConfigError) else [error]
    for single in errors:
        # A failed run may print a worker's traceback.
        is_one_line = code == 2 or isinstance(single, OSError)
        print(
            f"error: {one_line(single) if is_one_line else without_control(str(single))}",
            file=sys.stderr,
        )
    return code


def interrupt(signum: int, frame: Any) -> None:
    del signum, frame
    raise KeyboardInterrupt
