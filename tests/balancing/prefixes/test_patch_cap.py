"""Micro-batches above the cap on patches give away what does not fit, and nothing else."""

import numpy as np

from balancing.basics.grouping import Caps, Grouping
from balancing.prefixes.patch_cap import spread_patches
from balancing.search.assignment import Schedule

CAPS = Caps(10**6, 10**6)


def spread(group_of, patches, cap, work=None):
    """Return the micro-batch of each sequence after the spread, None if one has no room."""
    grouping = Grouping(np.array(group_of), max(group_of) + 1)
    alike = np.ones(len(patches))
    use = np.array([alike, alike if work is None else work, patches], float)
    schedule = Schedule(grouping, 1, start=None)
    after = spread_patches(schedule, use, use, np.arange(len(patches)), CAPS, cap)
    return None if after is None else after.grouping.group_of.tolist()


def test_sequences_that_fill_the_cap_exactly_stay():
    # 4 + 6 fill micro-batch 0. The second stays there, though micro-batch 2 is lighter and has room.
    after = spread([0, 0, 0, 1, 2], [4, 6, 7, 1, 1], cap=10, work=[5, 1, 1, 1, 1])
    assert after == [0, 0, 1, 1, 2]


def test_a_sequence_without_room_leaves_no_schedule():
    assert spread([0, 0, 1], [6, 6, 6], cap=10) is None
