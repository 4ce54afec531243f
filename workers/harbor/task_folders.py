"""Folders in Harbor's format: what is read of them, what is not, and what this machine's sandbox lacks.

task.toml | instruction.md | environment/Dockerfile | tests/test.sh | solution/solve.sh
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from typing import Any

from workers.errors import ConfigError, DataError
from workers.user_code.task_sources import HARBOR, TASK

BASES = ("ubuntu", "debian", "python")  # whose shell and tools /usr has too
NO_EFFECT = ("#", "FROM", "CMD", "LABEL", "EXPOSE")
DESCRIPTIONS = ("task", "metadata", "version", "schema_version")
NUMBERS = ("agent.timeout_sec", "verifier.timeout_sec")
DOCKERFILE = "environment/Dockerfile"
SHARED = "shared"
"""The environment of tests: the policy's own."""
READ = (*NUMBERS, "environment.docker_image")
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a shell command and return what it prints. Files stay for later commands.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command line."}
            },
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True)
class TaskFolder:
    """One task. image: of `environment.docker_image`, or empty. unread: names of task.toml without effect."""

    folder: Path
    instruction: str
    agent_seconds: float
    test_seconds: float
    image: str
    unread: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """What a Dockerfile says that needs no image. copies: from a path in `environment` to one inside."""

    folder: str
    copies: tuple[tuple[str, str], ...]
    variables: dict[str, str]


def records(text: str) -> list[dict[str, Any]]:
    """Return a record for each task. Raises ConfigError."""
    try:
        return [make_record(task) for task in read_tasks(text)]
    except DataError as error:
        raise ConfigError(str(error)) from None


def make_record(task: TaskFolder) -> dict[str, Any]:
    message = {"role": "user", "content": task.instruction}
    return {"prompt": [message], "tools": [SHELL], TASK: str(task.folder)}


def read_tasks(text: str) -> list[TaskFolder]:
    """Read the tasks of `harbor:FOLDER`, a task or a folder of tasks. Raises DataError, naming the file."""
    folder = Path(text.removeprefix(f"{HARBOR}:")).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder. Name a folder of tasks, each with task.toml."
        )
    if (folder / "task.toml").is_file():
        return [read_task(folder)]
    files = sorted(folder.glob("*/task.toml"))
    if not files:
        raise DataError(f"{folder} has no task: none of its folders has task.toml.")
    return [read_task(file.parent) for file in files]


def read_task(folder: Path) -> TaskFolder:
    """Read one task. Raises DataError, naming the file."""
    values = _flatten(_read_toml(folder / "task.toml"))
    if "steps" in values:
        raise DataError(
            f"{folder / 'task.toml'}: steps: tasks of several steps are not read."
        )
    mode = values.pop("verifier.environment_mode", SHARED)
    if mode != SHARED:
        raise DataError(
            f"{folder / 'task.toml'}: verifier.environment_mode={mode!r}: tests run where the policy worked "
            f"alone. Set {SHARED}."
        )
    seconds = [_number(folder, values, name) for name in NUMBERS]
    image = values.get("environment.docker_image") or ""
    if not isinstance(image, str):
        raise DataError(
            f"{folder / 'task.toml'}: environment.docker_image={image!r} is not a text."
        )
    instruction = _read_text(folder / "instruction.md")
    if not instruction.strip():
        raise DataError(f"{folder / 'instruction.md'} is empty.")
    _read_text(folder / "tests" / "test.sh")
    unread = [
        name
        for name in values
        if name not in READ and name.split(".")[0] not in DESCRIPTIONS
    ]
    return TaskFolder(folder, instruction, seconds[0], seconds[1], image, tuple(unread))


def list_unread(tasks: list[TaskFolder]) -> list[str]:
    """Return what stands in any task.toml and has no effect."""
    return sorted({name for task in tasks for name in task.unread})


