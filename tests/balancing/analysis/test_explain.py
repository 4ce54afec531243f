"""Explanations: causes of waiting on batches made for them, and advice that is planned again here."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, Pipeline, Plan, explain, plan_batch, plan_statistics
from balancing.analysis.distributions import draw
from balancing.analysis.explain import advice, findings, replan

SEVEN_BILLION = CostModel(4.2e10, 6e5)
QUADRATIC = CostModel(1000.0, 1.0)
SQUARES = CostModel(0.0, 1.0)


def planned(name, count, ranks, mini_batches, max_tokens, **options) -> Plan:
    members = np.array_split(np.random.default_rng(0).permutation(count), mini_batches)
    return plan_batch(
        draw(name, count, 0),
        ranks=ranks,
        mini_batches=members,
        max_tokens=max_tokens,
        **{"cost_model": SEVEN_BILLION, **options},
    )


BATCHES = {
    "long sequences": lambda: planned("reasoning", 512, 16, 4, 32768),
    "one huge": lambda: planned("one_huge", 64, 8, 2, 65536),
    "few sequences": lambda: planned("lognormal", 20, 8, 4, 16384),
    "padded for a pipeline": lambda: planned(
        "lognormal",
        256,
        8,
        2,
        32768,
        layout="padded",
        length_multiple=64,
        min_count=4,
        multiple_of=4,
    ),
    "more micro-steps than needed": lambda: planned(
        "lognormal", 40, 8, 1, 32768, min_count=4, multiple_of=4
    ),
    "few sequences a micro-batch": lambda: planned(
        "lognormal", 256, 8, 2, 32768, max_sequences=2
    ),
    "given order": lambda: planned("lognormal", 256, 8, 2, 32768, algorithm="none"),
    "as verl does it": lambda: planned("lognormal", 256, 8, 2, 8192, algorithm="verl"),
    "tokens alone": lambda: planned("agentic", 200, 8, 1, 40000, cost_model=None),
    "small ends": lambda: planned(
        "lognormal", 256, 4, 2, 8192, pipeline=Pipeline(4), order="small_ends"
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_advice_holds_when_it_is_followed(name):
    plan = BATCHES[name]()
    text, before = explain(plan), plan.predicted_makespans().sum()
    found = advice(plan)
    assert [each.gain for each in found] == sorted(
        (each.gain for each in found), reverse=True
    )
    for each in found:
        after = (
            replan(plan, each.changes).predicted_makespans().sum() / each.context_parallel
        )
        assert each.gain == pytest.approx(1 - after / before)
        assert each.gain >= 1e-3
        assert f"- {each}\n" in text
    doubled = replan(plan, {"max_tokens": 2 * plan.max_tokens}).predicted_makespans().sum()
    assert ("not twice the cap" in text) == (1 - doubled / before < 1e-3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("long sequences", "max_tokens=65,536: "),
        ("long sequences", "max_tokens=131,072: "),
        (
            "one huge",
            "twice the context parallelism, whose communication is not counted (ranks=4, ",
        ),
        (
            "few sequences",
            "2 instead of 4 mini-batches, which changes the optimiser steps: ",
        ),
        ("more micro-steps than needed", "min_count=1, multiple_of=1: "),
        ("padded for a pipeline", 'layout="packed": '),
        ("few sequences a micro-batch", "max_sequences=4: "),
        ("few sequences a micro-batch", "max_sequences=None: "),
        ("given order", 'algorithm="karmarkar_karp": '),
        ("as verl does it", 'algorithm="karmarkar_karp": '),
        ("small ends", 'order="makespan": '),
    ],
)
def test_what_holds_a_plan_back_is_what_is_recommended(name, words):
    assert any(str(each).startswith(words) for each in advice(BATCHES[name]()))


def test_replanning_without_changes_is_the_same_plan():
    plan = BATCHES["padded for a pipeline"]()
    again = replan(plan, {})
    for mine, other in zip(plan.mini_batches, again.mini_batches, strict=True):
        assert mine.rows.tolist() == other.rows.tolist()
        assert mine.bounds.tolist() == other.bounds.tolist()


def test_an_even_plan_is_explained_in_few_words():
    text = explain(plan_batch([7] * 8, ranks=4, max_tokens=14))
    assert text == (
        "8 sequences of 56 tokens on 4 ranks: 1 mini-batch, 1 micro-step.\nImbalance: 0.00% in the given "
        "order, 0.00% after Karmarkar-Karp alone, without caps, 0.00% as planned.\nThe step takes 0.00% "
        "longer than if no rank ever waited (at best 0.00% in as many micro-steps). Ranks wait 0.00% of "
        "the time.\n\nWhy:\n- Mini-batch 0 takes 1 micro-step, the fewest that max_tokens=14 allows. Its "
        "micro-batches fill 100.0% of the cap on average.\n\nWhat would help, planned and compared:\n- not "
        "twice the cap: max_tokens=28 saves less than 0.1% of the step time\n"
    )


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=2, max_size=60),
    ranks=st.integers(1, 6),
    parts=st.integers(1, 2),
    max_sequences=st.none() | st.integers(1, 5),
    layout=st.sampled_from(["packed", "padded"]),
    algorithm=st.sampled_from(["karmarkar_karp", "karmarkar_karp", "none", "verl"]),
)
def test_waiting_by_cause_adds_up_to_the_plans_idle_share(
    lengths, ranks, parts, max_sequences, layout, algorithm
):
    plan = plan_batch(
        lengths,
        ranks=ranks,
        mini_batches=np.array_split(np.arange(len(lengths)), parts),
        max_tokens=600,
        max_sequences=max_sequences,
        layout=layout,
        algorithm=algorithm,
        cost_model=QUADRATIC,
    )
    found = findings(plan)
    assert sum(finding.waiting for finding in found) == pytest.approx(
        plan_statistics(plan)["idle_share"], abs=1e-6
    )
    assert len({finding.cause for finding in found}) == len(found)


@pytest.mark.parametrize(
    ("lengths", "arguments", "cause", "waiting", "evidence"),
    [
        ([10, 10, 10, 10, 60], {"ranks": 4, "max_tokens": 100}, "a long sequence", 35 / 60,
         "sequence 4 of 60 tokens is 60.0% of micro-step 0 of mini-batch 0, where a rank's fair share is "
         "25.0%"),
        ([5, 5, 5], {"ranks": 4, "max_tokens": 10}, "empty micro-batches", 1 / 4, "1 of 4 ranks"),
        ([5] * 5, {(
            "ranks"
        ): 2, "max_tokens": 10, "min_count": 3}, "empty micro-batches", 1 / 6, "min_count=3"),
        ([9, 9, 1, 1], {(
            "ranks"
        ): 2, "max_tokens": 20, "algorithm": "none"}, 'algorithm="none"', 8 / 18, "80.00% over"),
        ([8, 7, 7, 1], {"ranks": 2, "max_tokens": 100, "max_sequences": 2}, "the cap on sequences", 2.5 / 14,
         f"max_sequences=2, and in micro-step 0 of mini-batch 0 the heaviest rank is {14 / 11.5 - 1:.2%} "
         "over"),
        ([7, 5, 5, 5, 4], {"ranks": 2, "max_tokens": 14, "cost_model": SQUARES}, "the cap on tokens", None,
         "full at max_tokens=14"),
        ([6, 5, 5, 5], {(
            "ranks"
        ): 3, "max_tokens": 20}, "a remainder that no exchange evens out", 3 / 10, "over the"),
    ],
)  # fmt: skip
def test_each_cause_of_waiting_is_named_with_its_evidence(
    lengths, arguments, cause, waiting, evidence
):
    plan = plan_batch(lengths, **arguments)
    (found,) = [finding for finding in findings(plan) if finding.waiting > 0]
    assert found.cause == cause
    assert waiting is None or found.waiting == pytest.approx(waiting)
    assert (
        f"{found.waiting:.2%} of the ranks' time waits for {cause}, in 1 micro-step: "
        in found.text
    )
    assert evidence in found.text
    assert f"- {found.text}\n" in explain(plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            "takes 2 micro-steps, the fewest that max_tokens=30 allows. Its micro-batches fill 100.0% of "
            "the cap",
        ),
        (
            {"min_count": 3, "multiple_of": 2},
            "as min_count=3 and multiple_of=2 ask, while the caps need 2",
        ),
        (
            {"pipeline": Pipeline(2)},
            "because more of them fill and drain the pipeline sooner",
        ),
    ],
)
def test_the_count_says_what_the_caps_need_and_what_was_asked_for(options, words):
    assert words in explain(plan_batch([10] * 12, ranks=2, max_tokens=30, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        (
            {"length_multiple": 8},
            f"{1 - 16 / 24:.2%} of the computed tokens are padding, from alignment",
        ),
        (
            {"layout": "padded"},
            f'{1 - 16 / 18:.2%} of the computed tokens are padding, from layout="padded"',
        ),
    ],
)
def test_padding_is_found_where_there_is_any(options, words):
    text = explain(plan_batch([9, 7], ranks=1, max_tokens=32, **options))
    assert words in text if words else "padding" not in text
