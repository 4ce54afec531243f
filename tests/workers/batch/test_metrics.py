import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batch.metrics import Metric, merge, results

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(VALUES, st.integers(1, 5))
def test_merging_parts_equals_reducing_the_whole(values: list[float], parts: int) -> None:
    merged = results(
        merge(
            {
                "sum": Metric.sum(math.fsum(chunk)),
                "mean": Metric.mean(math.fsum(chunk), len(chunk)),
                "max": Metric.max(max(chunk)),
                "min": Metric.min(min(chunk)),
            }
            for chunk in (values[i::parts] for i in range(parts))
            if chunk
        )
    )
    assert merged["sum"] == pytest.approx(math.fsum(values), abs=1e-6)
    assert merged["mean"] == pytest.approx(math.fsum(values) / len(values), abs=1e-6)
    assert (merged["max"], merged["min"]) == (max(values), min(values))


@pytest.mark.parametrize("other", [Metric.sum(1), Metric.mean(1, 2, "sequences")])
def test_means_join_only_means_over_the_same_things(other: Metric) -> None:
    assert math.isnan(Metric.mean(0.0, 0.0).result())
    with pytest.raises(ValueError):
        merge([{"x": Metric.mean(1, 2, "tokens")}, {"x": other}])
    joined = merge(
        [{"x": Metric.mean(1, 2, "tokens")}, {"x": Metric.mean(3, 2, "tokens")}]
    )["x"]
    assert (joined.result(), joined.weight, joined.count) == (1.0, 4.0, "tokens")
