"""All that is said of a run before anything starts. It loads neither torch nor Ray: a mistyped key costs a second.

    command line --arguments--> file, overrides --controller.config--> Config
    Config --checks, effects, critic_checks, machine, ...--> nothing, or one line that says what to change
    Config --describe--> the page of `--dry-run`; of `--cluster`: cluster, describe_cluster, memory, model_shape

Read `checks` first.
"""
