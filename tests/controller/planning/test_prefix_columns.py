"""What samples begin with alike, from the hashes of their beginnings, as a plan counts it."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import plan_batch
from controller.planning.planner import prefix_columns
from workers.batch.dataproto import DataProto
from workers.engine.prefix_hashes import prefix_hashes
from workers.model.rows.prefix_rows import pack_shared

PROMPT = list(range(100, 110))


def known(
    prompts: list[list[int]], responses: list[list[int]], minimum: int = 1
) -> dict[str, np.ndarray]:
    pairs = list(zip(prompts, responses, strict=True))
    hashes = [
        prefix_hashes(np.array(prompt + response, np.int32), len(prompt))
        for prompt, response in pairs
    ]
    return prefix_columns(
        np.array([hash(tuple(prompt)) for prompt in prompts]),
        np.array([len(prompt) for prompt in prompts]),
        np.array([len(prompt + response) for prompt, response in pairs]),
        np.array(hashes, dtype=object),
        minimum,
    )


def counted(responses: list[list[int]], minimum: int = 1) -> int:
    """Tokens of one micro-batch of samples of PROMPT, as planned."""
    lengths = [len(PROMPT + response) for response in responses]
    tree = known([PROMPT] * len(responses), responses, minimum)
    return int(
        plan_batch(lengths, ranks=1, max_tokens=10**6, **tree).computed_lengths.sum()
    )


def test_different_responses_share_their_prompt():
    assert counted([[first, *range(10)] for first in (1, 2, 3)]) == 10 + 3 * 11


def test_what_responses_begin_with_alike_is_counted_once():
    assert counted([[5, 6, 7, last] for last in (1, 2, 3)]) == 10 + 3 + 3
    assert counted([[5, 6, 7, 8]] * 3) == 10 + 3 + 3  # the last token of each is its own


def test_a_tree_of_any_depth_is_counted():
    assert counted([[5, 6, 1], [5, 6, 7, 1], [5, 6, 7, 8, 1], [9, 1]]) == 10 + 5 + 4


def test_of_shared_tokens_fewer_count_than_a_row_may_leave_out():
    responses = [[5, 6, 7, last, *range(8)] for last in (1, 2)]
    assert counted(responses, minimum=1) == 10 + 3 + 2 * 9
    assert counted(responses, minimum=3) == 10 + 3 + 2 * 9 + 2
    assert counted(responses, minimum=8) == 10 + 2 * 12


def test_prompts_that_do_not_pay_are_not_counted():
    assert counted([[first, *range(200)] for first in (1, 2)]) == 2 * 211


def test_a_sample_that_shares_nothing_does_not_join_its_neighbours():
    """The longest response, between two in order, has too many tokens of its own for the prompt to pay."""
    responses = [[5, 1], [5, 5, *range(200)], [6, 1]]
    assert counted(responses) == 12 + (10 + 202) + 2


def responses_that_branch(seed: int, count: int, longest: int) -> list[list[int]]:
    """Each follows another one up to some token."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, 3, rng.integers(1, longest)).tolist()]
    for _ in range(count - 1):
        before = found[rng.integers(len(found))]
        kept = before[: rng.integers(len(before) + 1)]
        found.append([*kept, *rng.integers(0, 3, rng.integers(0, longest)).tolist()] or [0])
    return [[*response, 9] for response in found]  # 9 ends a response


@given(
    st.integers(0, 2**31),
    st.integers(1, 12),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([20, 60, 300]),
)
@settings(deadline=None, max_examples=300)
def test_a_row_has_no_more_cells_than_the_plan_counts(seed, count, minimum, longest):
    """Whichever samples of which prompts a micro-batch has."""
    rng = np.random.default_rng(seed)
    prompts = [[200 + number] * int(rng.integers(1, 30)) for number in range(3)]
    pairs = [
        (prompt, response)
        for prompt in prompts
        for response in responses_that_branch(int(rng.integers(2**31)), count, longest)
    ]
    ids = [torch.tensor(prompt + response) for prompt, response in pairs]
    chosen = rng.permutation(len(pairs))[: rng.integers(1, len(pairs) + 1)]
    tree = known(*map(list, zip(*pairs, strict=True)), minimum)
    plan = plan_batch(
        [len(each) for each in ids],
        ranks=2,
        max_tokens=max(map(len, ids)) * 2,
        mini_batches=[chosen, rest]
        if len(rest := np.setdiff1d(np.arange(len(pairs)), chosen))
        else [chosen],
        **tree,
    )
    for mini_batch in plan.mini_batches:
        for step in mini_batch.micro_steps:
            for rows in filter(len, step.ranks):
                row = [
                    {"input_ids": ids[i], "loss_mask": torch.arange(len(ids[i])) > 0}
                    for i in rows
                ]
                cells = sum(pack_shared(DataProto.from_list(row), minimum=minimum).lengths)
                assert cells <= plan.computed_lengths[rows].sum()
