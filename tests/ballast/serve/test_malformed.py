"""Every field of every route, with values of other types and ranges: a refusal of 4xx, and nothing reaches
the run.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ballast.serve.app import make_app
from ballast.serve.log import CallLog
from ballast.serve.service import Service
from tests.ballast.serve.messages import adam
from tests.ballast.serve.tiny_run import TinyRun
from workers.errors import UnfinishedError

KEY = "tml-0123"
API = "/api/v1"
NUMBERS = [True, -1, 0, 1, 1.5, 10**30, float("inf"), float("nan")]
TEXTS = ["12", "", "\ud800", "x" * 10**5]
LISTS = [
    [],
    [-1],
    [10**6],
    [10**30],
    [1.5, 2.7],
    [True],
    [[1]],
    [None],
    [""],
    ["\ud800"],
    ["a", 1],
]
VALUES = [None, *NUMBERS, *TEXTS, *LISTS, {}, {"a": 1}]
UNSET = [None, 0, "", [], {}]  # of fields that are refused if they are used

SAMPLING = {
    "max_tokens": 2,
    "seed": 3,
    "stop": ["a"],
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1.0,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "asample": {
        "sampling_session_id": "SAMPLER",
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": SAMPLING,
        "prompt_logprobs": False,
        "prompt_logprobs_last_n": None,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "target_prompt_logprobs": None,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": None,
    },
    "create_model": {
        "session_id": "SESSION",
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 32},
        "user_metadata": None,
    },
    "optim_step": {"model_id": "MODEL", "seq_id": 1, "adam_params": adam()},
    "save_weights": {"model_id": "MODEL", "seq_id": 1, "path": "name", "overwrite": False},
    "save_weights_for_sampler": {
        "model_id": "MODEL",
        "seq_id": 1,
        "path": "name",
        "kind": None,
    },
    "load_weights": {
        "model_id": "MODEL",
        "seq_id": 1,
        "path": "PATH",
        "optimizer": True,
        "session_id": None,
    },
    "retrieve_future": {"request_id": "x"},
    "create_sampling_session": {
        "session_id": "SESSION",
        "base_model": "tiny",
        "model_path": None,
    },
    "session_heartbeat": {"session_id": "SESSION"},
    "get_info": {"model_id": "MODEL"},
    "weights_info": {"tinker_path": "PATH"},
}
ACCEPTED: dict[str, dict[Any, list[Any]]] = {
    "asample": {
        "seq_id": [None, 0, 1],
        "num_samples": [None, 1],
        ("tokens", 0): [0, 1],
        ("tokens", 1): [0, 1],
        "sampling_params": [{}],
        "max_tokens": [None, 1],
        "seed": [None, -1, 0, 1],
        "stop": [None, 0, 1, "12", []],
        ("stop", 0): [0, 1, "12"],
        "temperature": [None, 0, 1, 1.5],
        "top_k": [None, -1, 0, 1],
        "top_p": [None, 1],
        "prompt_logprobs": [None, True],
        **dict.fromkeys(
            ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_logprobs_last_n"),
            UNSET,
        ),
        **dict.fromkeys(
            ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"),
            UNSET,
        ),
    },
    "create_model": {
        "model_seq_id": [0, 1],
        "base_model": [None, ""],
        "lora_config": [None, {}, {"a": 1}],
        "rank": [None, 1],
        # Never read.
        "user_metadata": [value for value in VALUES if "ud800" not in json.dumps(value)],
    },
    "optim_step": {
        "seq_id": [1],  # a call that has been made, sent again
        "learning_rate": [0, 1, 1.5],
        "beta1": [None, 0],
        "beta2": [None, 0],
        "eps": [None, 0, 1, 1.5],
        "weight_decay": [None, 0, 1, 1.5],
        "grad_clip_norm": [None, 0, 1, 1.5, 10**30],
    },
    "save_weights": {"seq_id": [1], "path": ["12"], "overwrite": [None]},
    "save_weights_for_sampler": {
        "seq_id": [1],
        "path": [None, "12", ""],
        "kind": [None, ""],
    },
    "load_weights": {"seq_id": [1], "optimizer": [None, True], "session_id": [None, ""]},
    "create_sampling_session": {"session_id": ["12"], "model_path": [None, ""]},
    "get_info": {"model_id": ["12"]},
}
"""Values that mean something, by the field's name, or by a list's name and an item's place."""


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each field, and of each item of a list."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, item in items:
        yield (*place, name)
        yield from places(item, (*place, name))


