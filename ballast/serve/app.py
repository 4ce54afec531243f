"""HTTP of a `Service`: routes of Tinker's API, for clients with its key."""

import asyncio
import hmac
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import zstandard
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from ballast.serve import wire
from ballast.serve.service import Service
from ballast.serve.wire import RefusedError

MOST_BYTES = 64 * 2**20  # of a body, compressed or not. The SDK sends some 5 MB at once
BODY_SECONDS = 300.0  # for a client to send a body
API = "/api/v1"
MOST = 2**31  # in place of a limit: clients that give none want all
PROTOBUF = "application/x-protobuf"
CALLS = (
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
)


async def body_of(request: Request) -> bytes:
    """Return the body, decompressed. Raises RefusedError above MOST_BYTES, before more of it is in memory."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                _check_size(len(body))
    except TimeoutError:
        raise RefusedError(
            f"body: it did not arrive within {BODY_SECONDS:g} s. Send it again.", 408
        ) from None
    if request.headers.get("content-encoding", "").lower() != "zstd":
        return bytes(body)
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(
            io.BytesIO(body)
        ) as reader:
            content: bytes = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise RefusedError(f"body: not zstd ({error}). Send it again.") from None
    _check_size(len(content))
    return content


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise RefusedError(
            f"body: above {MOST_BYTES // 2**20} MiB. Send fewer rows in a call.", 413
        )


Body = Annotated[bytes, Depends(body_of)]
Count = Annotated[int, Query(ge=0)]


async def json_of(body: Body) -> dict[str, Any]:
    return wire.read_json(body)


Json = Annotated[dict[str, Any], Depends(json_of)]


def make_app(service: Service, key: str) -> FastAPI:
    @asynccontextmanager
    async def restored(app: FastAPI) -> AsyncIterator[None]:
        service.restore()
        yield

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=restored)
    _guard(app, key)
    _add_sessions(app, service)
    _add_facts(app, service)
    _add_checkpoints(app, service)
    for kind in CALLS:
        app.add_api_route(f"{API}/{kind}", _call(service, kind), methods=["POST"])

    @app.post(f"{API}/asample")
    async def sample(request: Json) -> dict[str, Any]:
        return service.samplers.sample(request)

    @app.post(f"{API}/retrieve_future")
    async def retrieve(request: Json) -> Response:
        name = wire.text(request, "request_id")
        answer = await service.answer(name)
        if answer is None:
            pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(pending, status_code=408)
        return Response(
            answer.body, media_type=PROTOBUF if answer.protobuf else "application/json"
        )

    return app


def _guard(app: FastAPI, key: str) -> None:
    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        client_key = request.headers.get("x-api-key", "") or request.headers.get(
            "authorization", ""
        ).removeprefix("Bearer ")
        if not hmac.compare_digest(client_key.encode(), key.encode()):
            return JSONResponse(
                {"detail": "X-API-Key: not the server's key. Set TINKER_API_KEY."},
                status_code=401,
            )
        return await call_next(request)

    @app.exception_handler(RefusedError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def refuse(request: Request, error: Exception) -> Response:
        # Not request.url, which a malformed Host header makes raise.
        query = request.scope["query_string"].decode("latin-1")
        call = f"{request.method} {request.scope['path']}{query and '?'}{query}"
        unknown = f"{call:.200}: not supported. docs/serve.md says what is."
        detail = str(error) if isinstance(error, RefusedError) else unknown
        return JSONResponse({"detail": detail}, status_code=getattr(error, "status", 404))


def _call(service: Service, kind: str) -> Callable[[bytes], Awaitable[dict[str, str]]]:
    async def call(body: Body) -> dict[str, str]:
        return await service.submit(kind, body)

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
    async def heartbeat(request: Json) -> dict[str, str]:
        service.heard(wire.text(request, "session_id"))
        return {"type": "session_heartbeat"}

    @app.post(f"{API}/sessions/{{name}}/finish")
    async def finish(name: str) -> dict[str, Any]:
        service.end_session(name)
        return {}

    @app.post(f"{API}/create_sampling_session")
    async def create_sampler(request: Json) -> dict[str, str]:
        return {
            "sampling_session_id": service.create_sampler(request),
            "type": "create_sampling_session",
        }


def _add_facts(app: FastAPI, service: Service) -> None:
    model = service.config.model.path
    able = {
        "trainable": True,
        "sampleable": True,
        "max_context_length": service.config.max_model_tokens,
    }
    for method, path, content in (
        ("GET", "healthz", {"status": "ok"}),
        (
            "POST",
            "client/config",
            {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False},
        ),
        ("POST", "client/dynamic_config", {}),
        ("POST", "telemetry", {"status": "accepted"}),
        (
            "GET",
            "get_server_capabilities",
            {"supported_models": [{"model_name": model} | able]},
        ),
    ):
        app.add_api_route(f"{API}/{path}", _always(**content), methods=[method])

    @app.post(f"{API}/get_info")
    async def info(request: Json) -> dict[str, Any]:
        data = {"arch": "", "model_name": model, "tokenizer_id": service.base_model}
        about = {
            "type": "get_info",
            "model_id": wire.text(request, "model_id"),
            "model_name": model,
        }
        return about | service.lora | {"model_data": data}

    @app.post(f"{API}/weights_info")
    async def weights_info(request: Json) -> dict[str, Any]:
        service.checkpoints.state(wire.text(request, "tinker_path"))
        rank = service.lora["lora_rank"] or 32  # the SDK takes nothing else
        return {"base_model": model, "is_lora": True, "lora_rank": rank}

    @app.get(f"{API}/samplers/{{name}}")
    async def sampler(name: str) -> dict[str, Any]:
        service.samplers.check(name)
        return {"sampler_id": name, "base_model": model, "model_path": None}


def _add_checkpoints(app: FastAPI, service: Service) -> None:
    runs = f"{API}/training_runs"

    @app.get(f"{API}/checkpoints")
    @app.get(f"{runs}/{{model}}/checkpoints")
    async def checkpoints(
        model: str = "", limit: Count = MOST, offset: Count = 0
    ) -> dict[str, Any]:
        return _page("checkpoints", service.checkpoints.all(model), limit, offset)

    @app.get(runs)
    async def training_runs(limit: Count = MOST, offset: Count = 0) -> dict[str, Any]:
        return _page("training_runs", service.training_runs(), limit, offset)

    @app.get(f"{runs}/{{model}}")
    async def training_run(model: str) -> dict[str, Any]:
        if matches := [
            run for run in service.training_runs() if run["training_run_id"] == model
        ]:
            return matches[0]
        raise RefusedError(
            f"training_run_id={model!r:.80}: unknown. Use a model's id.", 404
        )

    app.add_api_route(
        f"{runs}/{{model}}/checkpoints/{{kind}}/{{name}}",
        service.delete,
        methods=["DELETE"],
    )


def _page(name: str, entries: list[Any], limit: int, offset: int) -> dict[str, Any]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return {name: entries[offset : offset + limit], "cursor": cursor}
