"""Environments with planted defects, and a clean one. Imported by the processes that play them."""

import os
import random
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from workers.environment import Observation

LUCK = np.random.default_rng()
SHARED = Path(os.environ.get("TMPDIR", "/tmp"))


class Sums:
    """A clean environment: three attempts, told to try again after a wrong one."""

    def reset(self, record: dict[str, Any]) -> str:
        self.answer = str(record["answer"])
        self.turns = 0
        return "Write the sum."

    def step(self, response: str) -> Observation:
        self.turns += 1
        right = response.strip() == self.answer
        return Observation(
            "Wrong. Try again.", reward=float(right), done=right or self.turns == 3
        )


class TellsTheAnswer(Sums):
    def step(self, response: str) -> Observation:
        seen = super().step(response)
        return Observation(
            f"Wrong, the answer was {self.answer}.", reward=seen.reward, done=seen.done
        )


class OpensWithTheAnswer(Sums):
    def reset(self, record: dict[str, Any]) -> str:
        return super().reset(record) + f" Solution: {self.answer}"


class RaisesOnWords(Sums):
    def step(self, response: str) -> Observation:
        int(response)
        return super().step(response)


class Exits(Sums):
    def step(self, response: str) -> Observation:
        return super().step(response) if response else os._exit(3)


class Hangs(Sums):
    def step(self, response: str) -> Observation:
        while not response:
            time.sleep(1)
        return super().step(response)


class ReturnsATuple(Sums):
    def step(self, response: str) -> Any:
        return ("Wrong.", 0.0, False) if not response.isdigit() else super().step(response)


class NotFinite(Sums):
    def step(self, response: str) -> Observation:
        seen = super().step(response)
        return Observation(
            "No.", reward=seen.reward if response else float("nan"), done=seen.done
        )


class NeverDone(Sums):
    def step(self, response: str) -> Observation:
        seen = super().step(response)
        return Observation(seen.text, reward=seen.reward)


class RandomReset(Sums):
    def reset(self, record: dict[str, Any]) -> str:
        return super().reset(record) + f" Board {random.random():.6f}."


class RandomStep(Sums):
    def step(self, response: str) -> Observation:
        seen = super().step(response)
        return Observation(f"Luck {LUCK.random():.6f}", reward=seen.reward, done=seen.done)


class CountsInTheClass(Sums):
    played: ClassVar[list[int]] = []

    def reset(self, record: dict[str, Any]) -> str:
        self.played.append(1)
        return super().reset(record) + f" Episode {len(self.played)}."


class SharesAFile(Sums):
    def reset(self, record: dict[str, Any]) -> str:
        (SHARED / "certify_target").write_text(str(record["answer"]))
        return super().reset(record)

    def step(self, response: str) -> Observation:
        self.answer = (SHARED / "certify_target").read_text()
        return super().step(response)


class PaysEverything(Sums):
    def step(self, response: str) -> Observation:
        return Observation(reward=1.0, done=True)


class PaysTheEmptyTurn(Sums):
    def step(self, response: str) -> Observation:
        return Observation(reward=float(response.strip() in self.answer), done=True)


class PaysAnyNumber(Sums):
    def step(self, response: str) -> Observation:
        return Observation(reward=float(response.strip().isdigit()), done=True)


class PaysTheOpposite(Sums):
    def step(self, response: str) -> Observation:
        return Observation(reward=float(response.strip() != self.answer), done=True)


class TooLong(Sums):
    def reset(self, record: dict[str, Any]) -> str:
        return super().reset(record) + "rule " * 2000


class SeedIsNotRead(Sums):
    """Says nothing of the record's seed."""
