"""`python -m controller.preferences --config FILE [key.sub=value ...]`: DPO, IPO, SimPO.

Exit codes are those of `controller.fit`.
"""

import sys
from collections.abc import Sequence
from functools import partial

from controller.config.offline import PreferencesConfig
from controller.data.records import Record
from controller.lifecycle.session import exit_code
from controller.offline.running import OfflineCommand
from controller.offline.tokenized import Example, preference_examples
from controller.preflight.arguments import Command


def _examples(config: PreferencesConfig, record: Record, where: str) -> tuple[Example, ...]:
    data = config.data
    return preference_examples(record, (data.prompt_key, data.chosen_key, data.rejected_key), where)


PREFERENCES = OfflineCommand(
    Command("controller.preferences", "Train a policy on pairs of responses.", PreferencesConfig),
    PreferencesConfig,
    _examples,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return exit_code(partial(PREFERENCES.prepare, arguments))


if __name__ == "__main__":
    sys.exit(main())
