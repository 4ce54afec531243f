"""Labels of sandboxes that outlive their process, and which of these are left over.

A label names the process that opened the sandbox: whoever finds it on the same machine knows whether that
process lives. A run's name would not say so: the run may have been killed, or may run at this moment.
"""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress

from workers.sandbox.protocol import SandboxLabel

OWNER = "ballast.owner"
SAMPLE = "ballast.sample"
HOST = "ballast.host"
LONGEST = 63


def own_label(sample: str) -> SandboxLabel:
    """Return the label of a sandbox that this process opens."""
    return SandboxLabel(_name(os.getpid()), sample)


def is_left_over(owner: str) -> bool:
    """Whether the process of this machine that a label names has ended. False for another machine's."""
    host, _, rest = owner.partition("_")
    pid = rest.partition("_")[0]
    return host == host_name() and pid.isdigit() and _name(int(pid)) != owner


def labels(label: SandboxLabel) -> Mapping[str, str]:
    """Return them with values that Kubernetes and Modal take: neither empty nor longer than 63 characters."""
    sample = re.sub(r"[^A-Za-z0-9._-]", "-", label.sample)[:LONGEST].strip("-._")
    return {OWNER: label.owner, SAMPLE: sample or "none", HOST: host_name()}


def _name(pid: int) -> str:
    """Return a name of a process that no later one has: Kubernetes takes letters, digits, '-', '_' and
    '.'.
    """
    import psutil

    start = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:  # in a container, init may bury nobody
            start = int(process.create_time() * 100)
    return f"{host_name()}_{pid}_{start}"


def host_name() -> str:
    """Return this machine's name, in the letters that labels take."""
    return socket.gethostname().replace("_", "-")[:32].strip("-.")
