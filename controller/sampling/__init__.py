"""Sampling from a model without training it: what `controller.evaluate` and `controller.generate` share.

    settings, model --running: check, lock--> actors --sampler--> samples as they are scored --output--> samples.jsonl
                          |                                                    ^
                          '--> models: a folder, a name, a run or its checkpoint '-- what is there is not made again

Read `running` first. Engines, router, rewards and their tokens are those of training.
"""
