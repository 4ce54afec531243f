"""Addresses at which no run can begin, given to the command: answered at once, in one line, without Ray."""

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.actors import cluster_address
from controller.actors.cluster_address import (
    CLUSTER_ID,
    HEALTH,
    check_cluster,
    set_local_token,
)
from controller.config import load
from controller.fit import main

TOKEN = "f" * 64
VARIABLES = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class HeadNode(grpc.GenericRpcHandler):
    """Answers as Ray's head node does. methods: those it has. token: what it wants to see, ""
    takes anybody.
    """

    def __init__(self, *methods: str, token: str = "") -> None:
        self.methods, self.token = methods, token

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        sent = dict(handler_call_details.invocation_metadata).get("authorization")
        refused = method == CLUSTER_ID and self.token and sent != f"Bearer {self.token}"

        def answer(request: bytes, context: Any) -> bytes:
            if refused:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return (
            grpc.unary_unary_rpc_method_handler(answer) if method in self.methods else None
        )


@contextmanager
def serving(head: HeadNode) -> Iterator[str]:
    with ThreadPoolExecutor(max_workers=1) as threads:
        server = grpc.server(threads, handlers=[head])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def home(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder without a token, and an environment that names no cluster."""
    monkeypatch.setenv("HOME", str(workspace))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return workspace


def refused(capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line on stderr with which the command ends with 2; Ray is not even imported for it."""
    loaded = set(sys.modules)
    code = main(["--config", "config.yaml", *overrides])
    shown = capfd.readouterr()
    assert (code, len(shown.err.splitlines()), shown.out) == (2, 1, "") and not Path(
        "runs"
    ).exists()
    assert "ray" not in set(sys.modules) - loaded
    return shown.err


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "resources.ray_address"])
@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://head:8265"])
def test_an_address_of_another_form_is_a_wrong_configuration(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    name: str,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address if name == "RAY_ADDRESS" else "")
    overrides = [] if name == "RAY_ADDRESS" else [f"{name}={address}"]
    assert refused(capfd, *overrides).startswith(f"error: {name}={address}")


def test_an_address_where_no_ray_answers_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_address, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        assert f"={silent}: no Ray head node answers (DEADLINE_EXCEEDED" in refused(
            capfd, f"resources.ray_address={silent}"
        )
    for nobody in (silent, "nowhere.invalid:6379"):
        assert f"={nobody}: no Ray head node answers (" in refused(
            capfd, f"resources.ray_address={nobody}"
        )
    with serving(HeadNode("/some.Other/Method")) as address:
        assert "(UNIMPLEMENTED" in refused(capfd, f"resources.ray_address={address}")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "there is none here"),
        ({"RAY_AUTH_MODE": ""}, "without RAY_AUTH_MODE none is sent"),
        ({"RAY_AUTH_TOKEN": "e" * 64}, "RAY_AUTH_TOKEN holds another"),
        ({"RAY_AUTH_TOKEN_PATH": "token"}, "token holds another"),
        (
            {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"},
            "RAY_AUTH_MODE=disabled sends none",
        ),
    ],
)
def test_a_token_that_is_missing_or_wrong_is_one_line(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Path("token").write_text("e" * 64)
    with serving(HeadNode(HEALTH, CLUSTER_ID, token=TOKEN)) as address:
        assert message in refused(capfd, f"resources.ray_address={address}")


def test_a_cluster_that_takes_our_token_or_wants_none_is_joined(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(f"{TOKEN}\n")
    with serving(HeadNode(HEALTH, CLUSTER_ID, token=TOKEN)) as address:
        check_cluster(load("config.yaml", [f"resources.ray_address={address}"]))
    (home / ".ray" / "auth_token").unlink()
    with serving(HeadNode(HEALTH, CLUSTER_ID)) as address:
        check_cluster(load("config.yaml", [f"resources.ray_address={address}"]))
    check_cluster(load("config.yaml", ["resources.ray_address=auto"]))


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_web_proxy_of_the_environment_does_not_stand_before_a_cluster(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(HeadNode(HEALTH, CLUSTER_ID)) as address:
        check_cluster(load("config.yaml", [f"resources.ray_address={address}"]))


@pytest.mark.parametrize(
    ("home_is_a_file", "environment", "is_set"),
    [
        (True, {"RAY_AUTH_MODE": "token"}, True),
        (True, {"RAY_AUTH_MODE": "disabled"}, False),
        (True, {"RAY_AUTH_TOKEN": TOKEN}, False),
        (False, {"RAY_AUTH_MODE": "token"}, False),
    ],
)
def test_a_local_ray_whose_token_file_cannot_be_written_gets_its_token_by_the_environment(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    home_is_a_file: bool,
    environment: dict[str, str],
    is_set: bool,
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file" if home_is_a_file else home))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = os.environ["RAY_AUTH_TOKEN"]
    set_local_token()
    assert (os.environ["RAY_AUTH_TOKEN"] != before) == is_set
