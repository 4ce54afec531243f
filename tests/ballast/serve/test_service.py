"""Calls are made in order, each once, whatever is sent again, of a stand-in run."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ballast.serve import service as serving
from ballast.serve.wire import RefusedError
from tests.ballast.serve.messages import adam, body, datum, passes
from tests.ballast.serve.server import (
    SEVERAL,
    Server,
    drawn,
    learn,
    model,
    publish,
    raising,
    restore,
    running,
    save,
    session,
    step,
    with_settings,
)
from tests.refusals import refused
from workers.errors import LostError


@running
async def test_calls_wait_for_their_predecessors(server: Server) -> None:
    name = await model(server, session(server))
    late = [
        asyncio.ensure_future(server.submit(call))
        for call in (step(name, 3), learn(name, 2))
    ]
    await asyncio.sleep(0.01)
    assert server.run.made == ["save"] and not any(task.done() for task in late)
    await server.submit(learn(name, 1, 2.0))
    await asyncio.gather(*late)
    assert server.run.made[1:] == ["forward_backward", "forward_backward", "step"]
    assert server.run.weight == pytest.approx(-0.3)


@running
async def test_a_call_that_is_sent_again_is_made_once(server: Server) -> None:
    name = await model(server, session(server))
    calls = [learn(name, 1), step(name, 2), step(name, 2), learn(name, 1)]
    futures = await asyncio.gather(*(server.submit(call) for call in calls))
    assert futures[0] == futures[3] and futures[1] == futures[2]
    assert server.run.made == ["save", "forward_backward", "step"]
    assert [await server.answer(futures[1]) for _ in range(2)] == [
        {"metrics": {"grad_norm": 1.0}}
    ] * 2


@running
async def test_a_refused_call_has_had_its_turn(server: Server) -> None:
    name = await model(server, session(server))
    wrong = "forward_backward", passes([], model_id=name, seq_id=1).SerializeToString()
    for _ in range(2):
        with pytest.raises(RefusedError):
            await server.submit(wrong)
    await server.submit(step(name, 2))
    assert server.run.steps == 1


@running
async def test_a_call_without_a_number_or_a_model_is_refused(server: Server) -> None:
    name = await model(server, session(server))
    unnumbered = passes([datum([1, 2])], model_id=name).SerializeToString()
    with_session = body(session_id="s", model_seq_id=0, seq_id=1, adam_params=adam())
    for call in (
        step(name, 0),
        step("s:train:0", 0),
        ("forward_backward", unnumbered),
        ("optim_step", with_session),
    ):
        with pytest.raises(RefusedError):
            await server.submit(call)
    assert server.run.made == ["save"]


async def _without_predecessor(server: Server) -> None:
    name = await model(server, session(server))
    with refused("seq_id=5", RefusedError):
        await server.submit(step(name, 5))
    await server.submit(step(name, 6))
    assert server.run.steps == 1


def test_a_predecessor_that_never_comes_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TURN_SECONDS", 0.01)
    running(_without_predecessor)(tmp_path)


@running
async def test_an_error_of_a_call_is_its_answer_and_a_lost_worker_ends_the_server(
    server: Server,
) -> None:
    name = await model(server, session(server))
    server.run.forward_backward = lambda rows, loss, adapter: server.run._later(
        "fb", raising(ValueError("too long"))
    )
    assert await server.result(learn(name, 1)) == {
        "error": "too long",
        "category": "user",
    }
    assert not server.stopped
    server.run.forward_backward = lambda rows, loss, adapter: server.run._later(
        "fb", raising(LostError("a rank"))
    )
    await server.submit(learn(name, 2))
    assert [str(error) for error in server.stopped] == ["a rank"]
    server.start()
    assert server.run.made[-1] == "forward_backward"


@running
async def test_samplers_serve_the_newest_weights_alone(server: Server) -> None:
    of = session(server)
    name = await model(server, of)
    base = server.base_sampler(of)
    first = server.sample(base, 0, num_samples=3, prompt_logprobs=True)
    assert server.sample(base, 0, num_samples=3) == first
    assert len(set(first["sample_sequence_ids"])) == 3
    assert await server.answer(first)
    with refused("request_id", RefusedError):
        await server.answer(first)
    calls = [publish(name, 1), step(name, 2), publish(name, 3), publish(name, 4)]
    answers = [await server.result(call) for call in calls]
    assert server.run.made.count("publish") == 1
    unchanged, _, newest, again = (answer.get("sampling_session_id") for answer in answers)
    for sampler in (base, unchanged):
        with refused("sampling_session_id", RefusedError):
            server.sample(sampler, 1)
    for sampler in (newest, again):
        assert await server.answer(server.sample(sampler, 1))
    await server.submit(step(name, 5))
    with refused("prompt_logprobs", RefusedError):
        server.sample(newest, 2, prompt_logprobs=True)
    for named, wrong in (
        ("topk_prompt_logprobs", {"topk_prompt_logprobs": 3}),
        ("num_samples", {"num_samples": 0}),
        ("max_tokens", {"sampling_params": {"max_tokens": 30}}),
    ):
        with refused(named, RefusedError):
            server.sample(newest, 9, **wrong)


@running
async def test_states_come_back_and_other_paths_are_refused(server: Server) -> None:
    name = await model(server, session(server))
    await server.submit(step(name, 1), learn(name, 2), step(name, 3))
    known = server.run.weight
    path = (await server.result(save(name, 4)))["path"]
    assert path == f"tinker://{name}/weights/at-4"
    await server.submit(learn(name, 5), step(name, 6))
    assert server.run.weight != known
    await server.submit(restore(name, 7, path))
    assert server.run.weight == known
    for number, (wrong, named) in enumerate((("at-4", "path="), ("../x", "name=")), 8):
        with refused(named, RefusedError):
            await server.submit(save(name, number, wrong))
    for number, wrong in enumerate(
        ("tinker://../weights/x", "/etc/passwd", f"tinker://{name}/weights/../initial"), 10
    ):
        with refused("path=", RefusedError):
            await server.submit(restore(name, number, wrong))


@running
async def test_a_new_model_starts_from_the_base_and_replaces_the_last(
    server: Server,
) -> None:
    of, other = session(server), session(server)
    name = await model(server, of)
    await server.submit(learn(name, 1), step(name, 2))
    with refused("create_model", RefusedError):
        await model(server, other)
    server.service.end_session(of)
    newer = await model(server, other)
    assert server.run.weight == server.run.newest() == 0.0
    with refused("model_id", RefusedError):
        await server.submit(step(name, 3))
    await server.submit(learn(newer, 1))
    newest = await model(server, other, 1)
    await server.submit(step(newest, 1))
    assert server.run.weight == 0.0  # the gradient was the last model's
    for wrong in ({"base_model": "another"}, {"session_id": "unknown"}):
        with refused(next(iter(wrong)), RefusedError):
            await model(server, other, 2, **wrong)


def test_another_rank_than_the_configured_is_refused(tmp_path: Path) -> None:
    async def ask() -> None:
        server = Server(tmp_path, "model.lora.rank=8")
        of = session(server)
        await model(server, of, lora_config={"rank": 8})
        with refused("rank=32", RefusedError):
            await model(server, of, 1, lora_config={"rank": 32})

    asyncio.run(ask())


with_several = with_settings(*SEVERAL)


@with_several
async def test_models_have_a_policy_each_and_their_samplers_by_name(server: Server) -> None:
    of, other, third = session(server), session(server), session(server)
    first, second = await model(server, of), await model(server, other)
    for refused_to in (third, of):
        with refused("create_model", RefusedError):
            await model(server, refused_to, 1)
    base = server.base_sampler(of)
    at_first = await drawn(server, base, 0)
    samplers = []
    for name, weight in ((first, 1.0), (second, 2.0)):
        published = await server.result(
            learn(name, 1, weight), step(name, 2), publish(name, 3)
        )
        samplers.append(published["sampling_session_id"])
    assert server.run.weights | {"": 0.0} == {"": 0.0, "policy-1": -0.1, "policy-2": -0.2}
    assert len({await drawn(server, each, 1) for each in (*samplers, base)}) == 3
    assert await drawn(server, base, 2) == at_first
    assert await drawn(server, samplers[0], 3)
    server.service.end_session(of)
    newer = await model(server, third)
    assert server.run.weights["policy-1"] == 0.0 and server.run.weights["policy-2"] == -0.2
    with refused("model_id", RefusedError):
        await server.submit(step(first, 4))
    await server.submit(step(newer, 1))


@with_several
async def test_samplers_of_earlier_weights_are_served_until_engines_have_newer_ones(
    server: Server,
) -> None:
    of, beside, other = (session(server) for _ in range(3))
    name, _ = await model(server, of), await model(server, beside)

    async def learned(number: int, name: str = name) -> str:
        published = await server.result(
            learn(name, number), step(name, number + 1), publish(name, number + 2)
        )
        return str(published["sampling_session_id"])

    async def answer(sampler: str, number: int) -> Any:
        return await server.answer(server.sample(sampler, number))

    first, second = await learned(1), await learned(4)
    known = await answer(first, 0)
    assert known != await answer(second, 0)
    with refused("prompt_logprobs", RefusedError):
        server.sample(first, 1, prompt_logprobs=True)
    third = await learned(7)
    with refused("sampling_session_id", RefusedError):
        server.sample(first, 2)
    assert await answer(second, 2) != await answer(third, 2)
    server.service.end_session(of)
    # Which takes the same policy, and publishes the base model's weights.
    newer = await model(server, other)
    known = await answer(third, 3)
    assert known and newer != name
    await learned(1, newer)
    with refused("sampling_session_id", RefusedError):
        server.sample(third, 4)
    server.start()
    with refused("sampling_session_id", RefusedError):
        server.sample(second, 5)


@with_several
async def test_a_state_of_one_model_is_loaded_into_another_alone(server: Server) -> None:
    names = [await model(server, session(server)) for _ in range(2)]
    for name, weight in zip(names, (1.0, 2.0), strict=True):
        await server.submit(learn(name, 1, weight), step(name, 2))
    path = (await server.result(save(names[0], 3)))["path"]
    await server.submit(learn(names[0], 4), restore(names[1], 3, path), step(names[0], 5))
    assert (
        server.run.weights["policy-1"] == pytest.approx(-0.25)
        and server.run.weights["policy-2"] == -0.1
    )


def test_other_policies_than_those_of_the_log_are_refused(tmp_path: Path) -> None:
    async def change() -> None:
        await model(first := Server(tmp_path, *SEVERAL), session(first))
        (other,) = Server(tmp_path).stopped
        assert "model.lora.policies" in str(other)

    asyncio.run(change())


@running
async def test_calls_before_the_oldest_checkpoint_are_forgotten(server: Server) -> None:
    server.run.config.run.checkpoint_every, folder = 2, server.run.folder / "serve"
    name = await model(server, session(server))
    for number in range(1, 41, 2):
        await server.submit(learn(name, number), step(name, number + 1))
    assert server.run.steps == 20
    assert {path.parent.name for path in folder.glob("*/0*")} == {"calls", "answers"}
    assert len(list((folder / "calls").iterdir())) <= 2 * (2 * 2 + 1) + 1
    server.start()
    with refused("seq_id=2", RefusedError):
        await server.submit(step(name, 2))
    await server.submit(step(name, 41))
    assert (server.run.steps, server.run.weight) == (21, pytest.approx(server.run.weight))
    assert np.isfinite(server.run.weight)
