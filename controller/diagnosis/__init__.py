"""Examination of a machine or cluster before the first run: `python -m controller.doctor`.

    node: facts of a machine, by a Ray task on each --judgement--> a Finding each: ok, warn or FAIL, and what to change
    all_reduce: every rank of the cluster, timed --------------^
    trial: one engine and one rank of a tiny model, an update, new weights, log-probs before and after --^

Facts are gathered apart from their judgement, so that tests can judge, say, an old driver without having one. Read
`judgement` first.
"""
