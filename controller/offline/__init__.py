"""Training on given sequences: the reinforcement learning loop without engines and rewards.

records --examples--> texts, chats --tokenized--> rows --datasets--> batch of a step
                              batch of a step --Planner--> plan --> trainers --> policy ranks
                                                      pairs: log-probs --preference_losses--> coefficients --^

Commands: `controller.sft` and `controller.preferences`. `offline_training` holds their common code.
"""
