"""Whenever the server is killed, each call is made once, and what a client deleted stays deleted."""

import asyncio
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from ballast.serve import service as serving
from ballast.serve.checkpoints import state_of
from ballast.serve.wire import RefusedError
from tests.ballast.serve.messages import body
from tests.ballast.serve.server import (
    SEVERAL,
    Server,
    delete,
    drawn,
    is_deleted,
    learn,
    listed,
    look,
    model,
    publish,
    restore,
    running,
    save,
    session,
    step,
    with_settings,
)
from tests.refusals import refused
from workers.model.checkpoint.checkpoint_folder import remove


@running
async def test_a_deleted_state_is_gone_and_its_name_taken(server: Server) -> None:
    name = await model(server, session(server))
    for number in (1, 2):
        await server.submit(save(name, number))
    first, second = (f"tinker://{name}/weights/at-{number}" for number in (1, 2))
    for _ in range(2):  # also sent again
        await delete(server, first)
    assert listed(server) == [second] and not list(server.run.folder.glob("states/*.at-1"))
    server.start()  # makes the save again
    assert listed(server) == [second] and not list(server.run.folder.glob("states/*.at-1"))
    with refused(first, RefusedError):
        await server.submit(restore(name, 3, first))
    with refused(first, RefusedError):
        await server.submit(save(name, 4, "at-1"))
    for wrong in (
        f"{first}x",
        f"tinker://{name}/weights/../initial",
        f"tinker://{name}/sampler_weights/at-2",
    ):
        with refused("path=", RefusedError):
            await delete(server, wrong)
    assert listed(server) == [second]


@pytest.mark.parametrize("removed", [False, True])
def test_a_kill_within_a_deletion_leaves_a_deleted_state(
    tmp_path: Path, removed: bool
) -> None:
    async def kill(server: Server) -> None:
        name = await model(server, session(server))
        await server.submit(save(name, 1))

        def killed(path: Path) -> None:
            if removed:
                remove(path)
            raise InterruptedError

        with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr(serving, "remove", killed)
            await delete(server, f"tinker://{name}/weights/at-1")
        server.start()
        assert listed(server) == [] and [
            each.name for each in server.run.folder.glob("states/*")
        ] == ["initial"]

    with_settings()(kill)(tmp_path)


@with_settings("run.checkpoint_every=1", "run.keep_checkpoints=2")
async def test_a_state_that_a_restart_would_load_again_is_not_deleted(
    server: Server,
) -> None:
    name, other = await model(server, of := session(server)), session(server)
    await server.submit(step(name, 1), step(name, 2), save(name, 3))
    path = f"tinker://{name}/weights/at-3"
    server.service.end_session(of)
    create = {"session_id": other, "model_seq_id": 0, "path": path}
    newer = (await server.submit(("load_weights", body(**create))))["model_id"]
    for number in (1, 2):  # checkpoints of two steps are kept
        for _ in range(2):  # also after a restart
            with refused(path, RefusedError):
                await delete(server, path)
            server.start()
        await server.submit(step(newer, number))
    await delete(server, path)
    server.start()
    assert listed(server) == [] and server.run.steps == 4


@running
async def test_a_deleted_sampler_path_is_forgotten(server: Server) -> None:
    name, of = await model(server, first := session(server)), first
    path = (await server.result(publish(name, 1, path="one")))["path"]
    assert listed(server) == [path] and server.service.create_sampler(
        {"session_id": of, "model_path": path}
    )
    await delete(server, path)
    for _ in range(2):  # also after a restart, which makes the call again
        assert listed(server) == []
        with refused(path, RefusedError):
            server.service.create_sampler({"session_id": of, "model_path": path})
        server.start()
    with refused(path, RefusedError):
        await server.submit(publish(name, 2, path="one"))


@with_settings("run.checkpoint_every=2")
async def test_a_restarted_server_publishes_again_what_was_published_after_the_checkpoint(
    server: Server,
) -> None:
    name = await model(server, session(server))
    for number in (1, 3, 5):
        await server.submit(learn(name, number), step(name, number + 1))
    answer = await server.result(publish(name, 7))
    known = server.run.weight
    assert server.run.newest() == known
    server.start()
    assert server.run.made[-2:] == ["step", "publish"]
    assert server.run.weight == server.run.newest() == known
    assert await drawn(server, answer["sampling_session_id"], 0)


