"""`python -m controller.preferences --config FILE [key.sub=value ...]`: DPO, IPO, SimPO.

Exit codes: see `controller.fit`.
"""

import sys
from collections.abc import Sequence
from functools import partial

from controller.config.offline import PreferencesConfig
from controller.lifecycle.session import exit_code
from controller.offline.offline_training import prepare_command
from controller.preflight.arguments import Command
from controller.preflight.page import run_command

COMMAND = Command(
    "controller.preferences", "Train a policy on pairs of responses.", PreferencesConfig
)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(exit_code, partial(prepare_command, COMMAND), arguments)


if __name__ == "__main__":
    sys.exit(main())
