"""Training on given sequences: the loop of reinforcement learning without engines and rewards.

records --tokenized--> rows --datasets--> batch of a step --Planner--> plan --> trainers --> policy ranks
                                                      pairs: log-probs --preference_losses--> coefficients --^

`controller.sft` and `controller.preferences` are its commands, `running` what they share.
"""
