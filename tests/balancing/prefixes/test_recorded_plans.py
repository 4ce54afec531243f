"""Plans of sequences that share prompts, branches and images."""

from typing import Any

import pytest

from tests.balancing.fixed_batches import recorded_times, total_time
from tests.balancing.test_trees import grown, tree_of

OPTIONS: dict[str, dict[str, Any]] = {
    "shared prompts": {"cap": 2.0, "shares": True},
    "shared prompts, tight cap": {"cap": 1.0, "shares": True},
    "images": {"cap": 2.0, "has_images": True, "max_patches": 5000},
}
RECORDED = {
    "shared prompts": (
        154_980_443,
        6_874_966_000,
        2_265_075_047,
        1_045_724_957,
        163_124_681,
    ),
    "shared prompts, tight cap": (
        196_047_696,
        7_108_409_878,
        2_727_608_804,
        1_123_474_525,
        197_607_021,
    ),
    "images": (264_203_337, 6_619_099_915, 3_826_001_206, 1_069_061_976, 163_868_673),
}
test_plans_take_the_recorded_time = recorded_times(OPTIONS, RECORDED)


def tree_time(max_tokens: int) -> int:
    sequences = grown(seed=3, groups=6, size=8)
    lengths = [len(sequence) for sequence in sequences]
    return total_time(lengths, ranks=4, max_tokens=max_tokens, **tree_of(sequences, 6))


@pytest.mark.parametrize(
    ("max_tokens", "recorded"), [(150, 296806), (300, 267868), (1000, 267868)]
)
def test_trees_take_the_recorded_time(max_tokens: int, recorded: int) -> None:
    assert tree_time(max_tokens) == recorded
