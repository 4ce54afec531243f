"""Checks of the tools of a sandbox: one episode that writes, reads and runs, and tries to write on this
machine.

Arguments drawn from a schema say nothing here: a prompt's words are neither files nor commands.
"""

import shlex
import tempfile
from collections.abc import Set
from pathlib import Path
from typing import Any

from ballast.certify.environment.policies import tool_call
from ballast.certify.findings import Finding, Level
from workers.config.sandbox import SandboxConfig
from workers.environment import Turn
from workers.errors import EpisodeError
from workers.user_code.environments import RemoteEnvironment

WORDS = "certify"
LONGEST = 1000


async def check_sandbox_tools(
    sandbox: SandboxConfig, names: Set[str], place: str
) -> tuple[list[Finding], int]:
    """Return the findings, and how many calls were made. names: of the tools that are offered."""
    from workers.sandbox.pools import SandboxToolPool

    schemas = [{"function": {"name": name}} for name in names]
    findings = []
    made = 0
    pool = SandboxToolPool(
        b"", sandbox.command_timeout_s, sandbox=sandbox, max_calls=1, max_characters=LONGEST
    )
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "marker")
        try:
            async with pool.episode(schemas) as environment:
                for name, arguments, expected in _calls(names, marker):
                    made += 1
                    text = await _answer(environment, name, arguments)
                    if expected not in text:
                        findings.append(_broken(f"{place}, {name}", name, arguments, text))
        except EpisodeError as error:
            findings.append(_lost(place, sandbox.kind, str(error)))
        finally:
            await pool.stop()
        if marker.exists():
            findings.append(_unconfined(place, sandbox.kind))
    return findings, made


def _calls(names: Set[str], marker: Path) -> list[tuple[str, dict[str, Any], str]]:
    """Return calls: a name, arguments, and what the answer holds."""
    calls: list[tuple[str, dict[str, Any], str]] = []
    if "write_file" in names:
        calls.append(
            ("write_file", {"path": "certify/words", "content": WORDS}, "bytes written")
        )
    if names >= {"write_file", "read_file"}:
        calls.append(("read_file", {"path": "certify/words"}, WORDS))
    if "shell" in names:
        calls.append(("shell", {"command": f"echo {WORDS}"}, WORDS))
        calls.append(
            ("shell", {"command": f"touch {shlex.quote(str(marker))}; echo {WORDS}"}, WORDS)
        )
    return calls


async def _answer(
    environment: RemoteEnvironment, name: str, arguments: dict[str, Any]
) -> str:
    observation = await environment.step(Turn("", tool_calls=[tool_call(name, arguments)]))
    assert isinstance(observation.text, list)
    return str(observation.text[-1]["content"])


def _broken(place: str, name: str, arguments: dict[str, Any], text: str) -> Finding:
    return Finding(
        name="tools.broken",
        level=Level.CERTAIN,
        problem=f"the tool {name} does not work in the sandbox",
        place=place,
        advice="choose an image with sh, timeout, head, cat, mkdir and dirname",
        evidence=f"{name}({arguments}): {text[:200]}",
    )


def _lost(place: str, kind: str, error: str) -> Finding:
    return Finding(
        name="tools.sandbox_fails",
        level=Level.CERTAIN,
        problem=f"the sandbox {kind} did not start, or was lost",
        place=place,
        advice="see docs/sandboxes.md for what its kind needs",
        evidence=error[:200],
    )


def _unconfined(place: str, kind: str) -> Finding:
    return Finding(
        name="tools.runs_code_unconfined",
        level=Level.CERTAIN,
        problem=f"a command in the sandbox {kind} wrote a file on this machine",
        place=place,
        advice="use another kind of sandbox",
    )
