"""A stand-in for docker and podman on PATH: it keeps containers as folders, and runs `exec` there on this machine.

FAKE_CLIENT_STATE/NAME/arguments.json: what `run` was given. FAKE_CLIENT_STATE/NAME/files: its working folder.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_CLIENT_STATE"])
IMAGES = ("tests/image", "tests/old")
NO_CONTAINER = "Error response from daemon: No such container: {}"


def fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(1)


def option(arguments: list[str], name: str) -> list[str]:
    return [word.split("=", 1)[1] for word in arguments if word.startswith(f"--{name}=")]


def run(arguments: list[str]) -> None:
    (name,) = option(arguments, "name")
    image = next(word for word in arguments if not word.startswith("-"))
    if image not in IMAGES:
        fail(f"Unable to find image '{image}' locally")
    (STATE / name / "files").mkdir(parents=True)
    (STATE / name / "arguments.json").write_text(json.dumps(arguments))


def execute(arguments: list[str]) -> None:
    name = next(word for word in arguments if not word.startswith("-"))
    if not (STATE / name).exists():
        fail(NO_CONTAINER.format(name))
    command = arguments[arguments.index(name) + 1 :]
    if "--detach" in arguments:
        (STATE / name / "detached.json").write_text(json.dumps(command))
        return
    code = subprocess.run(command, cwd=STATE / name / "files", env={"PATH": os.defpath}).returncode
    raise SystemExit(128 - code if code < 0 else code)


def remove(arguments: list[str]) -> None:
    for name in [word for word in arguments if not word.startswith("-")]:
        if not (STATE / name).exists():
            fail(NO_CONTAINER.format(name))
        shutil.rmtree(STATE / name)


def list_containers(arguments: list[str]) -> None:
    (label,) = option(arguments, "filter")
    key = label.removeprefix("label=")
    for folder in STATE.iterdir():
        labels = dict(
            word.split("=", 1)
            for word in option(json.loads((folder / "arguments.json").read_text()), "label")
        )
        if key in labels:
            print(folder.name, labels[key])


def main() -> None:
    match sys.argv[1:]:
        case ["info", *_]:
            if (STATE.parent / "no-daemon").exists():
                fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
            print("linux")
        case ["image", "inspect", *_, image]:
            if image not in IMAGES:
                fail(f"Error response from daemon: No such image: {image}")
        case ["container", "inspect", *_, name]:
            print("true" if (STATE / name).exists() else "")
        case ["run", *arguments]:
            run(arguments)
        case ["exec", *arguments]:
            execute(arguments)
        case ["restart", "--time=0", name]:
            if not (STATE / name).exists():
                fail(NO_CONTAINER.format(name))
            (STATE / name / "restarted").touch()
        case ["rm", *arguments]:
            remove(arguments)
        case ["ps", *arguments]:
            list_containers(arguments)
        case other:
            fail(f"the stand-in does not know {other}")


if __name__ == "__main__":
    main()
