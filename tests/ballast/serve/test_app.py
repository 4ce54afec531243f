"""What the server takes from the network: its key, bodies within their limit, and nothing but its routes."""

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from fastapi.testclient import TestClient
from tinker import types

from ballast.serve import __main__ as serve
from ballast.serve import app as serving
from ballast.serve.log import CallLog
from ballast.serve.service import Service
from ballast.serve.wire import RefusedError
from controller.config import load
from tests.ballast.serve.messages import adam, datum, passes
from tests.ballast.serve.tiny_run import SETTINGS, TinyRun
from tests.refusals import refused
from workers.errors import ConfigError

KEY = "tml-0123"
API = "/api/v1"


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return TinyRun(tmp_path)


@pytest.fixture
def client(run: TinyRun) -> Iterator[TestClient]:
    service = Service(run, CallLog(run.folder / "serve"), lambda error: None)
    with TestClient(serving.make_app(service, KEY), headers={"X-API-Key": KEY}) as client:
        yield client


def create(client: TestClient) -> str:
    session = client.post(f"{API}/create_session", json={}).json()["session_id"]
    asked = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 32},
    }
    model: str = client.post(f"{API}/create_model", json=asked).json()["model_id"]
    return model


def answer(client: TestClient, response: Any) -> Any:
    assert response.status_code == 200, response.text
    return client.post(
        f"{API}/retrieve_future", json={"request_id": response.json()["request_id"]}
    )


def test_every_route_needs_the_key(client: TestClient) -> None:
    routes = [
        (method, route.path)
        for route in client.app.routes
        for method in route.methods - {("HEAD")}
    ]  # type: ignore[attr-defined]
    assert len(routes) > 15
    for key in (
        {},
        {"X-API-Key": "tml-012"},
        {"X-API-Key": "tml-\xe9".encode("latin-1")},
        {"Authorization": "Bearer x"},
    ):
        bare = TestClient(client.app, headers=key)
        for method, path in [
            *routes,
            ("GET", "/docs"),
            ("GET", "/openapi.json"),
            ("GET", "/"),
        ]:
            response = bare.request(method, re.sub("{.*?}", "x", path))
            assert response.status_code == 401 and KEY not in response.text, path
    assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404


def test_a_bomb_and_a_long_body_are_refused_before_they_are_in_memory(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_BYTES", 2**20)
    bomb = zstandard.compress(bytes(2**28))
    assert len(bomb) < 2**15
    path, headers = f"{API}/forward_backward", {"Content-Encoding": "zstd"}
    assert client.post(path, content=bomb, headers=headers).status_code == 413
    assert client.post(path, content=bytes(2**20 + 1)).status_code == 413
    assert client.post(path, content=(bytes(2**18) for _ in range(5))).status_code == 413
    assert client.post(path, content=b"no zstd", headers=headers).status_code == 400


def test_bodies_come_plain_or_compressed(client: TestClient) -> None:
    model, path = create(client), f"{API}/forward_backward"
    for number, headers in enumerate(({}, {"Content-Encoding": "zstd"}), start=1):
        body = passes([datum([1, 2, 3])], model_id=model, seq_id=number).SerializeToString()
        found = answer(
            client,
            client.post(
                path, content=zstandard.compress(body) if headers else body, headers=headers
            ),
        )
        assert found.headers["content-type"] == serving.PROTOBUF
    stepped = client.post(
        f"{API}/optim_step", json={"model_id": model, "seq_id": 3, "adam_params": adam()}
    )
    assert answer(client, stepped).json() == {"metrics": {"grad_norm": 4.0}}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\x80\x04\x95", b'{"model_id": 3}', b"[" * 10**5, b'{"seq_id": 1e400}'],
)
def test_other_bodies_are_answered_with_a_sentence(
    client: TestClient, content: bytes
) -> None:
    create(client)
    for route in client.app.routes:  # type: ignore[attr-defined]
        path = route.path
        if "POST" in route.methods and path.rpartition("/")[2] not in (
            *("config", "dynamic_config", "telemetry", "create_session", "finish"),
        ):
            response = client.post(path, content=content)
            assert response.status_code in (400, 404) and response.json()[
                "detail"
            ].endswith("."), path


def test_names_of_futures_reach_no_file(client: TestClient) -> None:
    for name in ("../facts", "call-../1", "call-99", "call-", "sample-x", "call-٣"):
        response = client.post(f"{API}/retrieve_future", json={"request_id": name})
        assert response.status_code == 410, name


def test_a_pending_future_is_asked_for_again(
    client: TestClient, run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ballast.serve.service.POLL_SECONDS", 0.01)
    model = create(client)
    run.paused = True
    stepped = client.post(
        f"{API}/optim_step", json={"model_id": model, "seq_id": 1, "adam_params": adam()}
    )
    pending = answer(client, stepped)
    assert (pending.status_code, pending.json()["type"]) == (408, "try_again")


def test_checkpoints_are_listed_in_pages_and_deleted(
    client: TestClient, run: TinyRun
) -> None:
    models = [create(client)]
    for number in (1, 2, 3):
        asked = {"model_id": models[0], "seq_id": number, "path": f"at-{number}"}
        answer(client, client.post(f"{API}/save_weights", json=asked))
    asked = {"model_id": models[0], "seq_id": 4, "path": "sampled"}
    answer(client, client.post(f"{API}/save_weights_for_sampler", json=asked))
    client.post(f"{API}/sessions/{models[0].partition(':')[0]}/finish")
    models.insert(0, create(client))
    runs = types.TrainingRunsResponse.model_validate(
        client.get(f"{API}/training_runs").json()
    )
    assert [each.training_run_id for each in runs.training_runs] == models
    assert (runs.cursor.total_count, runs.training_runs[0].is_lora) == (2, False)
    one = types.TrainingRun.model_validate(
        client.get(f"{API}/training_runs/{models[1]}").json()
    )
    assert one == runs.training_runs[1] and one.base_model == "tiny"
    assert abs(one.last_request_time.timestamp() - time.time()) < 600

    def listed(path: str = "checkpoints", **asked: int) -> types.CheckpointsListResponse:
        return types.CheckpointsListResponse.model_validate(
            client.get(f"{API}/{path}", params=asked).json()
        )

    found = listed(f"training_runs/{models[1]}/checkpoints").checkpoints
    assert [each.checkpoint_id for each in found] == [
        "sampler_weights/sampled",
        *(f"weights/at-{n}" for n in (3, 2, 1)),
    ]
    assert listed(f"training_runs/{models[0]}/checkpoints").checkpoints == []
    assert (
        listed(limit=3).checkpoints + listed(limit=3, offset=3).checkpoints
        == found
        == listed().checkpoints
    )
    assert listed(offset=9).cursor == types.Cursor(offset=9, limit=2**31, total_count=4)
    for each in found[1:3] + found[:1]:
        path = f"{API}/training_runs/{models[1]}/checkpoints/{each.checkpoint_id}"
        assert [client.delete(path).status_code for _ in range(2)] == [200, 200]
    assert [each.checkpoint_id for each in listed().checkpoints] == ["weights/at-1"]
    assert {path.name.rpartition(".")[2] for path in run.folder.glob("states/*")} == {
        "at-1",
        "initial",
    }


@pytest.mark.parametrize(
    "asked",
    [
        *(
            "GET checkpoints?limit=x",
            "GET checkpoints?offset=-1",
            "GET training_runs/x",
            "POST copy_weights",
        ),
        *(
            "DELETE training_runs/x/checkpoints/weights/x",
            "DELETE training_runs/x/checkpoints/..%2f../initial",
        ),
        *(
            "DELETE training_runs/x/checkpoints/weights/x/publish",
            "PUT training_runs/x/checkpoints/weights/x/ttl",
        ),
        *("POST training_runs/x/checkpoints/weights/x/publish", "GET asample"),
    ],
)
def test_what_is_not_served_is_said_in_a_sentence(client: TestClient, asked: str) -> None:
    method, path = asked.split()
    response = client.request(method, f"{API}/{path}")
    assert response.status_code == 404 and response.json()["detail"].endswith("."), (
        response.text
    )


def test_a_fresh_key_is_only_in_a_file_of_its_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = serve._fresh_key(tmp_path)
    assert re.fullmatch("tml-[0-9a-f]{64}", key) and key == serve._fresh_key(tmp_path)
    assert (tmp_path / "api-key").stat().st_mode & 0o777 == 0o600
    assert key not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"tml-", b"short", b"tml-\xff", b"tml-a\nb", "tml-é".encode()]
)
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    for path in (tmp_path / "api-key", tmp_path / "given"):
        path.write_bytes(content)
    with refused(str(tmp_path / "api-key")):
        serve._fresh_key(tmp_path)
    with pytest.raises(ConfigError):
        serve._given_key(tmp_path / "given")


