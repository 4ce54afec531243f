"""Two runs part where they were made to part."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ballast.audit.bundle import Bundle
from ballast.audit.comparison import compare_runs, compare_steps
from tests.ballast.audit.faults import take_rows, with_facts, with_rows, with_tokens
from tests.ballast.audit.steps import clean_step
from workers.errors import DataError


@dataclass(frozen=True)
class Loaded:
    bundle: Bundle

    def load(self) -> Bundle:
        return self.bundle


def change_token(column: str, row: int, token: int) -> Callable[[Bundle], Bundle]:
    def change(bundle: Bundle) -> Bundle:
        values = bundle.tokens[column].copy()
        values[bundle.offsets[row] + token] += 1
        return with_tokens(bundle, **{column: values})

    return change


def change_row(column: str, row: int) -> Callable[[Bundle], Bundle]:
    def change(bundle: Bundle) -> Bundle:
        values = bundle.rows[column].copy()
        values[row] += 1
        return with_rows(bundle, **{column: values})

    return change


CHANGES: dict[str, tuple[Callable[[Bundle], Bundle], tuple[str, str, int, int]]] = {
    "prompts": (change_token("token_ids", 3, 1), ("prompts", "token_ids", 3, 1)),
    "samples": (change_token("token_ids", 3, 14), ("samples", "token_ids", 3, 14)),
    "sampler": (
        change_token("sampler_logprobs", 2, 15),
        ("samples", "sampler_logprobs", 2, 15),
    ),
    "rewards": (change_row("rewards", 7), ("rewards", "rewards", 7, -1)),
    "plans": (change_row("micro_batch", 4), ("plans", "micro_batch", 4, -1)),
    "log_probs": (
        change_token("old_logprobs", 5, 13),
        ("log_probs", "old_logprobs", 5, 13),
    ),
    "advantages": (change_token("advantages", 6, 12), ("advantages", "advantages", 6, 12)),
    "update": (change_token("new_logprobs", 5, 13), ("update", "new_logprobs", 5, 13)),
    "loss": (lambda bundle: with_facts(bundle, loss=(1.0, 2.0)), ("loss", "loss", -1, -1)),
    "gradients": (
        lambda bundle: with_facts(bundle, gradient_norm=(0.7, 0.8)),
        ("gradients", "gradient_norm", -1, -1),
    ),
}


@pytest.mark.parametrize("stage", CHANGES)
def test_the_stage_row_and_token_that_differ_are_named(stage: str) -> None:
    change, expected = CHANGES[stage]
    bundle = clean_step()
    first, *rest = compare_steps(bundle, change(bundle))
    assert (first.stage, first.column, first.row, first.token) == expected
    assert first.largest > 0
    assert rest == []


def test_equal_runs_have_no_difference_and_order_of_rows_is_not_one() -> None:
    bundle = clean_step()
    shuffled = take_rows(bundle, np.random.default_rng(0).permutation(bundle.row_count))
    assert compare_steps(bundle, bundle) == ()
    assert compare_steps(bundle, shuffled) == ()


def test_what_follows_from_one_other_reward_comes_after_it() -> None:
    bundle = clean_step()
    other = change_token("advantages", 9, 12)(change_row("rewards", 9)(bundle))
    stages = [difference.stage for difference in compare_steps(bundle, other)]
    assert stages == ["rewards", "advantages"]


def test_a_longer_response_parts_behind_the_shorter_one() -> None:
    bundle = clean_step()
    end = int(bundle.offsets[1])
    offsets = bundle.offsets.copy()
    offsets[1:] -= 1
    tokens = {name: np.delete(column, end - 1) for name, column in bundle.tokens.items()}
    first = compare_steps(bundle, replace(bundle, offsets=offsets, tokens=tokens))[0]
    assert (first.stage, first.row, first.token) == ("samples", 0, end - 1)


def test_the_first_step_that_differs_is_named() -> None:
    steps = {
        number: with_facts(clean_step(seed=number), step=number) for number in (1, 2, 3)
    }
    others = steps | {number: change_row("rewards", 1)(steps[number]) for number in (2, 3)}
    runs = [
        {number: Loaded(step) for number, step in run.items()} for run in (steps, others)
    ]
    parting = compare_runs(*runs)
    assert parting.compared == (1, 2)
    assert {difference.step for difference in parting.differences} == {2}
    with pytest.raises(DataError, match="no step in common"):
        compare_runs({1: runs[0][1]}, {2: runs[1][2]})


def test_columns_of_one_side_are_named() -> None:
    bundle = clean_step()
    tokens = {
        name: column for name, column in bundle.tokens.items() if name != "advantages"
    }
    parting = compare_runs({1: Loaded(bundle)}, {1: Loaded(replace(bundle, tokens=tokens))})
    assert parting.differences == ()
    assert parting.missing == ("advantages",)
