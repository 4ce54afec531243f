"""Sampling from a model without training it: what `controller.evaluate` and `controller.generate` share.

    settings, model --jobs: check, read--> job --sampling_run: engines, rewards--> samples --output--> samples.jsonl
                          |                                                    ^
                          '--> models: a folder, a name, a run or its checkpoint '-- lines already there are kept

Read `sampling_run` first. Engines, router, rewards and their tokens are those of training.
"""
