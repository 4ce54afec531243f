"""A server of Tinker's wire API over an open run, for its stock clients. See docs/serve.md.

Its modules, from the network inwards:

    app        HTTP on loopback: key, limits of bodies, routes
    service    calls in order, futures
    models     sessions and their models
    log        accepted calls and their answers on disk, until a checkpoint holds their effect
    wire       messages of the SDK from and to token rows and settings
"""
