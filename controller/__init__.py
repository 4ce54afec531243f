"""The single controller: the algorithm as plain Python on the driver, and all that a run needs around it.

    fit                    command line in, exit code out (`replay`, `report` and `timeline` are commands too)
     |--> config/          what a user can set
     |--> preflight/       checks and the pages of `--dry-run`, before anything starts
     '--> training_loop     for each step: make it, validate, record, save
           |--> step       a step, from top to bottom, and its parts
           |--> prompts in, scored samples out: collector (or continuous_collector), samples; data/
           |     '--> generation/    engines, and the routing of requests
           |--> plans: planner, cost_model_fitting
           |--> numbers: advantages, logprob_check, validation_metrics
           |--> actors/    the roles of a run, and where they are placed
           |--> resuming: checkpoint, checkpoint_writer, session, interrupts
           '--> observability/    RunRecord: console, files, trackers; report, timeline

Read `step` first. Which module may import which stands in pyproject.toml, `[tool.importlinter]`.
"""

from controller.packages import check_packages

check_packages()
