"""Sandboxes: places where code of the policy, of tasks and of agents runs, each no longer than its sample.

    setting --kinds--> Sandbox: start, run, read, write, stop           protocol: limits, results, errors
                         '-- bubblewrap (with supervisor inside)

A capability: the spine does not import it.
"""
