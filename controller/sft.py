"""`python -m controller.sft --config FILE [key.sub=value ...]`: supervised fine-tuning.

Exit codes are those of `controller.fit`.
"""

import sys
from collections.abc import Sequence
from functools import partial

from controller.config.offline import SftConfig
from controller.data.records import Record
from controller.lifecycle.session import exit_code
from controller.offline.running import OfflineCommand
from controller.offline.tokenized import Example, sft_examples
from controller.preflight.arguments import Command


def _examples(config: SftConfig, record: Record, where: str) -> tuple[Example, ...]:
    data = config.data
    return sft_examples(record, (data.messages_key, data.prompt_key, data.response_key), where)


SFT = OfflineCommand(Command("controller.sft", "Train a policy on given responses.", SftConfig), SftConfig, _examples)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return exit_code(partial(SFT.prepare, arguments))


if __name__ == "__main__":
    sys.exit(main())
