"""What is looked at before the first run on a machine or a cluster: `python -m controller.doctor`.

    node: facts of a machine, by a Ray task on each --judgement--> a Finding each: ok, warn or FAIL, and what to change
    all_reduce: every rank of the cluster, timed --------------^
    trial: one engine and one rank of a tiny model, an update, new weights, log-probs before and after --^

Facts are gathered apart from what is thought of them, so that an old driver is judged without having one. Read
`judgement` first.
"""
