"""The number of engines of a run: fixed, or a range within which engines come and go, `1..4`."""

import re
from dataclasses import dataclass
from typing import Any

from workers.errors import ConfigError

Count = int | str
"""Type of a setting that is a whole number or `MIN..MAX`."""

MOST_ENGINES = 100_000

_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def is_range(value: Any) -> bool:
    """Whether a setting's value is written as `MIN..MAX`."""
    return isinstance(value, str) and _RANGE.fullmatch(value) is not None


@dataclass(frozen=True)
class EngineRange:
    """Engines that a run needs, and engines that it takes if the cluster has room."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum}..{self.maximum}" if self.is_elastic else f"{self.minimum}"

    @property
    def setting(self) -> Count:
        """The value of rollout.replicas."""
        return str(self) if self.is_elastic else self.minimum

    @property
    def is_elastic(self) -> bool:
        """Whether engines may be added and lost. Then each has a bundle that it reserves alone."""
        return self.minimum < self.maximum

    @property
    def words(self) -> str:
        """The number of engines, such as `1 engine` or `1..4 engines`."""
        return f"{self} engine{'' if self.maximum == 1 else 's'}"

    @property
    def words_at_start(self) -> str:
        """The engines that start with the run, such as `1 of 1..4 engines`."""
        return f"{self.minimum} of {self.words}"


def read_range(value: Count) -> EngineRange:
    """Read rollout.replicas. A number is a range of one.

    Raises ConfigError for a range without engines, in the wrong order, or above `MOST_ENGINES`.
    """
    if isinstance(value, int):
        return EngineRange(value, value)
    matched = _RANGE.fullmatch(value)
    if matched is None:
        raise ConfigError(
            f"rollout.replicas={value}: not a number or a range. Write 2, or 1..4."
        )
    minimum = int(matched[1])
    maximum = int(matched[2])
    problem = ""
    if minimum < 1:
        problem = "a run needs at least 1 engine"
    elif maximum < minimum:
        problem = "the range ends before it begins"
    elif maximum > MOST_ENGINES:
        problem = f"at most {MOST_ENGINES:,} engines are allowed"
    if problem:
        raise ConfigError(
            f"rollout.replicas={value}: {problem}. Write MIN..MAX, as in 1..4."
        )
    return EngineRange(minimum, maximum)
