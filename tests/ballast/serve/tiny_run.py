"""A stand-in for OpenRun: policies of one weight each, with real checkpoints, whose calls wait
until `work`.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from controller.config import Config, load
from controller.primitives import SampledSequence
from workers.model.checkpoint.checkpoint_folder import (
    Manifest,
    commit,
    complete,
    prune,
    unfinished_folder,
)

SETTINGS = [
    "model.path=tiny",
    "data.max_prompt_tokens=24",
    "rollout.sampling.max_new_tokens=8",
]


@cache
def _config(overrides: tuple[str, ...]) -> Config:
    return load([], [*SETTINGS, *overrides])


@dataclass
class Found:
    """Of a pass, or of samples."""

    log_probs: list[np.ndarray]
    metrics: dict[str, float]
    sequences: list[SampledSequence]


class TinyRun:
    vocabulary = 32

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config, self.folder = deepcopy(_config(overrides)), folder
        self.weights, self.gradients, self.steps = {"": 0.0}, dict[str, float](), 0
        self.served, self.version = dict[str, dict[int, float]](), 0
        self.paused, self.made = False, list[str]()
        self._queue = deque[tuple[Future[Any], Callable[[], Any]]]()
        if found := complete(folder / "checkpoints" / "policy"):
            self.steps, self.weights = found[-1][1].step, found[-1][1].extra
        self.served[""] = {0: self.weights.get("", 0.0)}

    @property
    def weight(self) -> float:
        """Of the only policy, or of the one that a server takes first."""
        return self.weights.get("policy-1", self.weights[""])

    def newest(self, adapter: str = "") -> float:
        """Return the weight that is served."""
        return self.served[adapter][max(self.served[adapter])]

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

    def _pass(self, rows: Any, slope: float, adapter: str) -> Found:
        weight = self.weights.get(adapter, 0.0)
        log_probs = [
            np.where(row["loss_mask"], weight - row["input_ids"], 0).astype(np.float32)
            for row in rows
        ]
        slope *= sum(
            float(row.get("weights", row.get("advantages", np.ones(1))).sum())
            for row in rows
        )
        self.gradients[adapter] = self.gradients.get(adapter, 0.0) + slope
        return Found(log_probs, {"loss": self.gradients[adapter]}, [])

    def forward(self, rows: Any, role: str = "policy", *, adapter: str) -> Future[Any]:
        assert role == (
            "policy" if adapter or self.config.model.lora.policies == 1 else "reference"
        )
        return self._later("forward", lambda: self._pass(rows, 0.0, adapter))

    def forward_backward(self, rows: Any, loss: Any, *, adapter: str) -> Future[Any]:
        return self._later("forward_backward", lambda: self._pass(rows, 1.0, adapter))

    def step(self, learning_rate: float, *, adapter: str, **settings: float) -> Future[Any]:
        return self._later("step", lambda: self._step(learning_rate, adapter))

    def _step(self, learning_rate: float, adapter: str) -> dict[str, float]:
        norm, every = self.gradients.pop(adapter, 0.0), self.config.run.checkpoint_every
        self.weights = self.weights | {
            adapter: self.weights.get(adapter, 0.0) * 1.5 - learning_rate * norm
        }
        self.steps += 1
        if every and self.steps % every == 0:
            self._commit(
                self.folder / "checkpoints" / "policy" / f"step-{self.steps}", self.weights
            )
            prune(self.folder / "checkpoints" / "policy", self.config.run.keep_checkpoints)
        return {"grad_norm": norm}

    def _commit(self, path: Path, weights: dict[str, float]) -> Path:
        unfinished = unfinished_folder(path)
        unfinished.mkdir(parents=True)
        commit(unfinished, path, Manifest(self.steps, 1, {}, weights, {}))
        return path

    def publish(self, *, adapter: str) -> Future[Any]:
        def send() -> int:
            self.version += 1
            newest = self.served.setdefault(adapter, {}) | {
                self.version: self.weights.get(adapter, 0.0)
            }
            kept = self.config.model.lora.versions if adapter else 1
            self.served[adapter] = dict(list(newest.items())[-kept:])
            return self.version

        return self._later("publish", send)

    def save(self, name: str, *, adapter: str) -> Future[Any]:
        path = self.folder / "states" / name / "policy"
        return self._later(
            "save", lambda: self._commit(path, {"": self.weights.get(adapter, 0.0)})
        )

    def load(self, name: str, *, optimizer: bool, adapter: str) -> Future[Any]:
        def read() -> None:
            ((_, manifest),) = complete(self.folder / "states" / name)
            self.weights = self.weights | {adapter: manifest.extra[""]}
            self.gradients.pop(adapter, None)

        return self._later("load", read)

    def sample(
        self,
        prompts: Any,
        n: int,
        sampling: Any,
        *,
        seed: int | None,
        record: bool,
        adapter: str,
        version: int | None,
    ) -> Future[Any]:
        assert not record

        def draw() -> Found:
            weight = self.served[adapter][version or max(self.served[adapter])]
            ids, log_probs = np.array([7, 1], np.int32), np.full(2, weight, np.float32)
            one = SampledSequence(np.array(prompts[0]), ids, log_probs, "stop", 0.0, "")
            return Found([], {}, [one] * n)

        return self._later("sample", draw)
