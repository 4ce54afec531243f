"""`python -m controller.fit --config FILE [key.sub=value ...]`: a configuration in, an exit code out.

    0 the run ended    1 it failed or was stopped    2 the configuration or the data is wrong; nothing was started

Nothing heavy is imported before the configuration has been checked.
"""

import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from balancing import BalancingError, CostModel
from controller.arguments import parse_arguments
from controller.config import Config, load, to_yaml
from controller.config_checks import check
from controller.data import PromptDataset, read_records
from controller.describe import describe
from controller.layout import reserved
from controller.reward_function import load_function, requested_columns
from workers.errors import BallastError, ConfigError, DataError

if TYPE_CHECKING:
    from controller.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        request = parse_arguments(arguments)
        config = load(request.config, request.overrides)
        check(config)
        if request.dry_run:
            print(describe(config))
            return 0
        records = read_records(config.data.train, config.data.prompt_key)
        function = load_function(config.reward.function)
        columns = requested_columns(function, records[0], config.reward.function)
        prompts, validation = _datasets(config, records)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(config, prompts, validation, function, columns)
    except (BallastError, BalancingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    return 0


def run(
    config: Config,
    prompts: PromptDataset,
    validation: PromptDataset | None,
    reward_function: Any,
    reward_columns: tuple[str, ...],
) -> None:
    """Start Ray and the roles, train, write `runs/NAME/`, end what was started."""
    from controller.console import Console
    from controller.metrics import RunWriter
    from controller.roles import start_roles
    from controller.trainer import Trainer

    console = Console()
    writer = RunWriter(config.run_folder, to_yaml(config), tensorboard=config.tracking.tensorboard)
    for name, dataset in (("data.train", prompts), ("data.validation", validation)):
        if dataset is not None and dataset.dropped:
            console.say(f"{name}: {dataset.dropped} prompts above data.max_prompt_tokens were dropped")
    try:
        with _ray_session(config, console), start_roles(config, reward_function, reward_columns) as roles:
            trainer = Trainer(
                config,
                roles,
                prompts,
                validation,
                cost_model=CostModel.from_model_config(config.model_description()),
                writer=writer,
                console=console,
            )
            writer.summary(trainer.fit().summary())
            console.say(f"{config.run_folder}: model, metrics.jsonl, summary.json, tensorboard")
    finally:
        writer.close()


def _datasets(config: Config, records: list[dict[str, Any]]) -> tuple[PromptDataset, PromptDataset | None]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
    data = config.data
    dataset = partial(
        PromptDataset,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_tokens=data.max_prompt_tokens,
        over_long=data.over_long,
    )
    prompts = dataset(records, shuffle=data.shuffle, seed=config.run.seed, name="data.train")
    if not data.validation:
        return prompts, None
    held_out = read_records(data.validation, data.prompt_key)
    return prompts, dataset(held_out, shuffle=False, name="data.validation")


@contextmanager
def _ray_session(config: Config, console: "Console") -> Any:
    """A Ray connection: to resources.ray_address or RAY_ADDRESS, else to a local Ray that ends with the run."""
    import ray

    # "local", because without an address Ray would join whatever cluster was last started on this machine.
    address = config.resources.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"namespace": f"ballast {config.run_folder.name}", "log_to_driver": False}
    if address == "local":
        cores = max(os.cpu_count() or 1, math.ceil(reserved(config, "CPU")))
        options |= {"num_cpus": cores, "include_dashboard": config.resources.dashboard}
    context = ray.init(address=address, logging_level="ERROR", **options)
    if context.dashboard_url:
        console.say(f"dashboard: http://{context.dashboard_url}")
    try:
        yield
    finally:
        with suppress(KeyboardInterrupt):
            ray.shutdown()


def _interrupt(signum: int, frame: Any) -> None:
    """SIGTERM (what `ray job stop` sends) ends a run as Ctrl-C does."""
    del signum, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
