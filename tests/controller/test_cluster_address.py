"""Addresses at which no run can begin, given to the command: answered at once, in one line, without Ray."""

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
from controller.actors.cluster_address import CLUSTER_ID, HEALTH, check_cluster
from controller.config import load
from controller.fit import main

TOKEN = "f" * 64
VARIABLES = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class HeadNode(grpc.GenericRpcHandler):
    """Answers as Ray's head node does. methods: those it has. token: what it wants to see, "" takes anybody."""

    def __init__(self, *methods: str, token: str = "") -> None:
        self.methods, self.token = methods, token

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        sent = dict(handler_call_details.invocation_metadata).get("authorization")
        refused = method == CLUSTER_ID and self.token and sent != f"Bearer {self.token}"

        def answer(request: bytes, context: Any) -> bytes:
            if refused:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if method in self.methods else None


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


@pytest.fixture
def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def refused(capfd: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    """Exit code, and the one line on stderr; Ray is not even imported for it."""
    loaded = set(sys.modules)
    code = main(["--config", "config.yaml", *overrides])
    shown = capfd.readouterr()
    assert len(shown.err.splitlines()) == 1 and shown.out == "" and not Path("runs").exists()
    assert "ray" not in set(sys.modules) - loaded
    return code, shown.err


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "=ray://head:10001: Ray Client is not supported; start the run inside the cluster with"),
        ("head", "=head is neither host:port nor auto; Ray's port is 6379 unless set otherwise."),
        ("http://head:8265", "=http://head:8265 is neither host:port nor auto"),
    ],
)
def test_an_address_of_another_form_is_a_wrong_configuration(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    message: str,
    by_environment: bool,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address if by_environment else "")
    overrides = [] if by_environment else [f"resources.ray_address={address}"]
    code, line = refused(capfd, *overrides)
    assert code == 2
    assert line.startswith(f"error: {'RAY_ADDRESS' if by_environment else 'resources.ray_address'}{message}")


def test_a_port_where_nobody_listens_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, closed_port: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", closed_port)
    assert refused(capfd) == (
        2,
        f"error: RAY_ADDRESS={closed_port}: no connection (Connection refused); check the port, and that the cluster "
        "runs (`ray status` there).\n",
    )


def test_a_host_that_cannot_be_resolved_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(address: tuple[str, int], timeout: float) -> None:
        assert (address, timeout) == (("nowhere.invalid", 6379), cluster_address.CONNECT_SECONDS)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    code, line = refused(capfd, "resources.ray_address=nowhere.invalid:6379")
    assert code == 2
    assert "nowhere.invalid:6379: the host is not known (Name or service not known); check its name." in line


def test_a_host_that_does_not_answer_is_not_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(address: tuple[str, int], timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    code, line = refused(capfd, "resources.ray_address=10.0.0.1:6379")
    assert code == 2 and "10.0.0.1:6379: nothing answered within 4 s; check the address, and that no fire" in line


def test_a_port_that_takes_connections_and_says_nothing_is_no_cluster(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_address, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, line = refused(capfd, f"resources.ray_address=127.0.0.1:{server.getsockname()[1]}")
    assert code == 2 and "what answers there is not a Ray head node (DEADLINE_EXCEEDED); give the port of `ray" in line


def test_a_port_of_another_service_is_no_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(HeadNode("/some.Other/Method")) as address:
        code, line = refused(capfd, f"resources.ray_address={address}")
    assert code == 2 and "what answers there is not a Ray head node (UNIMPLEMENTED); give the port" in line


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {},
            "the cluster wants its token, and there is none here; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what",
        ),
        ({"RAY_AUTH_MODE": ""}, "wants its token, and without RAY_AUTH_MODE none is sent; set"),
        ({"RAY_AUTH_TOKEN": "e" * 64}, "wants its token, and that of RAY_AUTH_TOKEN is another; set"),
        ({"RAY_AUTH_TOKEN_PATH": "token"}, "wants its token, and that of token is another; set"),
        ({"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"}, "and RAY_AUTH_MODE=disabled sends none; set"),
    ],
)
def test_a_token_that_is_missing_or_wrong_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Path("token").write_text("e" * 64)
    with serving(HeadNode(HEALTH, CLUSTER_ID, token=TOKEN)) as address:
        code, line = refused(capfd, f"resources.ray_address={address}")
    assert code == 2 and message in line


def test_a_cluster_that_takes_our_token_or_wants_none_is_joined(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(f"{TOKEN}\n")
    with serving(HeadNode(HEALTH, CLUSTER_ID, token=TOKEN)) as address:
        check_cluster(load("config.yaml", [f"resources.ray_address={address}"]))
    (home / ".ray" / "auth_token").unlink()
    with serving(HeadNode(HEALTH, CLUSTER_ID)) as address:
        check_cluster(load("config.yaml", [f"resources.ray_address={address}"]))


def test_a_run_with_a_ray_of_its_own_asks_nobody() -> None:
    check_cluster(load("config.yaml"))
    check_cluster(load("config.yaml", ["resources.ray_address=auto"]))
