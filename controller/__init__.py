"""The single controller: the algorithm as plain Python on the driver, and everything around it.

    fit                    command line in, exit code out
     |--> config/          what a user can set
     |--> preflight/       checks and the pages of `--dry-run`, before anything starts
     |--> lifecycle/       inputs, Ray, signals: the start and the end
     '--> training_loop    for each step: make it, validate, record, save
           |--> step       a step, from top to bottom, and its parts
           |--> rollout/   prompts in, scored samples out, data/
           |     '--> engines/     the engine pool, routing, restarts
           |--> planning/, algorithm/   plans, advantages and checks, without I/O
           |--> actors/    worker groups, and where they are placed
           |--> checkpoints/    progress, saving, resuming
           '--> observability/    RunRecord: console, files, trackers, report, timeline

Read `step` first. `[tool.importlinter]` in pyproject.toml defines the allowed imports.
"""

from pathlib import Path

from controller.packages import check_packages

check_packages()
__path__.append(str(Path(__file__).parent / "moved"))  # earlier names of commands
