"""Agents on stock clients, all at once, against a real engine; and what hostile clients ask of their
sessions.

Only here are sessions that retry, leave and branch at once compared with what
the engine sampled.
"""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloudpickle
import httpx
import numpy as np
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2ForCausalLM

from controller.engines.engine_pool import EnginePool
from controller.engines.fleet import RestartBudget
from tests.controller.engines.generation import generate
from tests.hostile.draws import changed, damaged
from tests.workers.rollout import agent_model, session_checks, stock_agents
from tests.workers.rollout.hostile_requests import (
    ABSENT,
    CASES,
    CHAT,
    MESSAGES,
    VALID,
    Hostile,
)
from tests.workers.rollout.recorded_actor import RecordedActor
from tests.workers.rollout.session_checks import Counts, Row
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.requests import EpisodeStart, SampleRequest

TOLERANCE = 1e-4
SAMPLING = SamplingConfig(max_new_tokens=48)
FUNCTION = "tests.workers.rollout.stock_agents:run"


class Served:
    """An engine that keeps records, with the agents of a module."""

    def __init__(self, model: Path, agent: Any) -> None:
        config = RolloutConfig(
            replicas=1,
            threads=1,
            cpu_kv_cache_gib=0.25,
            max_turns=10_000,  # for drawn bodies that are valid
            max_retries=0,
            sampling=SAMPLING,
            agent=FUNCTION,
        )
        self.pool = EnginePool(
            lambda *_: self._actor(model, config, agent), config, RestartBudget(0)
        )
        self.pool.start()
        self.pool.wait_started()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = Qwen2ForCausalLM.from_pretrained(model).eval()
        self.seen: Counter[Any] = Counter()

    def _actor(self, model: Path, config: RolloutConfig, agent: Any) -> Any:
        options = {
            "index": 0,
            "placement": "shared_memory",
            "max_model_tokens": agent_model.MAX_TOKENS,
            "seed": 0,
        }
        actor = ray.remote(RecordedActor).options(num_cpus=1, max_concurrency=2000)
        return actor.remote(
            ModelConfig(path=str(model)),
            config,
            environment=cloudpickle.dumps(agent),
            **options,
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.pool.actors[0], method).remote(*arguments), timeout=120)

    def play(self, clients: list[str]) -> list[tuple[str, Any, list[Row]]]:
        """Let an agent of each kind play a session, all at once. Returns the results with their rows."""
        prompt = np.array(self.tokenizer("What?")["input_ids"], np.int32)
        requests = [
            SampleRequest(
                name,
                number,
                prompt,
                1000 + number,
                EpisodeStart({"client": name, "number": number}, ""),
            )
            for number, name in enumerate(clients)
        ]
        finished, router = generate(self.pool, requests, SAMPLING)
        assert [result.error for result in router.dropped] == []
        found = []
        for result, block in finished:
            rows = ray.get(block)
            found.append(
                (
                    result.uid,
                    result,
                    [rows.row(result.row + at) for at in range(1 + len(result.branches))],
                )
            )
        return found

    def sampled(self) -> Counter[Any]:
        """What the engine finished since the last call."""
        new = session_checks.of_engine(self.call("recorded")) - self.seen
        self.seen += new
        return new

    def counts(self, rows: list[Row], told: Any) -> Counts:
        return session_checks.counts(rows, told, self.tokenizer, self.model)


