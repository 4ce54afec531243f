"""Stock clients that send images to a real engine: its log-probs are the trainer's, and nothing is encoded
twice.

Only here do images come over HTTP to an engine of a family with a tower.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from PIL import Image as Pillow
from transformers import AutoTokenizer

from tests.workers.rollout import session_checks
from tests.workers.rollout.engines import (
    LOG_PROB_TOLERANCE,
    trainer_difference,
    trainer_of,
)
from tests.workers.rollout.image_messages import IMAGES, URLS, asks, image_part
from tests.workers.rollout.recorded_actor import RecordedActor
from tests.workers.rollout.session_checks import Row
from tests.workers.vision_families import pictures
from workers.batch.placed_images import Placed
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.images.images import url_of

TOKENS = 12
DIGESTS = [image.digest for image in IMAGES]
MORE: Any = {"role": "user", "content": "more?"}


class Served:
    def __init__(self, model: Path) -> None:
        config = RolloutConfig(
            threads=1,
            cpu_kv_cache_gib=0.125,
            agent="a:b",
            sampling=SamplingConfig(max_new_tokens=TOKENS),
        )
        options = {
            "index": 0,
            "placement": "shared_memory",
            "max_model_tokens": 2048,
            "seed": 0,
        }
        actor = ray.remote(RecordedActor).options(num_cpus=1, max_concurrency=100)
        self.actor = actor.remote(
            ModelConfig(path=str(model)), config, environment=b"", **options
        )
        self.call("start")
        self.trainer, self.tokenizer = (
            trainer_of(model),
            AutoTokenizer.from_pretrained(model),
        )
        self.seen: Counter[session_checks.Turn] = Counter()
        self.rows: list[list[Row]] = []

    def call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments), timeout=120)

    def play(self, *agents: Callable[["Clients"], Any]) -> list[list[Placed]]:
        """Let agents play a session each, all at once. Returns the images of their rows, which
        are checked.
        """
        names = [f"{agent.__name__}{number}" for number, agent in enumerate(agents)]
        clients = [Clients(*self.call("open_session", name)) for name in names]

        async def all_at_once() -> None:
            await asyncio.gather(
                *(agent(client) for agent, client in zip(agents, clients, strict=True))
            )

        asyncio.run(all_at_once())
        images = [self.call("session_images", name) for name in names]
        closed = [self.call("close_session", name) for name in names]
        self.rows = rows = [found for found, _ in closed]
        dropped = sum(not node["kept"] for _, told in closed for node in told)
        assert session_checks.against(self.sampled(), rows, dropped) == (0, 0)
        for session in rows:
            turns = list(session_checks.turns_of(session))
            assert session_checks.encoded_again(turns, self.tokenizer) == 0
        assert self.difference(rows, images) < LOG_PROB_TOLERANCE
        assert [[node["parent"] for node in told] for _, told in closed] == [
            client.parents for client in clients
        ]
        return images

    def sampled(self) -> Counter[session_checks.Turn]:
        """What the engine finished since the last call."""
        new = session_checks.of_engine(self.call("recorded")) - self.seen
        self.seen += new
        return new

    def difference(self, sessions: list[list[Row]], images: list[list[Placed]]) -> float:
        rows = [row for session in sessions for row in session_checks.paths(session)]
        placed = [row for session in images for row in session_checks.paths(session)]
        return trainer_difference(self.trainer, rows, placed)


class Clients:
    """parents: the turns that each turn of the session should extend."""

    def __init__(self, url: str, key: str) -> None:
        import anthropic  # for 1.3 CPU s, in the processes that use it

        self.url, self.key, self.parents = url, key, list[int | None]()
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)

    async def chat(
        self, messages: list[Any], *, stream: bool = False, **options: Any
    ) -> Any:
        given = {"model": "m", "messages": messages} | options
        if not stream:
            return [
                choice.message
                for choice in (await self.openai.chat.completions.create(**given)).choices
            ]
        text = ""
        async for chunk in await self.openai.chat.completions.create(stream=True, **given):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def served(ray_session: None, vision_model: Callable[[str], Path]) -> Iterator[Served]:
    found = Served(vision_model("qwen2_5_vl"))
    yield found
    ray.kill(found.actor)


async def two_turns(clients: Clients) -> None:
    messages = [asks("look: ", 0)]
    (message,) = await clients.chat(messages)
    messages += [message, asks(1, " and again ", 0)]
    (message,) = await clients.chat(messages)
    await clients.chat([*messages, message, MORE])
    clients.parents = [None, 0, 1]


async def streamed(clients: Clients) -> None:
    """A stream, then two choices of which each goes on."""
    messages = [{"role": "system", "content": "short"}, asks(1, "what?")]
    messages += [*await clients.chat(messages, stream=True), asks(2)]
    for message in await clients.chat(messages, n=2):
        await clients.chat([*messages, message, MORE], stream=True)
    clients.parents = [None, 0, 0, 1, 2]


async def responses(clients: Clients) -> None:
    given: list[Any] = []
    for number in (0, 1):
        image = {"type": "input_image", "image_url": URLS[number], "detail": "auto"}
        given.append(
            {"role": "user", "content": [image, {"type": "input_text", "text": "this?"}]}
        )
        answer = await clients.openai.responses.create(
            model="m", input=given, max_output_tokens=TOKENS
        )
        given.append({"role": "assistant", "content": answer.output_text})
    clients.parents = [None, 0]


def block(number: int) -> Any:
    data = URLS[number].partition(",")[2]
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }


async def messages_api(clients: Clients) -> None:
    """The second image is the answer of a tool."""
    said: list[Any] = [
        {"role": "user", "content": [block(0), {"type": "text", "text": "zoom"}]}
    ]
    given: dict[str, Any] = {"model": "m", "max_tokens": TOKENS}
    counted = await clients.anthropic.messages.count_tokens(model="m", messages=said)
    first = await clients.anthropic.messages.create(messages=said, **given)
    assert first.usage.input_tokens == counted.input_tokens > 20
    said.append(
        {
            "role": "assistant",
            "content": [{"type": "text", "text": each.text} for each in first.content],
        }
    )
    said.append(
        {
            "role": "user",
            "content": [block(1), {"type": "text", "text": "closer"}, block(2)],
        }
    )
    await clients.anthropic.messages.create(messages=said, **given)
    clients.parents = [None, 0]


def digests(images: list[Placed]) -> list[list[int]]:
    return [[DIGESTS.index(placed.image.digest) for placed in row] for row in images]


def test_stock_clients_send_images_in_every_api(served: Served) -> None:
    agents = [two_turns, streamed, responses, messages_api]
    found = served.play(*agents)
    assert list(map(digests, found)) == [
        [[0, 1, 0]],
        [[1, 2, 2], [1, 2], [1, 2]],
        [[0, 1]],
        [[0, 1, 2]],
    ]


def test_sessions_of_equal_ids_see_their_own_images(served: Served) -> None:
    """Colours differ, sizes do not: the engine's cache of prefixes tells them apart, too."""
    urls = [
        url_of(Pillow.new("RGB", (84, 56), colour)) for colour in ("red", "blue", "red")
    ]

    def agent(url: str) -> Callable[[Clients], Any]:
        async def one(clients: Clients) -> None:
            text = {"type": "text", "text": "which colour is it? " * 3}
            messages: list[Any] = [{"role": "user", "content": [image_part(url), text]}]
            (message,) = await clients.chat(messages)
            await clients.chat([*messages, message, MORE])
            clients.parents = [None, 0]

        return one

    found = served.play(*map(agent, urls))
    one, other, same = (images[0][0].image.digest for images in found)
    assert one == same != other
    assert len({images[0][0].tokens for images in found}) == 1
    assert (
        served.difference(served.rows, [found[1], found[0], found[2]])
        > 100 * LOG_PROB_TOLERANCE
    )


