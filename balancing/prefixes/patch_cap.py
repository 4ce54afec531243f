"""Keep a cap on the image patches of a micro-batch.

schedule under the other caps --> micro-batches above the cap --> their groups with most patches move,
                                      each to the lightest micro-batch with room --> else more steps
"""

from dataclasses import replace

import numpy as np

from balancing.basics.grouping import Caps, Floats, Grouping, Integers
from balancing.search.assignment import Schedule

MORE_STEPS = 8
"""If a group finds no room, there is one micro-step more, and one for each so many."""


def spread_patches(
    schedule: Schedule,
    alone: Floats,
    computed: Floats,
    group: Integers,
    caps: Caps,
    max_patches: int,
) -> Schedule | None:
    """Move sequences out of micro-batches with too many patches. Returns None if one finds no room.

    alone, computed: float64 [3, n], tokens, work and patches of each sequence by itself, and without what
    others of its micro-batch compute. group: int64 [n], sequences of a group may share images.
    """
    group_of = schedule.grouping.group_of
    count = schedule.grouping.count
    if (np.bincount(group_of, computed[2], count) <= max_patches).all():
        return schedule
    piece = np.unique(group_of * len(group_of) + group, return_inverse=True)[1]
    divided = np.bincount(piece, computed[2])[piece] > max_patches
    piece[divided] = piece.max() + 1 + np.arange(np.count_nonzero(divided))
    columns = [*np.where(divided, alone, computed), np.ones(len(piece))]
    use = np.stack([np.bincount(piece, column) for column in columns])
    place = np.full(piece.max() + 1, -1)
    place[piece] = group_of
    order = np.lexsort((use[2], place))[np.count_nonzero(place < 0) :]
    so_far = np.cumsum(use[2, order])
    begins = np.searchsorted(place[order], place[order])
    moved = order[so_far - so_far[begins] + use[2, order[begins]] > max_patches]
    place[moved] = -1
    total = np.stack([np.bincount(place + 1, column, count + 1)[1:] for column in use])
    most = np.array([caps.max_tokens, np.inf, max_patches, caps.max_sequences])
    for piece_number in moved[np.argsort(-use[2, moved], kind="stable")]:
        fits = (total + use[:, [piece_number]] <= most[:, None]).all(axis=0)
        if not fits.any():
            return None
        place[piece_number] = np.argmin(np.where(fits, total[1], np.inf))
        total[:, place[piece_number]] += use[:, piece_number]
    return replace(schedule, grouping=Grouping(place[piece], count))
