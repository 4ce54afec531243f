"""Start and end a run, around its loop.

settings --inputs--> data, rewards --model_checks--> model --session--> Ray, actors, record
                                                           --interrupts--> end
"""
