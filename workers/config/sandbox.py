"""Settings of sandboxes."""

from dataclasses import dataclass

from workers.config.setting import setting


@dataclass
class SandboxConfig:
    """Where commands of the policy, of environments and of agents run. docs/sandboxes.md has the kinds."""

    only_with = (
        (".kind", "cpus, memory_gib, processes, disk_gib, command_timeout_s, network"),
    )

    kind: str = setting(
        "",
        "`bubblewrap`, `docker:IMAGE`, `podman:IMAGE`, `kubernetes:IMAGE`, `modal:IMAGE`, "
        "`daytona:IMAGE` or `e2b:TEMPLATE`. Each sample has its own. "
        "`rollout.tools=workers.sandbox.tools` gives the policy a shell and files in it, "
        "`rollout.agent_command` runs in it, "
        "and an environment opens it (see docs/sandboxes.md).",
    )
    cpus: float = setting(1.0, "Cores of a sandbox.", above=0, maximum=1024)
    memory_gib: float = setting(
        1.0, "Memory of all processes of a sandbox, in GiB.", above=0
    )
    processes: int = setting(
        64,
        "Processes and threads of a sandbox. Pods and hosted sandboxes do not take it.",
        minimum=1,
        maximum=10**6,
    )
    disk_gib: float = setting(
        1.0,
        "Files that a sandbox may write, in GiB. Docker and Podman limit each file.",
        above=0,
    )
    command_timeout_s: float = setting(
        60.0,
        "Time limit in seconds of one command. rollout.agent_timeout_s is an agent's.",
        above=0,
    )
    network: bool = setting(
        False,
        "Give a sandbox the network. Without it, an agent reaches the run's gateway alone.",
    )
