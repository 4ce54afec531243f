"""Evening out groups by moving a sequence, or exchanging two, under caps.

    heaviest group --- a ---> lighter group        the pair's difference `gap` shrinks the most when
                   <-- b ---                       weight(a) - weight(b) is nearest to gap / 2

Every exchange lowers the heavier of two groups and never raises a group above it, so the search ends.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Groups = list[list[int]]

TOLERANCE = 1e-5
"""Groups within this of the mean, relatively, are even."""
PARTNERS = 12
"""Lightest groups that a heavy one tries before it is left as it is; where only the heaviest counts, it tries all."""
FAILURES = 64
"""Heavy groups in a row that no exchange lowers before the search ends: what is left is lumpy by nature."""


@dataclass(frozen=True)
class Limits:
    """What no exchange may break: tokens and sequences of a group, and counts that differ by at most one."""

    max_tokens: float = np.inf
    max_sequences: float = np.inf
    equal_size: bool = False


def even_out(
    groups: Groups,
    weights: NDArray[np.float64],
    sizes: NDArray[np.int64],
    limits: Limits,
    *,
    only_heaviest: bool = False,
) -> Groups:
    """Lower the heaviest groups by exchanges until they are even or no exchange helps.

    groups: index lists that keep `limits`. weights: float64 [n], what is evened. sizes: int64 [n], tokens.
    only_heaviest: stop once the heaviest group cannot be lowered; otherwise go on with the next heaviest.
    Returns new groups, in the same order; they keep `limits`, and none that held an index is empty.
    """
    search = _Search(groups, weights, sizes, limits)
    open_groups = np.ones(len(groups), bool)
    level = search.loads.mean() * (1 + TOLERANCE)
    if only_heaviest:
        level = max(level, max((weights[group].max() for group in groups if group), default=0.0))
    failures = 0
    for _ in range(20 * len(groups) + 200):
        heavy = int(np.argmax(np.where(open_groups, search.loads, -np.inf)))
        if search.loads[heavy] <= level or not open_groups.any():
            break
        if len(search.groups[heavy]) < 2:  # alone: whatever it is exchanged with, the pair's maximum stays
            open_groups[heavy] = False
        elif search.relieve(heavy, len(groups) if only_heaviest else PARTNERS):
            failures = 0
        else:
            open_groups[heavy] = False
            failures += 1
        if failures == FAILURES or (only_heaviest and not open_groups[heavy]):
            break
    return search.groups


class _Search:
    """The groups, their loads (weight) and tokens, kept up to date exchange by exchange."""

    def __init__(self, groups: Groups, weights: NDArray[np.float64], sizes: NDArray[np.int64], limits: Limits) -> None:
        self.groups = [list(group) for group in groups]
        self._weights, self._sizes, self._limits = weights, sizes, limits
        self.loads = np.array([weights[group].sum() for group in self.groups], np.float64)
        self._tokens = np.array([sizes[group].sum() for group in self.groups], np.int64)

    def relieve(self, heavy: int, partners: int) -> bool:
        """Make the best exchange of `heavy` with the first of the lightest `partners` that allows one."""
        count = min(partners, len(self.groups))
        lightest = np.argpartition(self.loads, count - 1)[:count]
        for light in lightest[np.argsort(self.loads[lightest], kind="stable")]:
            found = self._best_exchange(heavy, int(light))
            if found is not None:
                self._exchange(heavy, int(light), *found)
                return True
        return False

    def _best_exchange(self, heavy: int, light: int) -> tuple[int, int] | None:
        """Positions in the two groups; the second is -1 for a move. None where nothing helps."""
        gap = self.loads[heavy] - self.loads[light]
        if gap <= self.loads[heavy] * 1e-9:
            return None
        give, take = self.groups[heavy], self.groups[light]
        # The last column stands for nothing given back: a move.
        distance = np.abs(np.subtract.outer(self._weights[give], np.append(self._weights[take], 0.0)) - gap / 2)
        growth = np.subtract.outer(self._sizes[give], np.append(self._sizes[take], 0))
        distance[growth > self._limits.max_tokens - self._tokens[light]] = np.inf
        distance[-growth > self._limits.max_tokens - self._tokens[heavy]] = np.inf
        if len(take) + 1 > self._limits.max_sequences or (self._limits.equal_size and len(give) <= len(take)):
            distance[:, -1] = np.inf
        best = int(np.argmin(distance))
        if not distance.flat[best] < gap / 2 * (1 - 1e-9):
            return None
        row, column = divmod(best, len(take) + 1)
        return row, column if column < len(take) else -1

    def _exchange(self, heavy: int, light: int, given: int, taken: int) -> None:
        give, take = self.groups[heavy], self.groups[light]
        moved = give.pop(given)
        if taken >= 0:
            give.append(take.pop(taken))
        take.append(moved)
        for group in (heavy, light):
            self.loads[group] = self._weights[self.groups[group]].sum()
            self._tokens[group] = self._sizes[self.groups[group]].sum()
