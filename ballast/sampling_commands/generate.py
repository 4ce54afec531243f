"""`python -m ballast generate --config FILE [--model PATH] [key.sub=value ...]`: samples, no training.

    data.train, or data.sources --rollout.samples_per_prompt of each--> samples.jsonl
    a line of samples.jsonl: text, tokens, log-probs, reward

Start a stopped job again to continue it. Exit codes: see `controller.fit`.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from controller.config.sampler import GenerateConfig
from controller.config.training import count_noun
from controller.lifecycle.session import exit_code
from controller.sampling.jobs import Job
from controller.sampling.output import SAMPLES, Line
from controller.sampling.sampling_run import prepare

if TYPE_CHECKING:
    from controller.observability.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(prepare, GenerateConfig, finish, arguments))


def finish(job: Job, lines: list[Line], given_up: int, console: "Console") -> None:
    del given_up
    console.log(f"{job.config.run_folder / SAMPLES}: {count_noun(len(lines), 'sample')}")


if __name__ == "__main__":
    sys.exit(main())
