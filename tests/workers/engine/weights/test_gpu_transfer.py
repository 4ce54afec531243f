"""What vLLM's trainer side is told of a transfer between GPUs. `test_transfers` sends weights through it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

from workers.engine.weights import gpu_transfer
from workers.errors import LostError

METADATA = {
    "wide.weight": torch.empty(10, 4, dtype=torch.float32, device="meta"),
    "long.weight": torch.empty(50, dtype=torch.bfloat16, device="meta"),
}
LARGEST_BYTES = 10 * 4 * 4


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns what vLLM is told, in turn."""
    infos: list[Any] = []

    class TrainerSide:
        def shutdown(self) -> None: ...

    def trainer_init(info: Any, **options: Any) -> TrainerSide:
        infos.append(info)
        return TrainerSide()

    monkeypatch.setattr(
        gpu_transfer.WeightTransferTrainerFactory, "trainer_init", trainer_init
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return infos


def connect(
    placement: str, engines: int, tensor_parallel: int, buffer_bytes: int
) -> gpu_transfer.WeightSender:
    return gpu_transfer.WeightSender(
        placement,
        [object()] * engines,
        lambda: iter(()),
        METADATA,
        rank=0,
        tensor_parallel=tensor_parallel,
        address="10.0.0.1",
        port=29_500,
        buffer_bytes=buffer_bytes,
    )


@pytest.mark.parametrize(
    ("engines", "tensor_parallel", "members"), [(1, 1, 2), (3, 1, 4), (2, 4, 9)]
)
def test_a_broadcast_has_the_first_policy_rank_and_every_rank_of_engines(
    told: list[Any], engines: int, tensor_parallel: int, members: int
) -> None:
    connect("apart", engines, tensor_parallel, 64)
    assert told[0].world_size == members
    assert (told[0].rank, told[0].packed_buffer_size_bytes) == (0, 64)


@pytest.mark.parametrize(
    ("asked", "expected"), [(1, LARGEST_BYTES), (LARGEST_BYTES + 1, LARGEST_BYTES + 1)]
)
def test_a_buffer_on_shared_gpus_holds_the_largest_weight(
    told: list[Any], asked: int, expected: int
) -> None:
    connect("colocated", 1, 1, asked)
    assert told[0].packed_buffer_size_bytes == expected


METHODS = ("init_transfer", "begin_update", "receive_update", "finish_update")


class Method:
    """Ray's method of an actor, whose answer is `answer`."""

    def __init__(self, answer: BaseException | None) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> "Method":
        self.calls.append(arguments)
        return self


def engines_that_answer(
    answers: list[BaseException | None], patch: pytest.MonkeyPatch
) -> list[Any]:
    """Return handles of actors whose answers Ray has in their order."""

    def get(answered: Method) -> None:
        if answered.answer is not None:
            raise answered.answer

    def wait(refs: list[Method], **_: Any) -> tuple[list[Method], list[Method]]:
        return refs[:1], refs[1:]

    patch.setattr("ray.get", get)
    patch.setattr("ray.wait", wait)
    return [
        SimpleNamespace(**{method: Method(answer) for method in METHODS})
        for answer in answers
    ]


@pytest.mark.parametrize(("together", "lost"), [(False, {1, 3}), (True, {1})])
def test_the_loss_of_a_replica_ends_the_wait_for_others_only_in_a_broadcast(
    together: bool, lost: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [None, ActorDiedError(), None, ActorDiedError()]
    engines = engines_that_answer(answers, monkeypatch)
    arguments = [(position,) for position in range(4)]
    options = {"together": together}
    assert gpu_transfer.call_replicas(engines, "begin_update", arguments, **options) == lost
    calls = [engine.begin_update.calls for engine in engines]
    assert calls == [[argument] for argument in arguments]


def test_replicas_join_after_all_ranks_of_those_before_them_and_hear_each_part_of_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = engines_that_answer([None] * 3, monkeypatch)
    client = gpu_transfer.EngineClient(engines, tensor_parallel=4, together=True)
    client.init_weight_transfer_engine({"rank_offset": 1, "port": 5})
    client.version = 4
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    for engine, rank in zip(engines, (1, 5, 9), strict=True):
        assert [getattr(engine, method).calls for method in METHODS] == [
            [({"rank_offset": rank, "port": 5},)],
            [()],
            [({"names": ["a"]},)],
            [(4,)],
        ]
    (engine,) = engines_that_answer([ActorDiedError()], monkeypatch)
    client = gpu_transfer.EngineClient([engine], tensor_parallel=4, together=False)
    with pytest.raises(LostError, match=r"engines \[0\]"):
        client.init_weight_transfer_engine({"port": 5})
    assert engine.init_transfer.calls == [({"port": 5},)]


def test_weights_are_gathered_on_one_stream_and_held_for_the_one_that_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, str, str]] = []
    streams = []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            events.append(("wait", self, other))

    class Weight(str):
        def record_stream(self, reader: str) -> None:
            events.append(("hold", self, reader))

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def weights() -> Iterator[Any]:
        for name in ("a", "b"):
            events.append(("gather", name, streams[-1]))
            yield name, Weight(name)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    streams.append(Stream("computation"))
    gathered = iter(gpu_transfer.GatheredWeights(weights, {}))
    for name, reader in (("a", "first"), ("b", "second")):
        with enter(Stream(reader)):
            assert next(gathered) == (name, name)
        expected = [("gather", name, "computation"), ("wait", reader, "computation")]
        assert events[-3:] == [*expected, ("hold", name, reader)]
    assert next(gathered, None) is None
