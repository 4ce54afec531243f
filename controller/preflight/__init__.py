"""Everything that is checked and printed before a run starts. It imports neither torch nor Ray, so that a mistyped key
costs a second.

    command line --arguments--> file, overrides --controller.config--> Config
    Config --checks: training_checks, algorithm_checks, ...--> nothing, or one line that says what to change
    Config --describe--> the page of `--dry-run`; of `--cluster`: cluster, describe_cluster, memory, model_shape

Read `checks` first. `training_checks` holds what all commands check, `offline_checks` those of given sequences.
"""
