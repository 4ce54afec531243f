"""A stand-in for docker and podman on PATH: it keeps containers as folders, and runs `exec` there on this machine.

FAKE_CLIENT_STATE/NAME/arguments.json: what `run` was given. FAKE_CLIENT_STATE/NAME/files: its working folder.
A container with a volume has namespaces of its own: no network but loopback, and the volume where it is mounted.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_CLIENT_STATE"])
WITHOUT_PYTHON = "tests/bare"
IMAGES = ("tests/image", "tests/old", WITHOUT_PYTHON)
LOOPBACK_UP = """
import fcntl, socket
fcntl.ioctl(socket.socket(), 0x8914, b"lo".ljust(16, bytes(1)) + b"A".ljust(24, bytes(1)))
"""
HOLD = """
mkdir -p "$2" && mount --bind "$1" "$2" && "$3" -S -E -c "$4" && touch "$5" && exec sleep 1000
"""
NO_CONTAINER = "Error response from daemon: No such container: {}"


def fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(1)


def option(arguments: list[str], name: str) -> list[str]:
    return [word.split("=", 1)[1] for word in arguments if word.startswith(f"--{name}=")]


def read_arguments(container: Path) -> list[str]:
    arguments: list[str] = json.loads((container / "arguments.json").read_text())
    return arguments


def run(arguments: list[str]) -> None:
    (name,) = option(arguments, "name")
    image = next(word for word in arguments if not word.startswith("-"))
    if image not in IMAGES:
        fail(f"Unable to find image '{image}' locally")
    (STATE / name / "files").mkdir(parents=True)
    (STATE / name / "arguments.json").write_text(json.dumps(arguments))
    for volume in option(arguments, "volume"):
        hold_namespaces(STATE / name, *volume.split(":"))


def hold_namespaces(container: Path, source: str, target: str) -> None:
    ready = container / "ready"
    shell = [
        "sh",
        "-c",
        HOLD,
        "sh",
        source,
        target,
        sys.executable,
        LOOPBACK_UP,
        str(ready),
    ]
    holder = subprocess.Popen(
        ["unshare", "-Urnmp", "--fork", "--kill-child", *shell],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not ready.exists() and holder.poll() is None:
        time.sleep(0.01)
    inner = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
    (container / "namespaces").write_text(f"{holder.pid} {inner}")


def execute(arguments: list[str]) -> None:
    name = next(word for word in arguments if not word.startswith("-"))
    if not (STATE / name).exists():
        fail(NO_CONTAINER.format(name))
    command = arguments[arguments.index(name) + 1 :]
    if command[0] == "python3" and WITHOUT_PYTHON in read_arguments(STATE / name):
        print('exec failed: exec: "python3": executable file not found in $PATH')
        raise SystemExit(127)
    if (STATE / name / "namespaces").exists():
        _, inner = (STATE / name / "namespaces").read_text().split()
        folder = STATE / name / "files"
        enter = [
            "nsenter",
            "-t",
            inner,
            "-U",
            "-n",
            "-m",
            "-p",
            "--preserve-credentials",
            f"--wd={folder}",
        ]
        command = [*enter, *command]
    code = subprocess.run(
        command, cwd=STATE / name / "files", env={"PATH": os.defpath}
    ).returncode
    raise SystemExit(128 - code if code < 0 else code)


def remove(arguments: list[str]) -> None:
    for name in [word for word in arguments if not word.startswith("-")]:
        if not (STATE / name).exists():
            fail(NO_CONTAINER.format(name))
        if (STATE / name / "namespaces").exists():
            os.kill(
                int((STATE / name / "namespaces").read_text().split()[0]), signal.SIGKILL
            )
        shutil.rmtree(STATE / name)


def list_containers(arguments: list[str]) -> None:
    (label,) = option(arguments, "filter")
    key = label.removeprefix("label=")
    for folder in STATE.iterdir():
        labels = dict(
            word.split("=", 1) for word in option(read_arguments(folder), "label")
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
