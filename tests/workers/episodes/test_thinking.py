"""Where the reasoning of a turn is open, and where a text of `stop` lies on both sides of a request."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.refusals import refused
from tests.workers.rollout import tiny
from tests.workers.tokenizer_schemes import SCHEMES, make_tokenizer
from workers.config.roles import SamplingConfig
from workers.engine.requests import INSERTED, LENGTH, STOP, Response, not_sampled
from workers.episodes.thinking import Thinking


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Thinking:
    return Thinking(
        AutoTokenizer.from_pretrained(tiny.save_model(tmp_path_factory.mktemp("model"))), ""
    )


def ids(text: str) -> np.ndarray:
    return np.array([tiny.ID[character] for character in text], np.int32)


@pytest.mark.parametrize(
    ("prompt", "said", "is_open"),
    [
        ("Hi<think>", "one", True),
        ("Hi<think></think>", "one", False),  # a template with thinking off
        ("Think<think>here:", "one", False),  # words of a user
        ("Hi", "<think>one", True),
        ("Hi", "one<think>two", True),
        ("Hi", "one", False),
        ("Hi<think>", "one</think>two", False),
        ("Hi", "<think>one</think>", False),
    ],
)
def test_reasoning_is_open_from_its_mark_in_the_prompts_end_or_the_turn(
    thinking: Thinking, prompt: str, said: str, is_open: bool
) -> None:
    assert thinking.is_open(ids(prompt), ids(said)) == is_open


def test_a_model_whose_reasoning_has_no_end_marker_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.save_model(tmp_path))
    tokenizer.chat_template = "<|channel|>"  # gpt-oss
    with refused("sampling.max_thinking_tokens"):
        Thinking(tokenizer, "")


def test_a_text_that_does_not_end_the_reasoning_is_refused(thinking: Thinking) -> None:
    closing = thinking.closing(SamplingConfig(end_of_thinking="so</think>"))
    assert (closing.ids.tolist(), set(closing.versions.tolist())) == (
        ids("so</think>").tolist(),
        {INSERTED},
    )
    with refused("end_of_thinking='so'"):
        thinking.closing(SamplingConfig(end_of_thinking="so"))


@pytest.mark.parametrize("text", ["", "two\n</think>", " two</think>\n"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inserted_tokens_are_those_of_the_whole_text(scheme: str, text: str) -> None:
    tokenizer = make_tokenizer(scheme, thinks=True)
    closing = Thinking(tokenizer, "").closing
    before = tokenizer("<think>one:", add_special_tokens=False)["input_ids"]
    inserted = closing(SamplingConfig(end_of_thinking=text), before[-1]).ids.tolist()
    whole = tokenizer(f"<think>one:{text or '</think>'}", add_special_tokens=False)[
        "input_ids"
    ]
    assert [*before, *inserted] == whole


@given(st.text("ab", min_size=2, max_size=12), st.data())
def test_a_turn_of_two_requests_stops_where_one_would(
    thinking: Thinking, said: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(1, len(said) - 1))
    stop = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
    ends = [said.find(text) + len(text) for text in stop if text in said]
    alone = [
        said[place:].find(text) + len(text) + place for text in stop if text in said[place:]
    ]
    if any(text in said[:place] for text in stop):  # the first request would have ended
        return
    received = min(alone, default=len(said))  # of both requests
    turn = not_sampled(ids(said[:received]), 3)
    turn = Response(
        turn.ids,
        turn.log_probs,
        turn.versions,
        STOP if alone else LENGTH,
        stop_string=bool(alone),
    )
    found = thinking.stop_at_text(turn, place, stop)
    end = min(ends, default=len(said))
    assert found.ids.tolist() == ids(said[:end]).tolist()
    assert (found.finish_reason, found.stop_string) == (
        (STOP, True) if ends else (LENGTH, False)
    )
