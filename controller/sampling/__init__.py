"""Sampling from a model without training it: code shared by `ballast evaluate` and
`ballast generate`.

    settings --jobs: check, read--> job          model --models--> a folder, a name, a run or its checkpoint
    job --sampling_run: engines, rewards--> samples --output--> samples.jsonl

Lines that samples.jsonl already has are kept.

Read `sampling_run` first. Engines, router and rewards are the same as in training.
"""
