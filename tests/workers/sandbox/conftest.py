"""Whether this machine makes bubblewrap's sandboxes."""

import subprocess

import pytest

TRIAL = [
    "bwrap",
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--ro-bind",
    "/",
    "/",
    "true",
]


def bubblewrap_starts() -> bool:
    try:
        return subprocess.run(TRIAL, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_bubblewrap = pytest.mark.skipif(
    not bubblewrap_starts(), reason="needs bubblewrap 0.8 and user namespaces"
)
