"""Sandboxes: places where code of the policy, of tasks and of agents runs, each no longer than its sample.

    rollout.sandbox --kinds--> Sandbox: start, run, read, write, stop        protocol: limits, results, errors
           |                     |-- bubblewrap, with supervisor inside and gateway_relay to the gateway
           |                     '-- shell_sandbox: containers (Docker, Podman), pods (Kubernetes),
           |                           hosted (Modal, Daytona, E2B), with text_transport for bytes
           |-- pools: tools of a sandbox, and agent commands in one
           '-- owners: labels, by which left-over sandboxes are found and removed

A capability: the spine does not import it.
"""
