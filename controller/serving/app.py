"""HTTP of a `Service`: routes of Tinker's API, for clients with its key."""

import hmac
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import zstandard
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from controller.serving import wire
from controller.serving.service import Service
from controller.serving.wire import RefusedError

MOST_BYTES = 64 * 2**20  # of a body, compressed or not. The SDK sends some 5 MB at once
API = "/api/v1"
PROTOBUF = "application/x-protobuf"
CALLS = ("create_model", "forward_backward", "optim_step", "save_weights", "load_weights", "save_weights_for_sampler")


async def body_of(request: Request) -> bytes:
    """Return the body, decompressed. Raises RefusedError above MOST_BYTES, before more of it is in memory."""
    body = bytearray()
    async for part in request.stream():
        body += part
        _check_size(len(body))
    if request.headers.get("content-encoding", "").lower() != "zstd":
        return bytes(body)
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(io.BytesIO(body)) as reader:
            found: bytes = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise RefusedError(f"body: not zstd ({error}). Send it again.") from None
    _check_size(len(found))
    return found


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise RefusedError(f"body: above {MOST_BYTES // 2**20} MiB. Send fewer rows in a call.", 413)


def make_app(service: Service, key: str) -> FastAPI:
    @asynccontextmanager
    async def restored(app: FastAPI) -> AsyncIterator[None]:
        service.restore()
        yield

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=restored)
    _guard(app, key)
    _add_sessions(app, service)
    _add_facts(app, service)
    for kind in CALLS:
        app.add_api_route(f"{API}/{kind}", _call(service, kind), methods=["POST"])

    @app.post(f"{API}/asample")
    async def sample(request: Request) -> dict[str, Any]:
        return service.sample(wire.read_json(await body_of(request)))

    @app.post(f"{API}/retrieve_future")
    async def retrieve(request: Request) -> Response:
        name = wire.text(wire.read_json(await body_of(request)), "request_id")
        answer = await service.answer(name)
        if answer is None:
            pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(pending, status_code=408)
        return Response(answer.body, media_type=PROTOBUF if answer.protobuf else "application/json")

    return app


def _guard(app: FastAPI, key: str) -> None:
    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("x-api-key", "") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            return JSONResponse({"detail": "X-API-Key: not the server's key. Set TINKER_API_KEY."}, status_code=401)
        return await call_next(request)

    @app.exception_handler(RefusedError)
    async def refuse(request: Request, error: RefusedError) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=error.status)


def _call(service: Service, kind: str) -> Callable[[Request], Awaitable[dict[str, str]]]:
    async def call(request: Request) -> dict[str, str]:
        return await service.submit(kind, await body_of(request))

    return call


def _always(**content: Any) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def answer() -> dict[str, Any]:
        return content

    return answer


def _add_sessions(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_session")
    async def create_session() -> dict[str, str]:
        return {"session_id": service.create_session(), "type": "create_session"}

    @app.post(f"{API}/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, str]:
        service.heard(wire.text(wire.read_json(await body_of(request)), "session_id"))
        return {"type": "session_heartbeat"}

    @app.post(f"{API}/sessions/{{name}}/finish")
    async def finish(name: str) -> dict[str, Any]:
        service.ended(name)
        return {}

    @app.post(f"{API}/create_sampling_session")
    async def create_sampler(request: Request) -> dict[str, str]:
        name = service.create_sampler(wire.read_json(await body_of(request)))
        return {"sampling_session_id": name, "type": "create_sampling_session"}


def _add_facts(app: FastAPI, service: Service) -> None:
    rank, model = service.config.model.lora.rank, service.config.model.path
    able = {"trainable": True, "sampleable": True, "max_context_length": service.config.max_model_tokens}
    for method, path, content in (
        ("GET", "healthz", {"status": "ok"}),
        ("POST", "client/config", {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False}),
        ("POST", "client/dynamic_config", {}),
        ("POST", "telemetry", {"status": "accepted"}),
        ("GET", "get_server_capabilities", {"supported_models": [{"model_name": model} | able]}),
    ):
        app.add_api_route(f"{API}/{path}", _always(**content), methods=[method])

    @app.post(f"{API}/get_info")
    async def info(request: Request) -> dict[str, Any]:
        model_id = wire.text(wire.read_json(await body_of(request)), "model_id")
        data = {"arch": "", "model_name": model, "tokenizer_id": service.base_model}
        lora = {"is_lora": bool(rank), "lora_rank": rank or None}
        return {"type": "get_info", "model_id": model_id, "model_name": model, "model_data": data} | lora

    @app.post(f"{API}/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        service.check_state(wire.text(wire.read_json(await body_of(request)), "tinker_path"))
        return {"base_model": model, "is_lora": True, "lora_rank": rank or 32}  # the SDK takes nothing else

    @app.get(f"{API}/samplers/{{name}}")
    async def sampler(name: str) -> dict[str, Any]:
        service.check_sampler(name)
        return {"sampler_id": name, "base_model": model, "model_path": None}
