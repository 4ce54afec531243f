"""Settings that a loop of one's own cannot have."""

from pathlib import Path

import pytest

from ballast.loop.start import prepare_run
from controller.config import load
from tests.controller.stand_ins.run import SETTINGS, write_stand_in_workspace
from tests.refusals import refused


@pytest.mark.parametrize("setting", ["rollout.max_staleness=1", "run.peer_copies=2"])
def test_settings_of_the_configured_loop_are_refused(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_stand_in_workspace(tmp_path)
    config = load(None, [*SETTINGS, "resources.device=cpu", "data.validation=''", setting])
    with refused(setting):
        prepare_run(config)
