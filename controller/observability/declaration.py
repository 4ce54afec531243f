"""The declaration of a metric: name, unit, meaning, kind, and how parts of it join."""

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache


class Kind(Enum):
    """GAUGE: the last value stands. COUNTER: values add up over steps. HISTOGRAM: values are counted by size."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Declaration:
    """One metric, or a family of metrics: those whose names fit one with `{label}`.

    joined: how the values of samples, micro-batches, mini-batches and ranks become the number of a step.
    when: the condition for a step to record it; empty if every step that trains does. so_far: a counter's value is that
    of the run so far, not of the step. boundaries: upper ends of a histogram's buckets, above 0, as Ray wants them.
    """

    name: str
    unit: str
    meaning: str
    joined: str = "one value"
    kind: Kind = Kind.GAUGE
    when: str = ""
    so_far: bool = False
    boundaries: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names in braces."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @property
    def exported_name(self) -> str:
        """Its name for Ray: `ballast_policy_loss`. Units are written out: https://prometheus.io/docs/practices/naming.

        Labels leave the name: `time/{phase}_s` is `ballast_time_seconds` with the label `phase`.
        """
        words = re.findall(r"[A-Za-z0-9]+", re.sub(r"\{\w+\}", "", self.name))
        if words[-1] == "s":
            words[-1] = "second" if "per" in words else "seconds"
        if self.unit == "share" and not {"share", "fraction"} & set(words):
            words.append("ratio")
        return "_".join(["ballast", *words])

    @property
    def series(self) -> str:
        """Its name in Prometheus; of a histogram what stands before `_bucket`, `_sum` and `_count`."""
        return f"ray_{self.exported_name}{'_total' if self.kind is Kind.COUNTER else ''}"

    def match(self, name: str) -> dict[str, str] | None:
        """The labels of `name`, a metric of this family; None if it is not of it."""
        found = _pattern(self.name).fullmatch(name)
        return found.groupdict() if found else None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", name)
    return re.compile("".join(f"(?P<{part}>.+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))
