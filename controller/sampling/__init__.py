"""Sampling from a model without training it: code shared by `ballast evaluate` and
`ballast generate`.

    settings, model --jobs: check, read--> job --sampling_run: engines, rewards--> samples --output--> samples.jsonl
                          |                                                    ^
                          '--> models: a folder, a name, a run or its checkpoint '-- lines already there are kept

Read `sampling_run` first. Engines, router and rewards are the same as in training.
"""
