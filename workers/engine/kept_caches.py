"""Which keys and values outlive an update of weights, and which samples share them.

    request of a sample --salt--> vLLM's prefix cache: shared by samples that began after the same update
    update --too_old?--> running requests keep their keys and values, or compute them again

A later turn continues the cache of its sample until that is too old. New samples never read old keys and
values.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from workers.config.roles import RolloutConfig


class KeptCaches:
    """Ages count updates. oldest: that keys and values may have."""

    def __init__(self, config: RolloutConfig) -> None:
        limits = {
            "recompute": 0.0,
            "auto": float(config.max_staleness),
            "keep": float("inf"),
        }
        self.oldest = limits[config.kv_cache_after_update]
        self._updates = 0
        # By salt: the update after which its keys and values were computed.
        self._computed: dict[int, int] = {}
        self._salts: dict[int, int] = {}  # by a sample's seed
        self._running: Counter[int] = Counter()  # requests by salt

    @contextmanager
    def request(self, seed: int) -> Iterator[str]:
        """Yield the salt of a request, which runs until the block ends. seed: the sample's."""
        salt = self._salts.get(seed, self._updates)
        if self._age(salt) > self.oldest:
            salt = self._updates
        self._salts[seed] = salt
        self._computed.setdefault(salt, self._updates)
        self._running[salt] += 1
        try:
            yield str(salt)
        finally:
            self._running[salt] -= 1

    def begin_update(self) -> bool:
        """Count an update. Returns whether running requests must compute their keys and values again."""
        self._updates += 1
        too_old = any(
            self._age(salt) > self.oldest
            for salt, requests in self._running.items()
            if requests
        )
        if too_old:
            self._computed = dict.fromkeys(self._computed, self._updates)
        return too_old

    def end(self, seed: int) -> None:
        """Forget a sample."""
        self._salts.pop(seed, None)

    def _age(self, salt: int) -> int:
        return self._updates - self._computed.get(salt, self._updates)
