"""Episodes without an engine: what becomes of tokens, masks and limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batch.placed_images import Image, PlacedImage
from workers.engine.branches import branches_of
from workers.engine.prefix_hashes import prefix_hashes
from workers.engine.requests import (
    LENGTH,
    STOP,
    TURNS,
    Response,
    join_responses,
    not_sampled,
)
from workers.environment import Observation
from workers.episodes.episode import Episode, play
from workers.errors import EpisodeError

END = 1


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def turn(*numbers: int, reason: str = STOP, versions: tuple[int, ...] = (0,)) -> Response:
    log_probs = -np.arange(1.0, len(numbers) + 1, dtype=np.float32)
    return Response(
        ids(*numbers), log_probs, np.resize(ids(*versions), len(numbers)), reason
    )


def test_a_row_marks_what_the_policy_sampled_and_has_the_experts_of_all_tokens_that_were_read() -> (
    None
):
    """Each turn's request reads what came before it once more; its last token is sampled, and not read."""
    episode = Episode(ids(5, 6), max_turns=3, max_tokens=10)
    episode.add(
        replace(turn(7, END, versions=(3, 4)), routed_experts=np.zeros((3, 2, 1), np.int16))
    )
    assert episode.observe(not_sampled(ids(8, 9, 8)))
    read = np.arange(16, dtype=np.int16).reshape(8, 2, 1)
    episode.add(replace(turn(4, END, versions=(4, 5)), routed_experts=read))
    row = episode.rows()[0]
    experts = row.pop("routed_experts")
    assert (experts.dtype, experts.tolist()) == (np.int16, [*read.tolist(), [[-1], [-1]]])
    assert (
        row["input_ids"].tolist() == [5, 6, 7, END, 8, 9, 8, 4, END] == episode.ids.tolist()
    )
    assert row["loss_mask"].tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True] * 2
    assert row["rollout_log_probs"].tolist() == [0, 0, -1, -2, 0, 0, 0, -1, -2]
    assert {name: column.dtype for name, column in row.items()} == {
        "input_ids": np.int32,
        "loss_mask": np.bool_,
        "rollout_log_probs": np.float32,
        "weight_versions": np.int32,
    }
    assert row["weight_versions"].tolist() == [-1, -1, 3, 4, -1, -1, -1, 4, 5]
    assert (episode.prompt_tokens, episode.response_tokens, episode.observation_tokens) == (
        2,
        4,
        3,
    )
    assert (episode.room, episode.version_tokens) == (3, ((3, 1), (4, 2), (5, 1)))


def test_hashes_tell_images_of_one_size_apart_and_rows_know_their_places() -> None:
    def row(digest: int) -> Episode:
        images = (PlacedImage(Image(digest, 2, 2, b""), first=1, tokens=2),)
        episode = Episode(ids(5, 8, 8, 6), images, max_turns=3, max_tokens=10)
        episode.add(turn(7, 4, 4, END))
        return episode

    one, same, other = row(10), row(10), row(11)
    assert one.prompt_hash == same.prompt_hash != other.prompt_hash
    assert one.images == one.row_images[0] != other.images
    (first,), (second,) = one.rows(), other.rows()
    assert first["input_ids"].tolist() == second["input_ids"].tolist()
    branched = [first, first, second]
    found = branches_of(branched, 4, [one.images, same.images, other.images])
    assert [branch.images for branch in found] == [one.images, other.images]
    assert (found[0].prompt_tokens, found[0].prompt_hash) == (4, one.prompt_hash)
    # A prompt of its own.
    assert found[1].prompt_tokens == 4 and found[1].prompt_hash == other.prompt_hash
    text = branches_of(branched, 4)
    assert text[0] == text[1] and text[0].prefix_hashes == prefix_hashes(
        first["input_ids"], 4
    )
    assert len({found[0].prefix_hashes, found[1].prefix_hashes, text[0].prefix_hashes}) == 3


def test_equal_prompts_have_equal_hashes_in_every_process() -> None:
    one, other = (
        Episode(ids(5, 6), max_turns=3, max_tokens=10),
        Episode(ids(5, 6), max_turns=3, max_tokens=10),
    )
    other.add(turn(7))
    assert one.prompt_hash == other.prompt_hash == 6146428974812933914
    assert one.open(not_sampled(ids(5, 6, 7)))
    assert one.prompt_hash != other.prompt_hash
    assert -(2**63) <= one.prompt_hash < 2**63


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=6),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_the_limits_hold_whatever_is_sampled_and_observed(
    parts: list, tokens: int, turns: int
) -> None:
    """Every turn is at most as long as the room that was left, as the engine is told."""
    episode = Episode(ids(5, 6, 7), max_turns=turns, max_tokens=tokens)
    for sampled, observed in parts:
        sampled = min(sampled, episode.room)
        episode.add(turn(*[4] * sampled, reason=STOP if sampled < episode.room else LENGTH))
        if episode.end(done=False) or not episode.observe(
            not_sampled(ids(*[9] * observed))
        ):
            break
        assert episode.room >= 1
    assert len(episode.turns) <= turns
    assert (
        len(episode.ids)
        == 3 + episode.response_tokens + episode.observation_tokens
        <= 3 + tokens
    )
    assert episode.rows()[0]["loss_mask"].sum() == episode.response_tokens