def with_value(
    request: dict[str, Any], place: tuple[Any, ...], value: Any
) -> dict[str, Any]:
    changed = deepcopy(request)
    inner: Any = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return changed


class World:
    """A server over a stand-in run, with a model, a sampler and a saved state."""

    def __init__(self, folder: Path) -> None:
        self.stopped: list[BaseException] = []
        self.run = TinyRun(folder)
        self.service = Service(self.run, CallLog(folder / "serve"), self.stopped.append)
        self.calls = 0
        self.client = TestClient(
            make_app(self.service, KEY),
            headers={"X-API-Key": KEY},
            raise_server_exceptions=False,
        )

    def begin(self) -> None:
        self.names = {"SESSION": self.post("create_session", {}).json()["session_id"]}
        self.names["MODEL"] = self.post("create_model", self.valid("create_model")).json()[
            "model_id"
        ]
        sampler = self.post(
            "create_sampling_session", self.valid("create_sampling_session")
        )
        self.names["SAMPLER"] = sampler.json()["sampling_session_id"]
        self.post("save_weights", self.valid("save_weights"))
        self.names["PATH"] = f"tinker://{self.names['MODEL']}/weights/name-1"

    def post(self, route: str, request: Any) -> Any:
        return self.client.post(f"{API}/{route}", content=json.dumps(request))

    def valid(self, route: str) -> dict[str, Any]:
        """Return a request that names things that exist, and is the next call."""
        request = deepcopy(REQUESTS[route])
        self.calls += 1
        number = (
            self.calls
            if route == "asample"
            else self.service._next.get(self.names.get("MODEL", ""), 0)
        )
        request |= {
            name: self.names[value]
            for name, value in request.items()
            if value in list(self.names)
        }
        request |= {"model_seq_id": self.calls} if route == "create_model" else {}
        request |= {"seq_id": number} if "seq_id" in request else {}
        return request | (
            {"path": f"name-{number}"} if request.get("path") == "name" else {}
        )

    def outcome(self, route: str, request: dict[str, Any]) -> int:
        """Post a request, and return the status of its answer."""
        response = self.post(route, request)
        if (
            response.status_code == 200
            and route != "retrieve_future"
            and "request_id" in response.json()
        ):
            response = self.post(
                "retrieve_future", {"request_id": response.json()["request_id"]}
            )
        if response.status_code >= 400:
            assert response.json()["detail"].endswith("."), response.text
        return int(response.status_code)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("ballast.serve.service.TURN_SECONDS", 0.001)
    world = World(tmp_path)
    with world.client:
        world.begin()
        yield world


@pytest.mark.parametrize("route", REQUESTS)
def test_a_malformed_field_is_refused_and_the_server_goes_on(
    world: World, route: str
) -> None:
    wrong: list[Any] = []
    for place in places(REQUESTS[route]):
        names = (place[-1], place[-2:])
        accepted = next(
            (values for name, values in ACCEPTED.get(route, {}).items() if name in names),
            [],
        )
        meaningful = {json.dumps(value) for value in accepted}
        for value in VALUES:
            request = with_value(world.valid(route), place, value)
            status = world.outcome(route, request)
            if (status == 200) != (json.dumps(value) in meaningful) or status >= 500:
                wrong.append((place, value, status))
    assert not wrong
    assert not world.stopped
    assert world.outcome("asample", world.valid("asample")) == 200


def test_samples_that_engines_refuse_fail_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise UnfinishedError(
            "no sample of this round was finished. The first was given up because of its stop."
        )

    monkeypatch.setattr(
        world.run, "sample", lambda *a, **k: world.run._later("sample", refuse)
    )
    future = world.post("asample", world.valid("asample")).json()
    answer = world.post("retrieve_future", {"request_id": future["request_id"]}).json()
    assert (answer["category"], world.stopped) == ("user", [])
    monkeypatch.undo()
    assert world.outcome("asample", world.valid("asample")) == 200
