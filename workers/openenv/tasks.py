"""Records of a server: prompts with its tools, and what its reset takes.

openenv:SERVER?seeds=64 --> a record for each seed, whose prompt describes the environment, or is `prompt`
openenv:SERVER?file=prompts.jsonl --> the file's records, whose column `reset` holds what reset takes
"""

import json
import re
from pathlib import Path
from typing import Any

from workers.errors import ConfigError, EpisodeError
from workers.openenv.environment import LISTED
from workers.openenv.package_server import serving
from workers.openenv.packages import absolute_name, check_name
from workers.openenv.server import FullServerError, ServerSession, read_page
from workers.user_code.task_sources import TASK, name_and_options

OPTIONS = ("seeds", "prompt", "file")
RESET = "reset"


def records(text: str) -> list[dict[str, Any]]:
    """Return the records of `openenv:URL?options`, or of a package's. Raises ConfigError."""
    name, options = name_and_options(text)
    check_name(name)
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"it has no option {', '.join(unknown)}. Use {', '.join(OPTIONS)}."
        )
    with serving(absolute_name(name)) as url:
        action, tools = read_tools(url)
        rows = (
            _read_file(Path(options["file"]))
            if "file" in options
            else _make_rows(url, options)
        )
    return [
        {key: value for key, value in row.items() if key != RESET}
        | {"tools": tools, TASK: {"action": action, "reset": row.get(RESET) or {}}}
        for row in rows
    ]


def read_tools(url: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the tools of a server, and the name of the only one if it stands for a typed action."""
    schema = dict(read_page(url, "/schema").get("action") or {})
    properties = {
        name: value
        for name, value in schema.get("properties", {}).items()
        if name != "metadata"
    }
    if not properties or "tool_name" in properties:
        return "", [
            _tool(tool["name"], tool["description"], tool["input_schema"])
            for tool in _listed(url)
        ]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", schema.get("title", "act")).lower()
    schema["properties"] = properties
    return name, [_tool(name, schema.pop("description", ""), schema)]


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _listed(url: str) -> list[dict[str, Any]]:
    session = ServerSession(url)
    try:
        session.open()
        tools = session.step({"type": LISTED})["observation"].get("tools")
    except (EpisodeError, FullServerError) as error:
        raise ConfigError(str(error)) from None
    finally:
        session.close()
    if not tools:
        raise ConfigError(f"{url} lists no tools, and its actions have no fields.")
    return list(tools)


def _make_rows(url: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    seeds = options.get("seeds")
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ConfigError(
            "it has no end. Add ?seeds=64, or another number, or ?file=prompts.jsonl."
        )
    prompt = options.get("prompt") or read_page(url, "/metadata").get("description")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{url} has no description. Add prompt=TEXT.")
    message = {"role": "user", "content": prompt}
    return [{"prompt": [message], RESET: {"seed": seed}} for seed in range(seeds)]


def _read_file(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"file={file}: {getattr(error, 'strerror', None) or error}."
        ) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get(RESET, {}), dict):
            raise ConfigError(
                f"file={file}: line {number} is not a JSON object whose {RESET}, if any, is an object too."
            )
        rows.append(row)
    return rows
