"""Fixtures of the tests of configurations and of runs on stand-ins, for the tools too."""

from tests.controller.conftest import (  # noqa: F401 - pytest finds fixtures by these names
    batches,
    local_run,
    run_on_stand_ins,
    stand_in_inputs,
    workspace,
)
