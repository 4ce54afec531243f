"""`python -m controller.preferences --config FILE [key.sub=value ...]`: DPO, IPO, SimPO.

Exit codes are those of `controller.fit`.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from controller.config.offline import PreferencesConfig
from controller.offline.datasets import Item
from controller.offline.running import OfflineCommand
from controller.offline.tokenized import conversations, pair_rows
from controller.preflight.arguments import Command
from controller.records import Record
from controller.session import exit_code


def _tokenize(config: PreferencesConfig, tokenizer: Any, record: Record, where: str) -> Item:
    data = config.data
    return pair_rows(tokenizer, record, (data.prompt_key, data.chosen_key, data.rejected_key), where)


def _chats(config: PreferencesConfig, record: Record) -> list[Any]:
    data = config.data
    return conversations(record, "", data.prompt_key, data.chosen_key, data.rejected_key)


def _trainer() -> Any:
    from controller.offline.trainers import PreferencesTrainer

    return PreferencesTrainer


PREFERENCES = OfflineCommand(
    Command("controller.preferences", "Train a policy on pairs of responses.", PreferencesConfig),
    PreferencesConfig,
    _tokenize,
    _chats,
    _trainer,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return exit_code(partial(PREFERENCES.prepare, arguments))


if __name__ == "__main__":
    sys.exit(main())