@pytest.fixture(scope="module")
def served(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.workers.rollout import imported_agents

    model = agent_model.save(tmp_path_factory.mktemp("model") / "agent")
    served = Served(model, imported_agents.run)
    yield served
    served.pool.stop()


def shown(served: Served, clients: list[str]) -> dict[str, Counts]:
    """Play the clients' sessions, check all of them together against the engine, and return their counts."""
    played = served.play(clients)
    by_client: dict[str, Counts] = {}
    for name, result, rows in played:
        assert result.environment.failure == "", f"{name}: {result.environment.failure}"
        found = served.counts(rows, result.environment.session)
        parts = result.environment.parts
        if "roots" in parts:
            assert found.continued == parts["continued"], name
            # An answer can be whole before its client has left: then it stands for itself.
            whole = range(3) if name == "leaving" else range(1)  # it leaves two
            assert found.roots - parts["roots"] in whole, name
        by_client[name] = by_client.get(name, Counts()) + found
    every = sum(by_client.values(), Counts())
    orphans, doubles = session_checks.against(
        served.sampled(), [rows for _, _, rows in played], every.dropped
    )
    print(session_checks.table(by_client), f"orphans {orphans} doubles {doubles}", sep="\n")
    assert (every.sessions, every.encoded_again, orphans, doubles) == (
        len(clients),
        0,
        0,
        0,
    )
    assert every.difference <= TOLERANCE
    assert every.changed > 0.9 * every.turns, "the tokenizer is to be adversarial"
    return by_client


def test_sessions_of_stock_clients_are_what_the_engine_sampled(served: Served) -> None:
    """Retries, clients that leave, streams, rewritten histories, parallel turns, choices and a compaction."""
    found = shown(served, list(stock_agents.AGENTS) * 2)
    assert found["retrying"].joined + found["keyed"].joined > 4
    assert found["leaving"].dropped > 0


@pytest.mark.slow
def test_64_sessions_of_clients_and_frameworks_are_what_the_engine_sampled(
    ray_session: None, tmp_path: Path
) -> None:
    from tests.workers.rollout import framework_agents

    names = [each.__name__ for each in framework_agents.FRAMEWORKS]
    stock = [name for name in stock_agents.AGENTS if name not in names]
    served = Served(agent_model.save(tmp_path), framework_agents.run)
    try:
        found = shown(served, (3 * names + 4 * stock)[:64])
    finally:
        served.pool.stop()
    assert all(found[name].continued for name in names if name != "smolagents"), (
        "it writes calls as text"
    )


SECRET = "the other session's secret"


class Party:
    """Somebody with a session's address and key."""

    def __init__(self, served: Served, name: str) -> None:
        self.served, self.name = served, name
        self.url, self.key = served.call("open_session", name)
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {self.key}"}, timeout=30
        )
        self.address = urlsplit(self.url)

    def post(self, route: str, body: bytes, **headers: str) -> httpx.Response:
        return self.client.post(self.url + route, content=body, headers=headers)

    def connect(self, route: str, body: bytes, length: int | None = None) -> socket.socket:
        """Send a request, and leave the connection open."""
        head = f"POST {self.address.path}{route} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
        connection = socket.create_connection(
            (str(self.address.hostname), int(self.address.port or 0))
        )
        connection.sendall(head.encode() + body)
        return connection

    def talk(self, text: str, turns: int = 2) -> None:
        """A conversation, of which each turn continues the one before."""
        messages = [{"role": "user", "content": text}]
        for turn in range(turns):
            body = json.dumps({"model": "m", "messages": messages}).encode()
            answer = self.post(CHAT, body)
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": f"{turn}?"},
            ]

    def closed(self) -> tuple[Counts, list[Row]]:
        rows, told = self.served.call("close_session", self.name)
        return self.served.counts(rows, told), rows


def check_form(answer: httpx.Response, anthropic: bool) -> None:
    """An error as clients of the API read it, which shows nothing of the program."""
    found = answer.json()
    if anthropic:
        assert found["type"] == "error"
    error = found["error"]
    assert (
        isinstance(error["message"], str)
        and error["message"]
        and isinstance(error["type"], str)
    )
    assert not any(
        leak in answer.text
        for leak in ("Traceback", "site-packages", "/workers/", ", line ")
    )


def wrong(answer: httpx.Response, case: Hostile) -> str:
    """What is wrong with an answer, or nothing."""
    if answer.status_code not in case.statuses or SECRET in answer.text:
        return f"{answer.status_code} {answer.text[:200]}"
    try:
        if answer.status_code != 200:
            check_form(answer, case.anthropic)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__} {answer.status_code} {answer.text[:200]}"
    return ""


def settled(served: Served, parties: list[Party]) -> dict[str, Counts]:
    """Close the sessions. All that they hold is what the engine sampled, and all that it sampled is in one of
    them.
    """
    found, rows = {}, []
    for party in parties:
        found[party.name], mine = party.closed()
        rows += [mine] if mine else []
    every = sum(found.values(), Counts())
    assert (
        every.encoded_again,
        *session_checks.against(served.sampled(), rows, every.dropped),
    ) == (0, 0, 0)
    assert every.difference <= TOLERANCE
    return found


def test_hostile_requests_are_refused_in_their_apis_form_and_the_session_goes_on(
    served: Served,
) -> None:
    served.sampled()
    victim, party = Party(served, "victim"), Party(served, "hostile")
    victim.talk(SECRET)
    party.talk("before")
    took, failures = {}, []
    for case in CASES:
        began = time.monotonic()
        try:
            reason = wrong(party.post(case.route, case.body), case)
        except httpx.HTTPError as error:
            reason = type(error).__name__
        took[f"{case.name} {case.route}"] = time.monotonic() - began
        failures += [f"{case.name} {case.route}: {reason}"] if reason else []
    print(sorted(took.items(), key=lambda item: -item[1])[:8])
    for method, path in ABSENT:
        answer = party.client.request(
            method, f"{party.url}{path}".replace("OTHER", victim.name), content=b"{}"
        )
        reason = wrong(answer, Hostile(path, path, b"", frozenset({404, 401})))
        failures += [f"{method} {path}: {reason}"] if reason else []
    assert failures == [], "\n".join(failures)
    party.talk("after", turns=3)
    victim.talk("after", turns=3)
    found = settled(served, [victim, party])
    assert (found["victim"].turns, found["victim"].continued) == (5, 3)
    assert found["hostile"].continued >= 3