def test_an_opening_lengthens_the_prompt_and_counts() -> None:
    episode = Episode(ids(5, 6), max_turns=2, max_tokens=4)
    assert not episode.open(not_sampled(ids(5, 6, 7, 7, 7, 7)))
    assert episode.open(not_sampled(ids(5, 6, 7)))
    assert (episode.prompt_tokens, episode.room, episode.ids.tolist()) == (3, 3, [5, 6, 7])
    assert episode.rows()[0]["rollout_log_probs"].tolist() == [0, 0, 0]


class Scripted:
    """An environment that answers with prepared observations, or raises them."""

    def __init__(self, *observations: Any, opening: Any = "") -> None:
        self.observations, self.opening = list(observations), opening
        self.heard: list[str] = []

    async def reset(self, record: dict[str, Any]) -> Any:
        if isinstance(self.opening, Exception):
            raise self.opening
        return self.opening

    async def step(self, response: str) -> Observation:
        self.heard.append(response)
        observation = self.observations.pop(0)
        if isinstance(observation, Exception):
            raise observation
        return observation

    @asynccontextmanager
    async def played(self) -> AsyncIterator["Scripted"]:
        yield self


class Numbers:
    """A conversation in which a text is its numbers."""

    def open(self, prompt: Response, opening: str) -> Response:
        return join_responses([prompt, not_sampled(ids(*map(int, opening.split())))])

    def turn(self, turn_ids: np.ndarray, *, finished: bool) -> str:
        return " ".join(map(str, turn_ids.tolist()))

    def observe(self, turn: Response, said: str, observation: str) -> tuple[Response, None]:
        return not_sampled(ids(*map(int, observation.split()))), None


def played(
    environment: Scripted, *turns: Response, **limits: int
) -> tuple[Episode, list[list[int]], str, Any]:
    """The episode, the prompts that were sampled from, how it ended, its score."""
    episode, prompts, left = Episode(ids(5, 6), **limits), [], list(turns)

    async def sample(so_far: Episode) -> Response:
        prompts.append(so_far.ids.tolist())
        return left.pop(0)

    reason, score = asyncio.run(play(episode, sample, environment.played(), Numbers(), {}))
    return episode, prompts, reason, score


def test_every_prompt_is_what_was_sampled_and_observed_before() -> None:
    environment = Scripted(
        Observation("8 8", reward=0.25, parts={"calls": 1.0}),
        Observation("9", reward=-0.5, done=True, parts={"right": 1.0}),
        opening="3",
    )
    episode, prompts, reason, score = played(
        environment, turn(7, END), turn(4, END), max_turns=5, max_tokens=20
    )
    assert prompts == [[5, 6, 3], [5, 6, 3, 7, END, 8, 8]]
    assert environment.heard == [f"7 {END}", f"4 {END}"]
    # Nobody reads what is said after the end.
    assert episode.ids.tolist() == [5, 6, 3, 7, END, 8, 8, 4, END]
    assert (reason, score.reward, score.parts) == (
        STOP,
        -0.25,
        {"calls": 1.0, "right": 1.0},
    )
    assert score.turns == ({"environment": "3"},)
    assert [credit[:2] for credit in score.credit] == [(2, 0.25), (2, -0.5)]
    assert len({state for _, _, state in score.credit}) == 2


def test_an_episode_ends_with_its_turns_and_with_its_room() -> None:
    talk = [Observation("8 8", reward=1.0) for _ in range(3)]
    _, prompts, reason, score = played(
        Scripted(*talk), turn(7, END), turn(7, END), max_turns=2, max_tokens=20
    )
    assert (len(prompts), reason, score.reward) == (2, TURNS, 2.0)
    episode, prompts, reason, _ = played(
        Scripted(*talk), turn(7, END), max_turns=9, max_tokens=4
    )
    assert (len(prompts), reason, episode.observation_tokens) == (1, LENGTH, 0)
    cut = Scripted(Observation(reward=1.0, done=True))
    _, _, reason, score = played(cut, turn(7, 7, reason=LENGTH), max_turns=9, max_tokens=2)
    assert (reason, score.reward) == (LENGTH, 1.0)  # a turn cut off is graded all the same


def test_an_environment_that_fails_leaves_the_turns_that_were_taken() -> None:
    environment = Scripted(
        Observation("8", reward=1.0), EpisodeError("step ended its process")
    )
    episode, _, reason, score = played(
        environment, turn(7, END), turn(4, END), max_turns=5, max_tokens=20
    )
    assert (score.reward, score.failure) == (0.0, "environment: step ended its process")
    assert (reason, episode.ids.tolist()) == (STOP, [5, 6, 7, END, 8, 4, END])
    assert [credit[:2] for credit in score.credit] == [(2, 0.0), (2, 0.0)]


@pytest.mark.parametrize("opening", [EpisodeError("reset raised"), "3 3 3 3"])
def test_one_that_fails_at_once_leaves_one_turn(opening: Any) -> None:
    episode, prompts, _, score = played(
        Scripted(opening=opening), turn(7, END), max_turns=5, max_tokens=4
    )
    assert prompts == [[5, 6]]
    assert episode.response_tokens == 2
    assert score.failure.startswith("environment: reset")
