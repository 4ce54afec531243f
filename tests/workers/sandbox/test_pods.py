"""Pods, by Kubernetes' own client against a stand-in for its API: what it is asked, and what is left."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from tests.workers.sandbox.contract import (
    LIMITS,
    check_commands_and_files,
    check_left_over,
)
from workers.config.sandbox import SandboxConfig
from workers.errors import ConfigError, EpisodeError
from workers.sandbox.kinds import _check_kind, check_sandbox
from workers.sandbox.owners import OWNER, own_label
from workers.sandbox.pods import NETWORK, PodSandbox, load_cluster
from workers.sandbox.protocol import SandboxError

pytest.importorskip("kubernetes")
STDIN, STDOUT, STDERR, ERROR = range(4)


class Cluster:
    """Pods by name, each with a folder, in which commands run on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, dict[str, Any]] = {}
        self.policies: list[dict[str, Any]] = []
        self.refused: set[str] = set()
        self.loses_pods = False  # at the end of a command
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(20)

    async def _serve(self) -> None:
        application = web.Application()
        pods = "/api/v1/namespaces/{namespace}/pods"
        networks = "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        application.add_routes(
            [
                web.post(pods, self.create),
                web.get(pods, self.list_pods),
                web.get(pods + "/{name}", self.read),
                web.delete(pods + "/{name}", self.delete),
                web.get(pods + "/{name}/exec", self.execute),
                web.post(networks, self.create_policy),
                web.post(
                    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self.review
                ),
            ]
        )
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def count(self) -> int:
        return len(self.pods)

    async def create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        image = pod["spec"]["containers"][0]["image"]
        pod["status"] = {
            "phase": "Failed" if image == "tests/gone" else "Pending",
            "message": "no image",
        }
        self.pods[name] = pod
        (self.folder / name).mkdir()
        return web.json_response(pod, status=201)

    async def list_pods(self, request: web.Request) -> web.Response:
        key = request.query["labelSelector"]
        pods = [pod for pod in self.pods.values() if key in pod["metadata"]["labels"]]
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}
        )

    def missing(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(
            {"message": f'pods "{name}" not found', "code": 404}, status=404
        )

    async def read(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return self.missing(request)
        answer = json.dumps(pod)
        if pod["status"]["phase"] == "Pending":
            pod["status"] = {"phase": "Running"}
        return web.Response(text=answer, content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(request.match_info["name"], None)
        return self.missing(request) if pod is None else web.json_response(pod)

    async def create_policy(self, request: web.Request) -> web.Response:
        if self.policies:
            return web.json_response({"message": "already exists", "code": 409}, status=409)
        self.policies.append(await request.json())
        return web.json_response(self.policies[0], status=201)

    async def review(self, request: web.Request) -> web.Response:
        review = await request.json()
        attributes = review["spec"]["resourceAttributes"]
        right = f"{attributes['verb']} {attributes['resource']} {attributes['subresource']}".strip()
        review["status"] = {"allowed": right not in self.refused}
        return web.json_response(review, status=201)

    async def execute(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self.pods:
            return self.missing(request)
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self.folder / name,
        )
        assert process.stdin and process.stdout

        async def receive() -> None:
            async for message in socket:
                if message.type == WSMsgType.BINARY and message.data[0] == STDIN:
                    process.stdin.write(message.data[1:])  # type: ignore[union-attr]

        receiver = asyncio.create_task(receive())
        while part := await process.stdout.read(65_536):
            await socket.send_bytes(bytes([STDOUT]) + part)
        code = await process.wait()
        receiver.cancel()
        if self.loses_pods:
            self.pods.clear()
        if name in self.pods:
            await socket.send_bytes(bytes([ERROR]) + json.dumps(status_of(code)).encode())
        await socket.close()
        return socket


def status_of(code: int) -> dict[str, Any]:
    if code == 0:
        return {"status": "Success"}
    message = str(128 - code if code < 0 else code)
    return {
        "status": "Failure",
        "details": {"causes": [{"reason": "ExitCode", "message": message}]},
    }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    file = tmp_path / "kubeconfig"
    server = {"server": f"http://127.0.0.1:{cluster.port}"}
    context = {"cluster": "tests", "user": "me", "namespace": "rl"}
    named = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": server}],
        "contexts": [{"name": "tests", "context": context}],
        "users": [{"name": "me", "user": {}}],
    }
    file.write_text(json.dumps(named))
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file)
    )
    monkeypatch.setattr("workers.sandbox.pods.POLL_SECONDS", 0.01)
    for cached in (load_cluster, _check_kind):
        cached.cache_clear()
    yield cluster
    cluster.stop()
    for cached in (load_cluster, _check_kind):
        cached.cache_clear()


def make_box(image: str = "tests/image") -> PodSandbox:
    return PodSandbox(LIMITS, own_label("7"), image=image)


def test_commands_and_files(cluster: Cluster) -> None:
    check_commands_and_files(make_box, cluster.count)


def test_a_pod_has_limits_and_no_network(cluster: Cluster) -> None:
    with make_box():
        (pod,) = cluster.pods.values()
        (container,) = pod["spec"]["containers"]
        amounts = {"cpu": "1000m", "memory": "2048Mi", "ephemeral-storage": "2048Mi"}
        assert container["resources"] == {"limits": amounts, "requests": amounts}
        assert pod["spec"]["activeDeadlineSeconds"] == 86_400
        assert pod["spec"]["automountServiceAccountToken"] is False
        (policy,) = cluster.policies
        assert policy["spec"] == {
            "podSelector": {"matchLabels": {NETWORK: "off"}},
            "policyTypes": ["Ingress", "Egress"],
        }
        assert pod["metadata"]["labels"][NETWORK] == "off"


def test_a_lost_pod_fails_its_sample(cluster: Cluster) -> None:
    with make_box() as box:
        name = next(iter(cluster.pods))
        cluster.loses_pods = True
        with pytest.raises(EpisodeError, match="the connection was cut"):
            box.run("true")
        with pytest.raises(EpisodeError, match=f"404|{name}"):
            box.run("true")
    with pytest.raises(SandboxError, match="no image"), make_box("tests/gone"):
        pass
    assert not cluster.pods


def test_the_next_start_removes_what_a_killed_owner_left(cluster: Cluster) -> None:
    foreign = {"metadata": {"name": "foreign", "labels": {OWNER: "elsewhere_1_2"}}}
    check_left_over(
        "kubernetes:tests/image",
        make_box,
        cluster.count,
        lambda: cluster.pods.update(foreign=foreign),
    )


def test_a_missing_right_image_or_cluster_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SandboxConfig(kind="kubernetes:tests/image")
    check_sandbox(settings)
    with pytest.raises(ConfigError, match="podPidsLimit"):
        check_sandbox(SandboxConfig(kind="kubernetes:tests/image", processes=8))
    with pytest.raises(ConfigError, match="names no image"):
        check_sandbox(SandboxConfig(kind="kubernetes"))
    cluster.refused.add("create pods exec")
    _check_kind.cache_clear()
    with pytest.raises(ConfigError, match="may not create pods exec in namespace rl"):
        check_sandbox(settings)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere"
    )
    load_cluster.cache_clear()
    with pytest.raises(ConfigError, match="no cluster is configured"):
        check_sandbox(settings)
