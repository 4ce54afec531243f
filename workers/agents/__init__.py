"""Agents that users have: a gateway at each engine records their requests as samples. See docs/agents.md.

agent's process --requests--> gateway: routes --ids--> the engine
                                 '--> session: the tree of sampled turns --> rows to train on

`front` sends agents that run elsewhere to the engine that has their session.
"""
