"""The calls that a server accepted, on disk, so that a restarted server makes each once.

    runs/NAME/serve/facts.jsonl          sessions, models, samplers and deleted checkpoints
                    calls/00000012       a call: its head as a line of JSON, then its body
                    answers/00000012     its answer

A call is on disk before its client hears of it. It stays until a checkpoint of a later step holds its effect.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ballast.serve.wire import Answer


@dataclass(frozen=True)
class Call:
    """kind: its route. step: of an optimiser step the number that it has in the run, else 0. at: its time."""

    kind: str
    model_id: str
    seq_id: int
    step: int = 0
    at: float = 0.0  # seconds since the epoch


class CallLog:
    def __init__(self, folder: Path) -> None:
        self._facts = folder / "facts.jsonl"
        self._calls = folder / "calls"
        self._answers = folder / "answers"
        for directory in (self._calls, self._answers):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for torn in directory.glob("*.part"):
                torn.unlink()
        self._last = max((number for number, _ in self.calls()), default=0)
        # Times, by model.
        self.last_calls = {call.model_id: call.at for _, call in self.calls()}

    def note(self, **fact: Any) -> None:
        with self._facts.open("a") as file:
            file.write("\n" + json.dumps(fact))
            file.flush()
            os.fsync(file.fileno())

    def facts(self) -> Iterator[dict[str, Any]]:
        if self._facts.exists():
            for line in self._facts.read_text().splitlines():
                try:
                    yield json.loads(line)
                # The empty first line, or torn: its client has not heard of it.
                except ValueError:
                    continue

    def add(self, call: Call, body: bytes) -> int:
        """Return the call's number."""
        self._last += 1
        self.last_calls[call.model_id] = call.at
        _write(
            self._calls / f"{self._last:08}",
            json.dumps(asdict(call)).encode() + b"\n" + body,
        )
        return self._last

    def calls(self) -> Iterator[tuple[int, Call]]:
        """Yield calls with their numbers, in order."""
        for path in sorted(self._calls.glob("[0-9]*")):
            with path.open("rb") as file:
                yield int(path.name), Call(**json.loads(file.readline()))

    def models(self) -> list[dict[str, Any]]:
        """List models, the last that was called first."""
        names = sorted(self.last_calls, key=self.last_calls.__getitem__, reverse=True)
        times = [
            (name, {"training_run_id": name, "last_request_time": self.last_calls[name]})
            for name in names
        ]
        return [run | {"model_owner": name.partition(":")[0]} for name, run in times]

    def body(self, number: int) -> bytes:
        return (self._calls / f"{number:08}").read_bytes().partition(b"\n")[2]

    def answer(self, number: int, answer: Answer) -> None:
        _write(self._answers / f"{number:08}", b"%d" % answer.protobuf + answer.body)

    def answer_of(self, number: int) -> Answer | None:
        path = self._answers / f"{number:08}"
        if not path.exists():
            return None
        content = path.read_bytes()
        return Answer(content[1:], content[:1] == b"1")

    def forget(self, number: int) -> None:
        for folder in (self._answers, self._calls):
            (folder / f"{number:08}").unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
