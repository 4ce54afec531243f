"""Plans for pipelines."""

from typing import Any

from balancing.pipelines.pipeline import Pipeline
from tests.balancing.fixed_batches import recorded_times

OPTIONS: dict[str, dict[str, Any]] = {
    "pipeline": {"cap": 1.0, "pipeline": Pipeline(4, backward=1.0)},
    "chunks": {"cap": 1.5, "pipeline": Pipeline(2, 2, backward=1.0, overhead=100_000.0)},
}
RECORDED = {
    "pipeline": (55_854_670, 2_253_360_251, 1_226_257_057, 169_795_273, 12_198_260),
    "chunks": (55_236_537, 3_197_419_328, 1_229_488_662, 302_286_805, 18_415_150),
}
test_plans_take_the_recorded_time = recorded_times(OPTIONS, RECORDED)
