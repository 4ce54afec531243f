"""`ballast.open`: settings in, the parts of a run out, for a loop of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager

from ballast.loop.open_run import OpenRun
from ballast.loop.start import prepare_run
from ballast.records import Records
from ballast.settings import Values, load_settings
from ballast.training import Settings, give_data
from controller.config import Config
from controller.config.python_rewards import Reward, give_rewards
from controller.lifecycle.interrupts import handlers_kept


@contextmanager
def open(
    config: Settings = None,
    *,
    reward: Reward | None = None,
    overrides: Values = (),
    train: Records | None = None,
    validation: Records | None = None,
) -> Iterator[OpenRun]:
    """Start the roles of a run for a loop of one's own, see `ballast.loop.open_run` and docs/primitives.md.

    Neither data nor a reward is needed. Arguments and exceptions are as in `fit`.
    """
    settings = load_settings(Config, config, overrides)
    give_data(settings, train, validation)
    with (
        handlers_kept(),
        prepare_run(settings, give_rewards(settings.reward, reward))() as run,
    ):
        yield run
