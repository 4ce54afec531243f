"""Hashes of a sample's prefixes."""

import numpy as np

from workers.engine.prefix_hashes import hashed_places, prefix_hashes


def numbers(*ids: int, prompt_tokens: int = 2) -> list[int]:
    return np.frombuffer(
        prefix_hashes(np.array(ids, np.int32), prompt_tokens), "<u4"
    ).tolist()


def test_each_of_the_first_64_tokens_after_a_prompt_has_a_hash_and_a_few_of_the_rest():
    assert hashed_places(1).tolist() == hashed_places(0).tolist() == []
    assert hashed_places(4).tolist() == [1, 2, 3]
    assert hashed_places(75).tolist() == [*range(1, 65), 68, 72]
    places = hashed_places(100_000)
    assert len(places) < 200
    assert (np.diff(places)[64:] <= places[64:-1] / 16).all()


def test_hashes_are_the_same_in_every_process_and_of_all_tokens_before():
    assert numbers(1, 2, 3, 4) == [2203934742]
    assert numbers(1, 2, 3, 4)[0] != numbers(2, 1, 3, 4)[0]
    assert numbers(0, 0, 0, 9)[0] != numbers(0, 0, 1, 9)[0]
    assert numbers(1, 2, 3) == numbers(1, 2) == []


def test_prefixes_that_differ_in_one_token_have_other_hashes():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, 2000).astype(np.int32)
    hashes = np.frombuffer(prefix_hashes(ids, 0), "<u4")
    for place in rng.integers(0, 64, 200):
        changed = ids.copy()
        changed[place] ^= 1
        found = np.frombuffer(prefix_hashes(changed, 0), "<u4")
        assert (found[:place] == hashes[:place]).all()
        assert (found[place:] != hashes[place:]).all()