def test_a_kill_while_the_key_is_written_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        serve._fresh_key(tmp_path)
    assert not (tmp_path / "api-key").exists()
    monkeypatch.undo()
    assert re.fullmatch("tml-[0-9a-f]{64}", serve._fresh_key(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["api-key"]


def test_a_body_that_does_not_come_is_given_up(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.01)

    class Slow:
        def stream(self) -> Any:
            async def parts() -> Any:
                yield b"{"
                await asyncio.sleep(60)

            return parts()

    with pytest.raises(RefusedError) as caught:
        asyncio.run(serving.body_of(Slow()))  # type: ignore[arg-type]
    assert caught.value.status == 408


def test_keys_of_users_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in serve.KEYS:
        monkeypatch.delenv(name, raising=False)
    assert serve._given_key(None) == ""
    monkeypatch.setenv("TINKER_API_KEY", "tml-environment")
    assert serve._given_key(None) == "tml-environment"
    (tmp_path / "key").write_text("tml-file\n")
    assert serve._given_key(tmp_path / "key") == "tml-file"
    (tmp_path / "key").write_text("short")
    for wrong in ("key", "missing"):
        with refused("API key" if wrong == "key" else "--api-key-file"):
            serve._given_key(tmp_path / wrong)


def test_settings_that_clients_cannot_have_are_refused_and_rewards_left_out() -> None:
    found = serve.server_settings(
        load([], [*SETTINGS, "data.train=x.jsonl", "reward.function=a.py:f"])
    )
    assert not found.has_data and not found.rewarded and found.run.resume == "auto"
    for named, override in (
        ("policy.optimizer.name", "sgd"),
        ("rollout", "a.py:f"),
    ):
        key = "rollout.agent" if named == "rollout" else named
        with refused(named, ConfigError):
            serve.server_settings(load([], [*SETTINGS, *f"{key}={override}".split()]))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        serve, "find_spec", lambda name: None if name == "tinker" else object()
    )
    with refused("tinker"):
        serve._prepare(["--config", "x.yaml"])


def test_a_port_in_use_and_refused_settings_end_the_command_before_it_starts(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for wrong in (port, "70000"):
            with refused(f"--port={wrong}", ConfigError):
                serve._prepare(["--port", wrong, *SETTINGS])
    with refused("model.path", ConfigError):
        serve._prepare(["--port", "0", *SETTINGS, f"model.path={tmp_path / 'missing'}"])
    with refused("model.lora.policies=2", ConfigError):
        serve._prepare(["--port", "0", *SETTINGS, "model.lora.policies=2"])