def test_keys_open_their_own_session_alone(served: Served) -> None:
    served.sampled()
    mine, other = Party(served, "mine"), Party(served, "other")
    other.talk(SECRET)
    keys: Any = (
        {},
        {"Authorization": ""},
        {"Authorization": f"Basic {mine.key}"},
        {"x-api-key": b"\xff"},
    )
    body = json.dumps(VALID[CHAT]).encode()
    for url in (
        other.url,
        other.url + "x",
        other.url.replace("other", "no-such"),
        mine.url + "/../other",
    ):
        for headers in keys:
            for route in (CHAT, "", "/v1/models", "/reward"):
                method = "POST" if route in (CHAT, "/reward") else "GET"
                answer = mine.client.request(
                    method, url + route, content=body, headers=headers
                )
                assert answer.status_code in (401, 404) and SECRET not in answer.text, (
                    url,
                    headers,
                    route,
                )
                check_form(answer, False)
    assert httpx.post(mine.url + CHAT, content=body).status_code == 401
    mine.talk("mine")
    settled(served, [mine, other])
    answer = mine.post(MESSAGES, json.dumps(VALID[MESSAGES]).encode())
    assert answer.status_code == 401
    check_form(answer, True)


def test_clients_that_stop_in_the_middle_cost_nobody_anything(served: Served) -> None:
    served.sampled()
    party, stopping = Party(served, "party"), Party(served, "stopping")
    body = json.dumps(VALID[CHAT] | {"stream": True}).encode()
    held = [
        stopping.connect(CHAT, body[:20], len(body)),  # waits for the rest
        stopping.connect(CHAT, body),  # never reads
        stopping.connect(CHAT, b"", 10**12),
        stopping.connect(CHAT, body, 5),  # what follows is no request
        stopping.connect("/reward", b'{"reward"', 20),
    ]
    stopping.connect(CHAT, body[:20], len(body)).close()
    stopping.connect(CHAT, body).close()
    party.talk("meanwhile", turns=3)
    stopping.talk("too", turns=2)
    found = settled(served, [party, stopping])
    for connection in held:
        connection.close()
    assert (found["party"].turns, found["party"].continued) == (3, 2)
    assert found["stopping"].continued == 1


def many_sessions(served: Served, count: int) -> None:
    served.sampled()
    parties = [Party(served, f"one of {count}: {number}") for number in range(count)]
    body = json.dumps(VALID[CHAT]).encode()
    connections = [party.connect(CHAT, body) for party in parties]
    for party, connection in zip(parties, connections, strict=True):
        with connection, connection.makefile("rb") as answer:
            assert answer.readline().split()[1] == b"200", party.name
            while answer.readline().strip():
                pass
            assert answer.read(1) == b"{"
    found = settled(served, parties)
    assert {(each.turns, each.roots) for each in found.values()} == {(1, 1)}


def test_many_sessions_at_once_are_all_answered(served: Served) -> None:
    many_sessions(served, 60)


@pytest.mark.slow
def test_a_thousand_sessions_at_once_are_all_answered(served: Served) -> None:
    many_sessions(served, 1000)


def bodies() -> st.SearchStrategy[tuple[str, bytes]]:
    """Bodies near to valid ones: with values of other kinds at any depth, or with bytes changed."""

    def near(route: str) -> st.SearchStrategy[tuple[str, bytes]]:
        written = json.dumps(VALID[route]).encode()
        values = st.builds(json.loads, st.just(written)).flatmap(changed)
        as_json = values.map(
            lambda value: json.dumps(value).encode("utf-8", "surrogatepass")
        )
        return st.tuples(
            st.just(route), st.one_of(as_json, as_json, as_json, damaged(written))
        )

    return st.sampled_from(list(VALID)).flatmap(near)


def search(served: Served, draws: int) -> None:
    served.sampled()
    victim, party = Party(served, f"victim{draws}"), Party(served, f"drawn{draws}")
    victim.talk(SECRET)

    @settings(max_examples=draws, deadline=None)
    @given(drawn=bodies())
    def every_body_gets_an_answer(drawn: tuple[str, bytes]) -> None:
        route, body = drawn
        case = Hostile("drawn", route, body, frozenset({200, 400, 404, 413, 429}))
        assert wrong(party.post(route, body), case) == ""

    every_body_gets_an_answer()
    party.talk("after", turns=3)
    victim.talk("after", turns=3)
    settled(served, [victim, party])


def test_drawn_bodies_get_an_answer_or_an_error_in_the_apis_form(served: Served) -> None:
    search(served, 100)


@pytest.mark.slow
def test_many_drawn_bodies_get_an_answer_or_an_error_in_the_apis_form(
    served: Served,
) -> None:
    search(served, 3000)
