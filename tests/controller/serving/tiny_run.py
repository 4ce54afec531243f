"""A stand-in for OpenRun: a policy of one weight, with real checkpoints, whose calls wait until `work`."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from controller.config import load
from controller.primitives import SampledSequence
from workers.model.checkpoint.checkpoint_folder import Manifest, commit, complete, prune, unfinished_folder

SETTINGS = ["model.path=tiny", "data.max_prompt_tokens=24", "rollout.sampling.max_new_tokens=8"]


@dataclass
class Found:
    """Of a pass, or of samples."""

    log_probs: list[np.ndarray]
    metrics: dict[str, float]
    sequences: list[SampledSequence]


class TinyRun:
    vocabulary = 32

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config, self.folder = load([], [*SETTINGS, *overrides]), folder
        self.weight, self.steps, self.gradient = 0.0, 0, 0.0
        self.paused, self.made = False, list[str]()
        self._queue = deque[tuple[Future[Any], Callable[[], Any]]]()
        if found := complete(folder / "checkpoints" / "policy"):
            self.steps, self.weight = found[-1][1].step, found[-1][1].extra["weight"]
        self.served = self.weight

    def work(self, calls: int = 10**9) -> None:
        """Make waiting calls, in their order."""
        while self._queue and calls:
            future, call = self._queue.popleft()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            calls -= 1

    def _later(self, name: str, call: Callable[[], Any]) -> Future[Any]:
        def made() -> Any:
            self.made.append(name)
            return call()

        self._queue.append((future := Future[Any](), made))
        if not self.paused:
            self.work()
        return future

    def batch(self, rows: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        return rows

    def _pass(self, rows: Any, slope: float) -> Found:
        log_probs = [np.where(row["loss_mask"], self.weight - row["input_ids"], 0).astype(np.float32) for row in rows]
        self.gradient += slope * sum(float(row.get("weights", row.get("advantages", np.ones(1))).sum()) for row in rows)
        return Found(log_probs, {"loss": self.gradient}, [])

    def forward(self, rows: Any) -> Future[Any]:
        return self._later("forward", lambda: self._pass(rows, 0.0))

    def forward_backward(self, rows: Any, loss: Any) -> Future[Any]:
        return self._later("forward_backward", lambda: self._pass(rows, 1.0))

    def step(self, learning_rate: float, **settings: float) -> Future[Any]:
        return self._later("step", lambda: self._step(learning_rate))

    def _step(self, learning_rate: float) -> dict[str, float]:
        norm, every = self.gradient, self.config.run.checkpoint_every
        self.weight, self.gradient, self.steps = self.weight * 1.5 - learning_rate * norm, 0.0, self.steps + 1
        if every and self.steps % every == 0:
            self._commit(self.folder / "checkpoints" / "policy" / f"step-{self.steps}")
            prune(self.folder / "checkpoints" / "policy", self.config.run.keep_checkpoints)
        return {"grad_norm": norm}

    def _commit(self, path: Path) -> Path:
        unfinished = unfinished_folder(path)
        unfinished.mkdir(parents=True)
        commit(unfinished, path, Manifest(self.steps, 1, {}, {"weight": self.weight}, {}))
        return path

    def publish(self) -> Future[Any]:
        def send() -> None:
            self.served = self.weight

        return self._later("publish", send)

    def save(self, name: str) -> Future[Any]:
        return self._later("save", lambda: self._commit(self.folder / "states" / name / "policy"))

    def load(self, name: str, *, optimizer: bool) -> Future[Any]:
        def read() -> None:
            ((_, manifest),) = complete(self.folder / "states" / name)
            self.weight, self.gradient = manifest.extra["weight"], 0.0

        return self._later("load", read)

    def sample(self, prompts: Any, n: int, sampling: Any, *, seed: int | None, record: bool) -> Future[Any]:
        assert not record

        def draw() -> Found:
            ids, log_probs = np.array([7, 1], np.int32), np.full(2, self.served, np.float32)
            one = SampledSequence(np.array(prompts[0]), ids, log_probs, "stop", 0.0, "")
            return Found([], {}, [one] * n)

        return self._later("sample", draw)
