"""What the three servers take from a socket before they know a key: Tinker's, the gateway of a rollout, the
front.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvicorn

from ballast.serve.app import make_app
from ballast.serve.log import CallLog
from ballast.serve.service import Service
from tests.ballast.serve.tiny_run import TinyRun
from workers import http_limits
from workers.agents.front import SessionFront
from workers.agents.gateway import Gateway
from workers.config.roles import ModelConfig, RolloutConfig
from workers.http_limits import uvicorn_config

KEY = "tml-0123"
Address = tuple[str, int]


@asynccontextmanager
async def tinker(folder: Path) -> AsyncIterator[Address]:
    app = make_app(
        Service(TinyRun(folder), CallLog(folder / "serve"), lambda error: None), KEY
    )
    server = uvicorn.Server(uvicorn_config(app, log_config=None))
    port = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([port]))  # without its signals
    yield port.getsockname()
    server.should_exit = server.force_exit = True
    await serving


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Address]:
    gateway = Gateway(None, ModelConfig(path=("none")), RolloutConfig(), images=object())  # type: ignore[arg-type]
    await gateway.listen(gateway)
    host, port = gateway.url.removeprefix("http://").split(":")
    yield host, int(port)
    await gateway.stop()


@asynccontextmanager
async def front(folder: Path) -> AsyncIterator[Address]:
    front = SessionFront(KEY, "127.0.0.1", 0, max_request_mib=1, timeout_s=10)
    await front.start()
    yield front._listener.sockets[0].getsockname()
    await front.stop()


SERVERS = [tinker, gateway, front]
PATHS = {
    tinker: "/api/v1/healthz",
    gateway: "/s/a/v1/models",
    front: "/sessions/a/v1/models",
}
Server = Callable[[Path], "asynccontextmanager[Address]"]  # type: ignore[type-arg]


def over_sockets(
    check: Callable[..., Awaitable[None]],
) -> Callable[..., None]:
    @pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.__name__)
    def test(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def run() -> None:
            async with asyncio.timeout(20), server(tmp_path) as address:
                await check(address, PATHS[server], monkeypatch)

        asyncio.run(run())

    test.__name__ = check.__name__
    return test


async def exchanged(address: Address, request: bytes) -> bytes:
    """Return all that a server answers to a request, after which one of the two closes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    with suppress(ConnectionError):
        await writer.drain()
    answer = b""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(2):
            while part := await reader.read(2**16):
                answer += part
    writer.close()
    return answer


def head(path: str, *lines: str, method: str = "GET") -> bytes:
    host = () if any(line.lower().startswith("host") for line in lines) else ("Host: a",)
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", *host, "Connection: close", *lines, "", ""]
    ).encode("latin-1")


@over_sockets
async def test_a_head_without_an_end_is_cut_off(
    address: Address, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nX: ".encode())
    sent = 0
    with suppress(ConnectionError):
        while sent < 2**25 and not reader.at_eof():
            writer.write(b"x" * 2**16)
            await writer.drain()
            sent += 2**16
            await asyncio.sleep(0)
    assert sent < 2**23  # what sockets hold
    writer.close()
    assert b" 401 " in await exchanged(address, head(path))


@over_sockets
async def test_a_connection_without_a_whole_head_ends(
    address: Address, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 0.2)
    whole = f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    for begun in (b"", b"GET", whole[:-2]):
        for before in (b"", whole) if begun else (b"",):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(before)
            assert not before or b" 401 " in await reader.read(2**16)
            writer.write(begun)
            async with asyncio.timeout(5):
                assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            writer.close()
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(2):  # an idle connection that has had a request is kept
        writer.write(whole)
        assert b" 401 " in await reader.read(2**16)
        await asyncio.sleep(0.5)
    writer.close()


@over_sockets
async def test_connections_are_counted(
    address: Address, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "MOST_CONNECTIONS", 3)
    held = [await asyncio.open_connection(*address) for _ in range(3)]
    assert b" 503 " in await exchanged(address, head(path))
    held[0][1].close()
    while b" 503 " in (answer := await exchanged(address, head(path))):
        await asyncio.sleep(0.01)  # until the server has seen the end
    assert b" 401 " in answer
    for _, writer in held:
        writer.close()


HEADS = {
    "key that is not UTF-8": ("", ["X-Api-Key: tml-\xff\xfe"]),
    "bearer that is not UTF-8": ("", ["Authorization: Bearer \xed\xa0\x80"]),
    "no host": ("", ["Host:"]),
    "host without a port": ("", ["Host: a:b:c", f"X-Api-Key: {KEY}"]),
    "host with a large port": ("", ["Host: a:99999999", f"X-Api-Key: {KEY}"]),
    "host in brackets": ("", ["Host: [::", f"X-Api-Key: {KEY}"]),
    "host that is not ASCII": ("", ["Host: \xff", f"X-Api-Key: {KEY}"]),
    "another path": ("/no", ["Host: [", f"X-Api-Key: {KEY}"]),
    "half a character in the path": ("/%ED%A0%80", [f"X-Api-Key: {KEY}"]),
    "bytes in the path": ("/\xff\xfe", [f"X-Api-Key: {KEY}"]),
    "query of half a character": ("?x=%ED%A0%80", [f"X-Api-Key: {KEY}"]),
    "length that is no number": ("", ["Content-Length: x", f"X-Api-Key: {KEY}"]),
    "length below zero": ("", ["Content-Length: -1", f"X-Api-Key: {KEY}"]),
    "two lengths": ("", ["Content-Length: 1", "Content-Length: 2", f"X-Api-Key: {KEY}"]),
    "a long path": ("/" + "x" * 50_000, [f"X-Api-Key: {KEY}"]),
}


@over_sockets
async def test_malformed_heads_are_refused(
    address: Address, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agents.front.ASK_SECONDS", 0.05)
    # Until then an unknown session may be one of a front that was lost.
    monkeypatch.setattr("workers.agents.front.REPEAT_SECONDS", 0.0)
    wrong = dict[str, bytes]()
    for name, (more, lines) in HEADS.items():
        places = {("GET", path + more), ("POST", path + more), ("POST", f"/sessions{more}")}
        for method, place in sorted(places):
            answer = await exchanged(address, head(place, *lines, method=method))
            allowed = (
                name in ("query of half a character", "no host")
                or "host" in name
                or "length" in name
            )
            statuses = b"24" if allowed else b"4"
            if not answer.startswith(b"HTTP/1.") or answer[9] not in statuses:
                wrong[f"{method} {place[:40]} {name}"] = answer[:60]
    assert not wrong


@over_sockets
async def test_a_long_body_without_a_key_gets_its_answer(
    address: Address, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = head(path, f"Content-Length: {2**22}", method="POST") + bytes(2**22)
    answer = await exchanged(address, request)
    assert not answer or answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 413"))
