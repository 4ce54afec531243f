"""What samples begin with alike, from the hashes of their beginnings, as a plan counts it.

    prompt_hash, prompt_tokens --> groups with a prefix                        plan_batch(prefix_groups, prefix_lengths)
    prefix_hashes --> order of each group's tree, depth of neighbours in it    plan_batch(tree_order, tree_depths)

A row of a model (workers/model/shared_prefixes.py) shares a beginning unless it is a few tokens longer than one that
it shares already. A plan counts as many tokens fewer, so that no row has more cells than the plan says.
"""

import numpy as np

from balancing.prefixes import fewest_worth_sharing
from workers.rollout.prefix_hashes import hashed_places

Integers = np.ndarray


def shared_beginnings(
    prompts: Integers, prompt_tokens: Integers, lengths: Integers, hashes: np.ndarray, minimum: int
) -> dict[str, Integers]:
    """Arguments of `plan_batch` about what B samples begin with alike, int64 [B] each.

    prompts: int64 [B], equal for equal ones. prompt_tokens, lengths: int64 [B], of the prompt and of the whole sample.
    hashes: objects [B], bytes, those of `workers.rollout.prefix_hashes`. minimum: `model.min_shared_tokens`.
    """
    own = lengths - prompt_tokens
    fewest = np.maximum(fewest_worth_sharing(own), minimum)
    groups = np.unique(prompts, return_inverse=True)[1]
    prefixes = np.where(prompt_tokens < fewest, 0, prompt_tokens)
    table = _table(hashes)
    rows = np.lexsort((*table.T[::-1], groups, prefixes == 0))
    order = np.empty(len(rows), np.int64)
    order[rows] = np.arange(len(rows))
    return {
        "prefix_groups": groups,
        "prefix_lengths": prefixes,
        "tree_order": order,
        "tree_depths": _depths(table, rows, groups, prompt_tokens, own, fewest),
    }


def _table(hashes: np.ndarray) -> Integers:
    """int64 [B, places]: the hashes of each sample; where it has none, a negative number that no other sample has."""
    rows = [np.frombuffer(each, "<u4") for each in hashes]
    table = np.repeat(-1 - np.arange(len(rows))[:, None], max(map(len, rows)), axis=1)
    for row, found in enumerate(rows):
        table[row, : len(found)] = found
    return table


def _depths(
    table: Integers, rows: Integers, groups: Integers, prompt_tokens: Integers, own: Integers, fewest: Integers
) -> Integers:
    """int64 [B]: tokens that each sample counts as those of the one before it, in the order `rows`."""
    alike = np.zeros(len(rows), np.int64)
    if table.shape[1]:
        equal = np.minimum.accumulate(table[rows[1:]] == table[rows[:-1]], axis=1)
        alike[rows[1:]] = equal.sum(axis=1)
    places = np.append(0, hashed_places(int(own.max())))
    largest = np.zeros(groups.max() + 1, np.int64)
    np.maximum.at(largest, groups, fewest)  # of a group: depths of any two of its samples are minima of several
    depths: Integers = prompt_tokens + np.maximum(0, places[alike] - largest[groups] + 1)
    return depths
