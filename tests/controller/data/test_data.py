from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.data.curriculum import check_numbers
from controller.data.prompts import PromptDataset, PromptMixture, PromptRules
from tests.refusals import refused
from workers.errors import DataError
from workers.rendering import Renderer


class Letters:
    """A tokenizer in the smallest sense: one id a character, and a chat template."""

    chat_template = "x"

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def get_chat_template(self, **_: object) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[dict], **_: object) -> str:
        return "".join(message["content"] for message in messages)


LETTERS = Renderer(Letters())
RULES = PromptRules("prompt", max_prompt_tokens=8)


def dataset(count: int, **options: object) -> PromptDataset:
    records = [{"prompt": f"{i:03d}", "answer": i} for i in range(count)]
    return PromptDataset(records, LETTERS, RULES, **options)


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_deals_every_prompt_once(count: int, size: int, seed: int) -> None:
    prompts = dataset(count, seed=seed)
    stream = [
        prompt
        for step in range(-(-2 * count // size))
        for prompt in prompts.take(step * size, size)
    ]
    assert len({prompt.uid for prompt in stream}) == len(stream)
    for epoch in range(2):
        answers = [
            prompt.columns["answer"]
            for prompt in stream[epoch * count : (epoch + 1) * count]
        ]
        assert sorted(answers) == list(range(count))


def test_a_place_of_the_stream_is_a_pure_function_of_the_seed() -> None:
    order = [
        [p.columns["answer"] for p in dataset(50, seed=3).take(step * 7, 7)]
        for step in (9, 2, 9)
    ]
    assert order[0] == order[2] != order[1]
    assert order[0] != [p.columns["answer"] for p in dataset(50, seed=4).take(63, 7)]
    assert [p.columns["answer"] for p in dataset(5, shuffle=False).take(3, 3)] == [3, 4, 0]


def test_overlong_prompts_are_dropped_refused_or_cut_and_counted() -> None:
    records = [{"prompt": "short"}, {"prompt": "much too long"}]
    kept = PromptDataset(records, LETTERS, RULES)
    assert (len(kept), kept.dropped) == (1, 1)
    with refused("data.max_prompt_tokens", DataError):
        PromptDataset(records, LETTERS, replace(RULES, overlong_prompts="error"))
    with refused("data.max_prompt_tokens=1", DataError):
        PromptDataset(records, LETTERS, replace(RULES, max_prompt_tokens=1))
    cut = PromptDataset(records, LETTERS, replace(RULES, overlong_prompts="truncate"))
    assert (cut.truncated, cut.dropped) == (1, 0)
    assert ["".join(map(chr, prompt.ids)) for prompt in cut] == ["short", "too long"]


def test_a_system_prompt_goes_before_messages_that_have_none() -> None:
    rules = PromptRules("prompt", max_prompt_tokens=8, system_prompt="S")
    user, own = {"role": "user", "content": "u"}, {"role": "system", "content": "o"}
    texts = [
        "".join(map(chr, p.ids))
        for p in PromptDataset(
            [{"prompt": [user]}, {"prompt": [own, user]}], LETTERS, rules
        )
    ]
    assert texts == ["Su", "ou"]
    assert (
        next(iter(PromptDataset([{"prompt": [user]}], LETTERS, RULES))).ids.dtype
        == np.int32
    )
    with refused("data.system_prompt", DataError):
        PromptDataset([{"prompt": "u"}], LETTERS, rules)


def test_a_teacher_reads_the_context_in_a_text_or_the_last_question() -> None:
    rules = replace(RULES, context_key="hint", context_template="{context}|{prompt}")
    user, parts = (
        {"role": "user", "content": "u"},
        {"role": "user", "content": [{"type": "text", "text": "v"}]},
    )
    records: list[dict[str, Any]] = [
        {"prompt": "u", "hint": "{prompt}"},
        {"prompt": [user, {"role": "assistant", "content": "a"}, parts], "hint": 7},
    ]
    found = [PromptDataset([record], LETTERS, rules) for record in records]
    taught = ["".join(map(chr, next(iter(dataset)).teacher_ids)) for dataset in found]
    assert taught == ["{prompt}|u", "ua7|v"] and [
        dataset.longest_taught for dataset in found
    ] == [10, 5]
    for prompt, hint in (([{"role": "system", "content": "s"}], "h"), ("u", None)):
        with refused("data record 1", DataError):
            PromptDataset([{"prompt": prompt, "hint": hint}], LETTERS, rules)


def test_prompts_carry_their_source() -> None:
    rules = replace(RULES, source_key="kind")
    named = PromptDataset([{"prompt": "a", "kind": "sums"}], LETTERS, rules, name="file")
    assert next(iter(named)).source == "sums"
    assert next(iter(dataset(1, name="file"))).source == "file"


def test_a_curriculum_orders_every_epoch() -> None:
    def easy_first(records: list[dict], epoch: int) -> list[int]:
        return [2, 0] if epoch == 0 else [1]

    prompts = dataset(3, curriculum=easy_first)
    assert [p.columns["answer"] for p in prompts.take(0, 5)] == [2, 0, 1, 1, 1]
    assert len({p.uid for p in prompts.take(0, 5)}) == 5


@pytest.mark.parametrize("order", [[3], [], "0", [0.5]])
def test_a_curriculum_that_names_no_record_is_refused(order: Any) -> None:
    with refused("data.curriculum", DataError):
        check_numbers(order, 3, "data.curriculum for epoch 0")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 60))
def test_a_mixture_is_never_a_prompt_off_its_weights(
    weights: list[float], count: int
) -> None:
    sources = [dataset(5, name=str(i), shuffle=False) for i in range(len(weights))]
    dealt = [p.source for p in PromptMixture(sources, weights).take(0 * count, count)]
    for i, weight in enumerate(weights):
        assert abs(dealt.count(str(i)) - count * weight / sum(weights)) < len(weights)


def test_a_mixture_is_a_pure_function_of_the_step_and_keeps_each_sources_order() -> None:
    def mixture() -> PromptMixture:
        return PromptMixture(
            [dataset(5, seed=1, name="a"), dataset(3, seed=1, name="b")], [2, 1]
        )

    whole = mixture().take(0, 12)
    assert [p.columns["answer"] for p in mixture().take(8, 4)] == [
        p.columns["answer"] for p in whole[8:]
    ]
    alone = [p.columns["answer"] for p in dataset(5, seed=1).take(0, 8)]
    assert [p.columns["answer"] for p in whole if p.source == "a"] == alone
    assert len({p.uid for p in whole}) == 12