@pytest.mark.parametrize("overrides", [(), SEVERAL], ids=["one", "several"])
def test_a_sampler_of_the_newest_weights_ends_with_its_model(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    async def follow(server: Server) -> None:
        of, other = session(server), session(server)
        name = await model(server, of)
        inflight = publish(name, 1, kind="inflight")
        sampler = (await server.result(inflight))["sampling_session_id"]
        await drawn(server, sampler, 0)
        await server.submit(learn(name, 2), step(name, 3), publish(name, 4))
        assert await drawn(server, sampler, 1)
        server.service.end_session(of)
        for number in range(2):  # the second takes the policy also if there are two
            await model(server, other, number)
        for _ in range(2):  # also after a restart
            with refused("sampling_session_id", RefusedError):
                server.sample(sampler, 2)
            server.start()

    with_settings(*overrides)(follow)(tmp_path)


KINDS = {"learn": learn, "look": look, "step": step, "publish": publish, "save": save}
# Of the state that was saved last and is not deleted.
ALL_KINDS = [*sorted(KINDS), "wrong", "load", "delete"]


def _sent(calls: list[str], turns: str, names: dict[str, str]) -> list[tuple[str, Any]]:
    counts, paths, sent = Counter[str](), list[str](), list[tuple[str, Any]]()
    for turn, kind in zip(turns, calls, strict=True):
        if kind == "delete":
            sent += [("delete", paths.pop())] if paths else []
            continue
        counts[turn] += 1
        name, number = names[turn], counts[turn]
        if kind == "load":
            sent.append(restore(name, number, paths[-1]) if paths else look(name, number))
        else:
            sent.append(
                step(name, number, -1.0) if kind == "wrong" else KINDS[kind](name, number)
            )
        paths += [f"tinker://{name}/weights/at-{number}"] * (kind == "save")
    return sent


async def _submitted(server: Server, call: tuple[str, bytes]) -> dict[str, str]:
    """Return the future of a call, nothing of a wrong one."""
    try:
        return await server.submit(call)
    except RefusedError:
        assert b"-1.0" in call[1]
        return {}


async def _play(
    folder: Path,
    calls: list[str],
    kills: dict[int, int],
    every: int,
    turns: str = "",
    *,
    deletes: bool = True,
) -> tuple[dict[str, float], float, list[Any]]:
    """Make calls as a client does that sends again what has no answer. kills: before a call, once so many are
    made.
    turns: the model of each call, a or b. deletes: False leaves deletes out.
    """
    server = Server(folder, f"run.checkpoint_every={every}", *(SEVERAL if turns else ()))
    names = {turn: await model(server, session(server)) for turn in sorted({*turns} or "a")}
    sent = _sent(calls, turns or "a" * len(calls), names)
    answers, waiting, there, gone = (
        dict[int, Any](),
        list[tuple[int, dict[str, str]]](),
        set[str](),
        set[str](),
    )
    for place, call in enumerate(sent):
        if call[0] == "delete":
            if deletes:
                (
                    gone
                    if await is_deleted(server, call[1], killed=place in kills)
                    else there
                ).add(call[1])
            continue
        server.run.paused = place in kills
        await _submitted(server, call)
        if place in kills:
            server.run.work(kills[place])
            server.start(paused=True)
            server.run.work(kills[place])
            server.start()
        future = await _submitted(server, call)
        waiting += [(place, future)] if future else []
        # A client sends a step before it asks for gradients.
        if call[0] != "forward_backward" or call is sent[-1]:
            answers |= {each: await server.answer(future) for each, future in waiting}
            waiting.clear()
    assert not server.stopped and not any(
        "error" in each for each in answers.values() if isinstance(each, dict)
    )
    assert there <= {*listed(server)} and not gone & {*listed(server)}
    assert not any((folder / "states" / state_of(path)).exists() for path in gone)
    return (
        server.run.weights,
        float(server.run.steps),
        [answers[place] for place in sorted(answers)],
    )


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.lists(st.sampled_from(ALL_KINDS), min_size=1, max_size=14),
    st.dictionaries(st.integers(0, 13), st.integers(0, 6), max_size=4),
    st.integers(0, 3),
)
def test_whenever_the_server_is_killed_each_step_is_made_once(
    calls: list[str], kills: dict[int, int], every: int
) -> None:
    with TemporaryDirectory() as known, TemporaryDirectory() as killed:
        expected = asyncio.run(_play(Path(known), calls, {}, every, deletes=False))
        found = asyncio.run(_play(Path(killed), calls, kills, every))
    assert found[:2] == expected[:2]
    assert found[1] == calls.count("step")
    names = [
        {**answer, "metrics": None} if isinstance(answer, dict) else answer
        for answer in found[2]
    ]
    assert len(names) == len(expected[2]) and None not in found[2]


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.lists(
        st.tuples(st.sampled_from(ALL_KINDS), st.sampled_from("ab")),
        min_size=1,
        max_size=14,
    ),
    st.dictionaries(st.integers(0, 13), st.integers(0, 6), max_size=4),
    st.integers(0, 3),
)
# A gradient beside a checkpoint.
@example([("learn", "a"), ("step", "b"), ("publish", "a"), ("step", "a")], {3: 0}, 1)
def test_whenever_the_server_is_killed_no_model_loses_a_gradient(
    calls: list[tuple[str, str]], kills: dict[int, int], every: int
) -> None:
    kinds, turns = [kind for kind, _ in calls], "".join(turn for _, turn in calls)
    with TemporaryDirectory() as known, TemporaryDirectory() as killed:
        expected = asyncio.run(_play(Path(known), kinds, {}, every, turns, deletes=False))
        found = asyncio.run(_play(Path(killed), kinds, kills, every, turns))
    names = expected[0].keys() | found[0].keys()
    assert {name: found[0].get(name, 0.0) for name in names} == {
        name: expected[0].get(name, 0.0) for name in names
    }
    assert found[1] == kinds.count("step") and None not in found[2]
