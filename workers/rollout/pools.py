"""Pools of processes around an engine: agents, tools, and the sandboxes of both.

Sandboxes are imported if `rollout.sandbox` has a kind, so that other engines start without them.
"""

from contextlib import suppress
from typing import Any

from workers.agents.processes import AgentPool
from workers.config.roles import RolloutConfig
from workers.config.sandbox import SandboxConfig
from workers.user_code.tools import ToolPool


def make_agent_pool(rollout: RolloutConfig, agent: bytes) -> AgentPool:
    limits: dict[str, Any] = {
        "memory_gib": rollout.agent_memory_gib,
        "processes": rollout.agent_processes,
    }
    if rollout.agent_command and rollout.sandbox.kind:
        from workers.sandbox.pools import SandboxAgentPool

        line = rollout.agent_command
        return SandboxAgentPool(
            line, rollout.agent_timeout_s, sandbox=rollout.sandbox, **limits
        )
    return AgentPool(rollout.agent_command or agent, rollout.agent_timeout_s, **limits)


def make_tool_pool(rollout: RolloutConfig, tools: bytes, timeout_s: float) -> ToolPool:
    limits = {
        "max_calls": rollout.max_tool_calls,
        "max_characters": rollout.max_tool_characters,
    }
    if rollout.sandbox.kind:
        from workers.sandbox.pools import SandboxToolPool

        return SandboxToolPool(tools, timeout_s, sandbox=rollout.sandbox, **limits)
    return ToolPool(tools, timeout_s, **limits)


def prepare_sandboxes(sandbox: SandboxConfig) -> None:
    """Refuse a node that cannot make them, and remove those of processes that were killed."""
    from workers.sandbox.kinds import (
        check_sandbox,
        export_settings,
        remove_left_over_sandboxes,
    )

    check_sandbox(sandbox)
    export_settings(sandbox)
    remove_left_over_sandboxes(sandbox)


def remove_sandboxes(sandbox: SandboxConfig) -> None:
    """Remove those of environments that ended with their process."""
    from workers.sandbox.kinds import remove_left_over_sandboxes
    from workers.sandbox.protocol import SandboxError

    with suppress(SandboxError):  # the next start tries again, and its error is told
        remove_left_over_sandboxes(sandbox)
