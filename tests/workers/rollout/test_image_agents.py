"""Stock clients that send images to a real engine: its log-probs are the trainer's, and nothing is encoded
twice.

Only here do images come over HTTP to an engine of a family with a tower.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
import torch
from PIL import Image as Pillow
from transformers import AutoTokenizer

from tests.workers.rollout import session_checks
from tests.workers.rollout.engines import LOG_PROB_TOLERANCE
from tests.workers.rollout.recorded_actor import RecordedActor
from tests.workers.rollout.session_checks import Row
from tests.workers.rollout.test_image_engine import fetched, trainer_of
from tests.workers.vision_families import pictures
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Placed
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.images.images import decode_image, url_of

TOKENS = 12
URLS = [url_of(picture) for picture in pictures()]
DIGESTS = [decode_image(url, "a test", (0, 2**20)).digest for url in URLS]
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
        self.seen, self.rows = session_checks.of_engine([]), list[list[Row]]()

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
        new = session_checks.of_engine(self.call("recorded")) - self.seen
        self.seen += new
        dropped = sum(not node["kept"] for _, told in closed for node in told)
        assert session_checks.against(new, rows, dropped) == (0, 0)
        for found in rows:
            assert (
                session_checks.encoded_again(
                    list(session_checks.turns_of(found)), self.tokenizer
                )
                == 0
            )
        assert self.difference(rows, images) < LOG_PROB_TOLERANCE
        assert [[node["parent"] for node in told] for _, told in closed] == [
            client.parents for client in clients
        ]
        return images

    def difference(self, sessions: list[list[Row]], images: list[list[Placed]]) -> float:
        """Largest difference of the engine's log-probs to the trainer's, with all rows in one packed
        sequence.
        """
        rows = [row for found in sessions for row in session_checks.paths(found)]
        shown = [
            placed
            for found in images
            for placed in (found if len(found) == 1 else found[1:])
        ]
        tensors = [
            {name: torch.tensor(row[name]) for name in ("input_ids", "loss_mask")}
            for row in rows
        ]
        batch = DataProto.from_list(tensors)
        batch.objects["images"] = object_column(
            [tuple(map(fetched, placed)) for placed in shown]
        )
        log_probs, _ = self.trainer.log_probs(batch, [(0, len(rows))])
        mask = np.concatenate([row["loss_mask"] for row in rows])
        sampled = np.concatenate([row["rollout_log_probs"] for row in rows])
        return float(np.abs(log_probs.numpy() - sampled)[mask].max())


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


def shown(*content: Any) -> Any:
    """A user's message for OpenAI's chats. Numbers are images."""

    def part(each: Any) -> dict[str, Any]:
        url = URLS[each] if isinstance(each, int) else ""
        return (
            {"type": "image_url", "image_url": {"url": url}}
            if url
            else {"type": "text", "text": each}
        )

    return {"role": "user", "content": [part(each) for each in content]}


async def two_turns(clients: Clients) -> None:
    messages = [shown("look: ", 0)]
    (message,) = await clients.chat(messages)
    messages += [message, shown(1, " and again ", 0)]
    (message,) = await clients.chat(messages)
    await clients.chat([*messages, message, MORE])
    clients.parents = [None, 0, 1]


async def streamed(clients: Clients) -> None:
    """A stream, then two choices of which each goes on."""
    messages = [{"role": "system", "content": "short"}, shown(1, "what?")]
    messages += [*await clients.chat(messages, stream=True), shown(2)]
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
            image = {"type": "image_url", "image_url": {"url": url}}
            messages = [
                {
                    "role": "user",
                    "content": [
                        image,
                        {"type": "text", "text": "which colour is it? " * 3},
                    ],
                }
            ]
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
    served.seen += session_checks.of_engine(served.call("recorded")) - served.seen
    url, key = served.call("open_session", "again", {}, record)

    async def again(clients: Clients) -> None:
        await two_turns(clients)
        await clients.chat([shown("look: ", 2)])

    asyncio.run(again(Clients(url, key)))
    new = session_checks.of_engine(served.call("recorded")) - served.seen
    served.seen += new
    assert new.total() == 1
    rows, told = served.call("close_session", "again")
    assert [node["replayed"] for node in told] == [True, True, True, False]
    assert rows[1]["input_ids"].tolist() == before[0]["input_ids"].tolist()


def test_an_image_larger_than_texts_may_be_is_served(served: Served) -> None:
    """Noise of 400 kB: as a text, the model's 2048 tokens would refuse it without a tokenizer."""
    noise = np.random.default_rng(0).integers(0, 256, (360, 360, 3)).astype("uint8")
    url = url_of(Pillow.fromarray(noise))
    assert len(url) > 400_000

    async def one(clients: Clients) -> None:
        await clients.chat(
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": url}}],
                }
            ]
        )
        with pytest.raises(openai.BadRequestError, match="context length"):
            await clients.chat([{"role": "user", "content": "x" * 400_000}])
        clients.parents = [None]

    served.play(one)


def test_paths_and_urls_are_refused_in_every_api(served: Served, tmp_path: Path) -> None:
    pictures()[0].save(tmp_path / "here.png")
    url, key = served.call("open_session", "refused")
    for place in (
        f"{tmp_path}/here.png",
        f"file://{tmp_path}/here.png",
        f"{url}/v1/models",
    ):
        source = {"type": "url", "url": place}
        bodies = {
            "chat/completions": {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": place}}],
                    }
                ]
            },
            "responses": {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": place}],
                    }
                ]
            },
            "messages": {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": source}]}
                ],
            },
        }
        for route, body in bodies.items():
            answer = httpx.post(
                f"{url}/v1/{route}", json={"model": "m"} | body, headers={"x-api-key": key}
            )
            assert (answer.status_code, "data: URL" in answer.text) == (400, True), (
                answer.text
            )
    assert served.call("close_session", "refused") == ([], [])
