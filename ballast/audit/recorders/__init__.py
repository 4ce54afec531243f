"""Recorders write the steps of another trainer as bundles while it runs.

    trl    GRPOTrainer of TRL: a callback, and methods of the trainer that it wraps
    verl   the actor of verl: a decorator of `update_actor`

Each imports its trainer's package only if a user imports the module.
"""