def unread_lines(text: str, kind: str) -> list[str]:
    """Return a line for what stands in the tasks of `harbor:FOLDER` and has no effect with this kind of
    sandbox.
    """
    tasks = read_tasks(text)
    lines = []
    if unread := list_unread(tasks):
        lines.append(f"{text}: of task.toml has no effect: {', '.join(unread)}")
    ignored = [
        task for task in tasks if task.image and (task.folder / DOCKERFILE).is_file()
    ]
    if ignored and not kind.startswith("bubblewrap"):
        lines.append(
            f"{text}: {len(ignored)} of {len(tasks)} tasks have {DOCKERFILE}, which has no effect beside "
            "environment.docker_image"
        )
    if kind.startswith(("kubernetes", "modal", "daytona")):
        lines.append(
            f"{text}: in {kind}, a process that the policy leaves runs on beside the tests"
        )
    return lines


def check_tasks(text: str, kind: str, reward_seconds: float) -> None:
    """Raise ConfigError unless sandboxes of this kind can hold all tasks, and their tests may take as long as
    they say. reward_seconds: reward.timeout_s.
    """
    key = "rollout.environment"
    if kind.startswith("e2b"):
        raise ConfigError(
            f"rollout.sandbox.kind={kind}: tasks name images, and E2B has templates. Use another kind."
        )
    try:
        tasks = read_tasks(text)
        for task in tasks:
            check_task(task, kind)
    except DataError as error:
        raise ConfigError(f"{key}={text}: {error}") from None
    longest = max(tasks, key=lambda task: task.test_seconds)
    if longest.test_seconds > reward_seconds:
        raise ConfigError(
            f"reward.timeout_s={reward_seconds:g}: {longest.folder / 'task.toml'} allows "
            f"verifier.timeout_sec={longest.test_seconds:g} for its tests. Raise it above that."
        )


def check_task(task: TaskFolder, kind: str) -> None:
    """Raise DataError, naming the file, for a task that needs more than sandboxes of this kind have."""
    if kind.startswith("bubblewrap"):
        read_layout(task.folder)
    elif not task.image:
        raise DataError(
            f"{task.folder / 'task.toml'}: environment.docker_image is missing, and images are not built "
            "here. Build environment/Dockerfile and name the image."
        )


def read_layout(folder: Path) -> Layout:
    """Read the part of a Dockerfile that copies files. Raises DataError for one that needs an image."""
    file = folder / DOCKERFILE
    place = "/"
    copies = []
    variables: dict[str, str] = {}
    lines = _read_text(file).replace("\\\n", " ").splitlines()
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        word = word.upper()
        if word == "WORKDIR":
            place = _join(place, rest.strip())
        elif word == "COPY" and not rest.strip().startswith(("-", "[")):
            copies += _read_copy(file, place, rest)
        elif word == "ENV" and "=" in rest:
            variables |= dict(part.split("=", 1) for part in split(rest) if "=" in part)
        elif not _has_no_effect(word, rest):
            raise DataError(
                f"{file}: {line[:80]!r} needs an image. Use rollout.sandbox.kind=docker:IMAGE."
            )
    return Layout(place, tuple(copies), variables)


def _has_no_effect(word: str, rest: str) -> bool:
    if word == "FROM":
        image = rest.split(":")[0].split("@")[0].strip()
        return image.rpartition("/")[2] in BASES
    return word.startswith(NO_EFFECT)


def _read_copy(file: Path, place: str, rest: str) -> list[tuple[str, str]]:
    *sources, target = split(rest)
    copies = []
    for source in sources:
        path = (file.parent / source).resolve()
        if not path.exists() or not path.is_relative_to(file.parent.resolve()):
            raise DataError(f"{file}: COPY {source}: {path} is not a file of environment.")
        is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
        inside = _join(place, target)
        if path.is_file() and is_folder:
            inside = _join(inside, path.name)
        copies.append((str(path), inside))
    return copies


def _join(place: str, path: str) -> str:
    return str(Path(place) / path.removeprefix("./")) if path != "." else place


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{file} is not TOML: {error}.") from None


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file} cannot be read: {reason}.") from None


def _flatten(section: dict[str, Any], above: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in section.items():
        inner = (
            _flatten(value, f"{above}{name}.")
            if isinstance(value, dict)
            else {f"{above}{name}": value}
        )
        values |= inner
    return values


def _number(folder: Path, values: dict[str, Any], name: str) -> float:
    value = values.get(name, 600.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise DataError(
            f"{folder / 'task.toml'}: {name}={value!r} is not a number of seconds above 0."
        )
    return float(value)