def test_a_session_that_starts_again_is_answered_from_its_record(served: Served) -> None:
    """Its engine was lost: nothing is sampled for the images that it had shown, another image is another
    request.
    """
    url, key = served.call("open_session", "first")
    asyncio.run(two_turns(Clients(url, key)))
    record = served.call("session_record", "first")
    before, _ = served.call("close_session", "first")
    served.sampled()
    url, key = served.call("open_session", "again", {}, record)

    async def again(clients: Clients) -> None:
        await two_turns(clients)
        await clients.chat([asks("look: ", 2)])

    asyncio.run(again(Clients(url, key)))
    assert served.sampled().total() == 1
    rows, told = served.call("close_session", "again")
    assert [node["replayed"] for node in told] == [True, True, True, False]
    assert rows[1]["input_ids"].tolist() == before[0]["input_ids"].tolist()


def test_an_image_larger_than_texts_may_be_is_served(served: Served) -> None:
    """Noise of 400 kB: as a text, the model's 2048 tokens would refuse it without a tokenizer."""
    noise = np.random.default_rng(0).integers(0, 256, (360, 360, 3)).astype("uint8")
    url = url_of(Pillow.fromarray(noise))
    assert len(url) > 400_000

    async def one(clients: Clients) -> None:
        await clients.chat([{"role": "user", "content": [image_part(url)]}])
        with pytest.raises(openai.BadRequestError, match="context length"):
            await clients.chat([{"role": "user", "content": "x" * 400_000}])
        clients.parents = [None]

    served.play(one)


def test_a_path_is_refused_in_every_api(served: Served, tmp_path: Path) -> None:
    pictures()[0].save(tmp_path / "here.png")
    path = f"file://{tmp_path}/here.png"
    url, key = served.call("open_session", "refused")
    for route, part in {
        "chat/completions": image_part(path),
        "responses": {"type": "input_image", "image_url": path},
        "messages": {"type": "image", "source": {"type": "url", "url": path}},
    }.items():
        history = [{"role": "user", "content": [part]}]
        body = {"model": "m", "max_tokens": 9, "messages": history, "input": history}
        answer = httpx.post(f"{url}/v1/{route}", json=body, headers={"x-api-key": key})
        assert answer.status_code == 400, answer.text
        assert "data: URL" in answer.text, answer.text
    assert served.call("close_session", "refused") == ([], [])
