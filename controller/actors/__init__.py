"""The actors of a run: how many, where, and how the driver calls them.

    Config --layout--> pools of equal bundles
        --placement: ranks of a group on one node--> resources: Ray's bundles
    launch: starts every role there --worker_group: DataProto shards by plan--> actors of `workers`
    rewards: the pool of reward workers    cluster_address: is there a Ray at this address?

Read `launch` first. `layout` and `placement` decide only. A dry run calls them too.
"""
