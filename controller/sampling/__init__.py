"""Sampling from a model without training it: what `controller.evaluate` and `controller.generate` share.

    settings, model --jobs: check, read--> job --running: engines, rewards--> samples --output--> samples.jsonl
                          |                                                    ^
                          '--> models: a folder, a name, a run or its checkpoint '-- lines already there are kept

Read `running` first. Engines, router, rewards and their tokens are those of training.
"""
