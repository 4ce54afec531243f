"""One request of a session while it is answered: its prompts, and the turns that the engine samples."""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from workers.agents.session import Session, SessionPrompt
from workers.batch.placed_images import Image, Placed
from workers.config.roles import SamplingConfig
from workers.engine.requests import Response
from workers.engine.session_record import Node
from workers.images.images import decode_image
from workers.rendering import Options

CALL: ContextVar["SessionRequest"] = ContextVar("call")
LARGE = 2**16  # bytes of a request that is rendered beside others
WHERE = "the request"
IMAGES_KEPT = 64  # decoded ones of a session: clients send those of all turns again
RenderedPrompt = tuple[SessionPrompt, Response]
"""What a request extends, and its whole prompt."""


@dataclass
class Prompt:
    """A prompt of a request. numbers: of the turns to sample. replayed: answers that the session's record
    has.

    turns: the sampled ones and their texts, by choice.
    """

    asked: SessionPrompt
    ids: np.ndarray
    images: Placed
    numbers: list[int]
    replayed: list[Node]
    turns: dict[int, tuple[Response, str]] = field(default_factory=dict)


@dataclass(eq=False)
class OpenSession:
    """A session, as it is asked. image_pixels: see `workers.images.images.resize_image`. images:
    decoded ones, by their URLs' hashes. engine_names: of its requests, as vLLM calls them.
    """

    session: Session
    sampling: SamplingConfig
    seed: int
    options: Options
    priority: int
    image_pixels: tuple[int, int] = (0, 2**20)
    images: dict[bytes, Image] = field(default_factory=dict)
    engine_names: set[str] = field(default_factory=set)

    def image(self, url: str) -> Image:
        """Decode a data: URL. Raises DataError."""
        key = hashlib.blake2b(url.encode(errors="replace")).digest()
        if (image := self.images.get(key)) is None:
            if len(self.images) >= IMAGES_KEPT:
                self.images.clear()
            image = self.images[key] = decode_image(url, WHERE, self.image_pixels)
        return image


@dataclass
class SessionRequest:
    """A request of a session. samples: whether it asks for answers, not for a count of tokens. size: in
    bytes.
    """

    opened: OpenSession
    samples: bool
    size: int
    reserved: ExitStack = field(default_factory=ExitStack)
    prompts: list[Prompt] = field(default_factory=list)
    begun: int = 0

    @property
    def done(self) -> bool:
        """Whether the engine has given all answers."""
        return bool(self.prompts) and all(
            len(prompt.turns) == len(prompt.numbers) for prompt in self.prompts
        )

    async def render(
        self, render: Callable[[], RenderedPrompt], has_images: bool = False
    ) -> RenderedPrompt:
        """Render a prompt, for a large request or images in a thread."""
        return (
            await asyncio.to_thread(render) if has_images or self.size > LARGE else render()
        )

    def take(self, session_request: SessionPrompt, prompt: Response, choices: int) -> None:
        """Add a prompt, and reserve its turns. Raises EpisodeError if the session has none left."""
        if not self.samples:
            return
        nodes = (
            self.opened.session.claim_recorded(session_request, prompt.ids, prompt.images)
            for _ in range(choices)
        )
        replayed = [node for node in takewhile(bool, nodes) if node]
        rest = range(choices - len(replayed))
        numbers = [
            self.reserved.enter_context(self.opened.session.sampling()) for _ in rest
        ]
        self.prompts.append(
            Prompt(session_request, prompt.ids, prompt.images, numbers, replayed)
        )
