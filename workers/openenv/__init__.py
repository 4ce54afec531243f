"""Environments of OpenEnv's servers: `rollout.environment=openenv:URL`, or `openenv:PACKAGE`.

    PACKAGE --packages--> a virtual environment --package_server--> a server of its own, with a URL
    URL --tasks--> prompts with the tools of the server
    record --environment--> a session of the server: reset, a step for each call of the policy --> rewards

The package openenv is not imported: it needs mcp below 2, and vLLM needs mcp 2. A capability: the spine names
it, and does not import it.
"""
