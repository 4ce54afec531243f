"""Who owns memory of which GPU, and what everybody did: see `gpus`."""

from collections.abc import Sequence


class OverlapError(Exception):
    """Two owners would use the memory of one GPU at the same time."""


class Ledger:
    """owned: {(gpu, owner): what}. events: (actor, what it did), in order."""

    def __init__(self) -> None:
        self.owned: dict[tuple[int, str], set[str]] = {}
        self.events: list[tuple[str, str]] = []

    def record(self, actor: str, what: str) -> None:
        self.events.append((actor, what))

    def take(
        self, gpus: Sequence[int], owner: str, what: str, *, beside: Sequence[str]
    ) -> None:
        """Raises OverlapError if anybody else owns anything there but what is named in `beside`."""
        for gpu in gpus:
            for (where, other), held in self.owned.items():
                if where == gpu and other != owner and held - set(beside):
                    raise OverlapError(
                        f"GPU {gpu}: {owner} takes {what} while {other} has {sorted(held)}"
                    )
            self.owned.setdefault((gpu, owner), set()).add(what)

    def give(self, gpus: Sequence[int], owner: str, *what: str) -> None:
        for gpu in gpus:
            self.owned.get((gpu, owner), set()).difference_update(what)

    def forget(self) -> None:
        """All processes have ended."""
        self.owned.clear()

    def of(self, *prefixes: str) -> list[str]:
        """What actors whose names begin so did, repetitions in a row once."""
        deeds = [deed for actor, deed in self.events if actor.startswith(prefixes)]
        return [deed for i, deed in enumerate(deeds) if i == 0 or deed != deeds[i - 1]]
