"""`python -m controller.generate --config FILE [--model PATH] [key.sub=value ...]`: samples, no training.

    data.train, or data.sources --rollout.samples_per_prompt of each--> samples.jsonl: text, tokens, log-probs, reward

A job that was stopped goes on where it is started again. Exit codes are those of `controller.fit`.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from controller.config.sampler import GenerateConfig
from controller.config.training import counted
from controller.sampling.jobs import Kind
from controller.sampling.running import Finished, prepare
from controller.session import exit_code
from workers.rollout.requests import GENERATION_STEP

if TYPE_CHECKING:
    from controller.observability.console import Console

GENERATE = Kind(
    GenerateConfig,
    "generate",
    "Sample responses, with token ids and log-probs, into a file.",
    step=GENERATION_STEP,
    tokens=True,
    needs_reward=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return exit_code(partial(prepare, GENERATE, finish, arguments))


def finish(finished: Finished, console: "Console") -> None:
    """Say what there is."""
    job = finished.job
    console.log(f"{job.folder / 'samples.jsonl'}: {counted(len(finished.lines), 'sample')}")


if __name__ == "__main__":
    sys.exit(main())
