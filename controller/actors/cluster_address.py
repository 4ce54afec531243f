"""Check that a Ray cluster answers at the run's address. Ray would wait for minutes.

resources.ray_address, RAY_ADDRESS --gRPC health--> Ray's? --cluster id--> takes our token?
"""

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.config import TrainingConfig
from workers.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    import grpc

LOCAL, AUTO = "local", "auto"
ANSWER_SECONDS = 4.0
HEALTH, CLUSTER_ID = (
    "/grpc.health.v1.Health/Check",
    "/ray.rpc.NodeInfoGcsService/GetClusterId",
)
HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})")


def cluster_address(config: TrainingConfig) -> str:
    """Return `host:port`, `auto` for this machine's cluster, or `local` for a cluster that the run starts."""
    return config.resources.ray_address or os.environ.get("RAY_ADDRESS") or LOCAL


def check_address(config: TrainingConfig) -> None:
    """Raise ConfigError unless the address has a form that a run can join."""
    address = cluster_address(config)
    key = _key(config)
    if address.startswith("ray://"):
        raise ConfigError(
            f"{key}={address}: Ray Client is not supported. Start the run inside the cluster with `ray job "
            "submit`."
        )
    if address not in (LOCAL, AUTO) and not HOST_AND_PORT.fullmatch(address):
        raise ConfigError(
            f"{key}={address} is neither host:port nor auto. Ray's port is 6379 unless set otherwise."
        )


def check_cluster(config: TrainingConfig) -> None:
    """Raise ResourceError within seconds unless a Ray cluster answers and accepts our token."""
    address = cluster_address(config)
    if address in (LOCAL, AUTO):
        return
    setting = f"{_key(config)}={address}"
    import grpc  # a late import, which takes half a second

    # As Ray connects: a web proxy of the environment does not reach a cluster.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        if error := _error(channel, HEALTH):
            raise ResourceError(
                f"{setting}: no Ray head node answers ({error.code().name}: {error.details()}). Give the "
                "port of `ray start --head`, 6379 unless set otherwise. Check the host, firewalls, and "
                "`ray status` there."
            )
        token, source = _token()
        refused = _error(
            channel, CLUSTER_ID, (("authorization", f"Bearer {token}"),) if token else ()
        )
        if refused and refused.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise ResourceError(
                f"{setting}: the cluster wants its token, and {source}. Set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head node."
            )


def _key(config: TrainingConfig) -> str:
    return "resources.ray_address" if config.resources.ray_address else "RAY_ADDRESS"


def _error(
    channel: "grpc.Channel", method: str, metadata: tuple[tuple[str, str], ...] = ()
) -> Any:
    import grpc

    try:
        channel.unary_unary(method)(b"", timeout=ANSWER_SECONDS, metadata=metadata)
    except grpc.RpcError as error:
        return error
    return None


def set_local_token() -> None:
    """Give a local Ray a token by the environment if its file cannot be written, as in a read-only home."""
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    path = _token_path()
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or path.is_file():
        return
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _token_path() -> Path:
    return Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    )


def _token() -> tuple[str, str]:
    """Return Ray's token and its origin in words, as Ray finds it."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() != "token":
        return (
            "",
            f"RAY_AUTH_MODE={mode} sends none"
            if mode
            else "without RAY_AUTH_MODE none is sent",
        )
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip(), "RAY_AUTH_TOKEN holds another"
    path = _token_path()
    if path.is_file():
        return path.read_text(encoding="utf-8").strip(), f"{path} holds another"
    return "", "there is none here"
