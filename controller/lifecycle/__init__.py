"""The start and the end of a run, around the loop.

settings --inputs--> data, rewards --model_checks--> model --session--> Ray, actors, record --interrupts--> end
"""
