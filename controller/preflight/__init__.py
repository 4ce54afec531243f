"""Checks and printed pages before a run starts. Imports neither torch nor Ray, so a mistyped key is found in
a second.

    command line --arguments--> file, overrides --controller.config--> Config
    Config --checks: training_checks, algorithm_checks, ...--> nothing, or one line that says what to change
    Config --describe--> the page of `--dry-run`, and for `--cluster`: cluster, describe_cluster, memory

Read `checks` first. `training_checks` serves all commands, `offline_checks` training on given sequences.
"""
