"""The single controller: the algorithm as plain Python on the driver, and all that a run needs around it.

    fit                    command line in, exit code out (`report` and `timeline` are commands too)
     |--> config/          what a user can set
     |--> preflight/       what is said of a run before anything starts: checks, the pages of `--dry-run`
     '--> trainer          a step, from top to bottom; its parts are the modules beside it:
           |--> prompts in, scored samples out: collector, lookahead; records, data, rewards, samples
           |     '--> rollout/    engines, and which of them answers what
           |--> who computes what: planner, cost_model_fitting
           |--> what a sequence or a token was worth: advantage_computer, advantages
           |--> the actors of a run: roles, layout, resources, worker_group
           |--> where it can go on from: checkpoint, checkpoint_writer, recovery, interrupts
           '--> watching/  what can be seen of a run: console, metrics, trackers, report, timeline

Read `trainer` first. Which module may import which stands in pyproject.toml, `[tool.importlinter]`.
"""
