"""A service over a stand-in run, which a kill replaces by another, and calls of its clients."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ballast.serve import service as serving
from ballast.serve.log import CallLog
from ballast.serve.service import Service
from ballast.serve.wire import RefusedError
from tests.ballast.serve.messages import adam, body, datum, passes
from tests.ballast.serve.tiny_run import TinyRun

SEVERAL = ("model.lora.rank=8", "model.lora.policies=2")


class Server:
    """A service over a run in a folder, which a kill replaces by another."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self._folder, self._overrides = folder, overrides
        self.stopped: list[BaseException] = []
        self.start()

    def start(self, *, paused: bool = False) -> None:
        self.run = TinyRun(self._folder, *self._overrides)
        self.run.paused = paused
        self.service = Service(
            self.run, CallLog(self._folder / "serve"), self.stopped.append
        )
        self.service.restore()

    async def submit(self, *calls: tuple[str, bytes]) -> dict[str, str]:
        """Submit calls one after another, and return the future of the last."""
        future: dict[str, str] = {}
        for call in calls:
            future = await self.service.submit(*call)
        return future

    async def answer(self, future: dict[str, str]) -> Any:
        answer = await self.service.answer(future["request_id"])
        return answer and (answer.body if answer.protobuf else json.loads(answer.body))

    async def result(self, *calls: tuple[str, bytes]) -> Any:
        """Submit calls one after another, and return the answer of the last."""
        return await self.answer(await self.submit(*calls))

    def sample(self, sampler: str, seq_id: int, **changes: Any) -> dict[str, Any]:
        """Ask for samples, and return their future."""
        prompt = {"chunks": [{"tokens": [1, 2, 3]}]}
        request = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": prompt,
            "sampling_params": {},
        }
        return self.service.samplers.sample(request | changes)

    def base_sampler(self, session_id: str) -> str:
        request = {"session_id": session_id, "base_model": "tiny"}
        return self.service.create_sampler(request)


def session(server: Server) -> str:
    return server.service.create_session()


async def model(server: Server, of: str, number: int = 0, **asked: Any) -> str:
    content = {"session_id": of, "model_seq_id": number, "base_model": "tiny"} | asked
    name = (await server.service.submit("create_model", body(**content)))["model_id"]
    server.run.work()
    return name


def learn(model_id: str, seq_id: int, weight: float = 1.0) -> tuple[str, bytes]:
    message = passes([datum([1, 2], weights=[weight])], model_id=model_id, seq_id=seq_id)
    return "forward_backward", message.SerializeToString()


def look(model_id: str, seq_id: int) -> tuple[str, bytes]:
    return "forward_backward", passes(
        [datum([1, 2])], model_id=model_id, seq_id=seq_id, forward=True
    ).SerializeToString()


def step(model_id: str, seq_id: int, learning_rate: float = 0.1) -> tuple[str, bytes]:
    return "optim_step", body(
        model_id=model_id, seq_id=seq_id, adam_params=adam(learning_rate=learning_rate)
    )


def publish(model_id: str, seq_id: int, **changes: str) -> tuple[str, bytes]:
    content = {"model_id": model_id, "seq_id": seq_id, "path": None} | changes
    return "save_weights_for_sampler", body(**content)


def save(model_id: str, seq_id: int, name: str = "") -> tuple[str, bytes]:
    path = name or f"at-{seq_id}"
    return "save_weights", body(model_id=model_id, seq_id=seq_id, path=path)


def restore(model_id: str, seq_id: int, path: str) -> tuple[str, bytes]:
    return "load_weights", body(model_id=model_id, seq_id=seq_id, path=path, optimizer=True)


async def delete(server: Server, path: str) -> None:
    _, _, model, kind, name = path.split("/", 4)
    await server.service.delete(model, kind, name)


async def is_deleted(server: Server, path: str, *, killed: bool) -> bool:
    """Delete a state as a client does that asks again. killed: when the log has it, and the folder is still
    there.
    """
    if killed:
        with (
            pytest.MonkeyPatch.context() as patch,
            suppress(RefusedError, InterruptedError),
        ):
            patch.setattr(serving, "remove", raising(InterruptedError()))
            await delete(server, path)
        server.start()
    try:
        await delete(server, path)
    except RefusedError:
        return False
    return True


def listed(server: Server) -> list[str]:
    return [each["tinker_path"] for each in server.service.checkpoints.all()]


def with_settings(*overrides: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        def run(tmp_path: Path) -> None:
            async def inside() -> None:
                await test(Server(tmp_path, *overrides))

            asyncio.run(inside())

        run.__name__ = test.__name__
        return run

    return decorate


running = with_settings()


async def drawn(server: Server, sampler: str, seq_id: int) -> bytes:
    samples = await server.answer(server.sample(sampler, seq_id, prompt_logprobs=True))
    assert isinstance(samples, bytes)
    return samples


def raising(error: Exception) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        raise error

    return call
