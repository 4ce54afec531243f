"""Which tokens of an episode are whose."""

import numpy as np

from workers.reward import last_turn, turns


def test_turns_and_observations_are_told_apart_by_the_loss_mask() -> None:
    mask = np.array([True, True, False, True, False, False])
    assert turns(mask) == [
        ("policy", slice(0, 2)),
        ("environment", slice(2, 3)),
        ("policy", slice(3, 4)),
        ("environment", slice(4, 6)),
    ]
    assert last_turn(mask) == slice(3, 4)


def test_a_response_of_one_turn_has_no_turns_to_tell_apart() -> None:
    assert turns(np.ones(3, bool)) == []
