"""Plans of fixed batches take the time that they took when this table was written.

A search can lose quality without a plan that is wrong. The times are those of all micro-steps, each as long as
on its heaviest rank, or of a pipeline. The cost model has whole numbers, whose sums are exact. A better plan is
a new number here, in the commit that makes it better.
"""

from typing import Any

import numpy as np
import pytest

from balancing import CostModel, plan_batch
from balancing.analysis.distributions import draw
from balancing.context_degrees import ContextDegrees
from balancing.pipelines.pipeline import Pipeline
from tests.balancing.test_trees import grown, tree_of

COST_MODEL = CostModel(1000.0, 1.0, image_linear=500.0, image_quadratic=2.0, patches=4.0)
LENGTHS = ("lognormal", "reasoning", "agentic", "uniform", "grouped")
OPTIONS: dict[str, dict[str, Any]] = {
    "wide cap": {"cap": 2.0},
    "tight cap": {"cap": 1.0},
    "few sequences": {"cap": 2.0, "max_sequences": 3},
    "light ends": {"cap": 1.5, "order": "small_ends"},
    "padded": {"cap": 2.0, "layout": "padded"},
    "aligned": {"cap": 1.5, "length_multiple": 64, "multiple_of": 2},
    "degrees": {"cap": 0.5, "context_degrees": ContextDegrees(4, 0.25)},
    "pipeline": {"cap": 1.0, "pipeline": Pipeline(4, backward=1.0)},
    "chunks": {"cap": 1.5, "pipeline": Pipeline(2, 2, backward=1.0, overhead=100_000.0)},
    "in order": {"cap": 1.0, "algorithm": "none"},
    "in order, at least": {"cap": 4.0, "algorithm": "none", "min_count": 7},
    "verl": {"cap": 1.0, "algorithm": "verl"},
    "roll": {"cap": 2.0, "algorithm": "roll"},
    "mindspeed": {"cap": 2.0, "algorithm": "mindspeed_rl"},
    "many": {"cap": 2.0, "sequences": 3000, "ranks": 16},
    "shared prompts": {"cap": 2.0, "shares": True},
    "shared prompts, tight cap": {"cap": 1.0, "shares": True},
    "images": {"cap": 2.0, "has_images": True, "max_patches": 5000},
}


def plan_time(lengths_name: str, cap: float, *, sequences: int = 96, ranks: int = 4, **options: Any) -> int:
    lengths = draw(lengths_name, sequences, 5)
    if options.pop("shares", False):
        prompts = np.repeat(draw("uniform", sequences // 8, 6) // 2, 8)
        options["prefix_groups"] = np.repeat(np.arange(sequences // 8), 8)
        options["prefix_lengths"] = prompts
        lengths = lengths + prompts
    if options.pop("has_images", False):
        lengths = lengths + 1200
        options["images"] = [
            [(2, 100)] * (row % 5 > 2) + [(200, 10 * row)] for row in range(1, sequences + 1)
        ]
    longest = round_to_64(int(lengths.max()))
    return total_time(lengths, ranks=ranks, max_tokens=int(cap * longest), **options)


def round_to_64(tokens: int) -> int:
    return -(-tokens // 64) * 64


def total_time(lengths: Any, **options: Any) -> int:
    plan = plan_batch(lengths, cost_model=COST_MODEL, **options)
    return round(plan.predicted_makespans().sum())


def tree_time(max_tokens: int) -> int:
    sequences = grown(seed=3, groups=6, size=8)
    lengths = [len(sequence) for sequence in sequences]
    return total_time(lengths, ranks=4, max_tokens=max_tokens, **tree_of(sequences, 6))


RECORDED = {
    "wide cap": (61_870_814, 5_840_933_744, 1_697_563_218, 579_452_825, 34_700_101),
    "tight cap": (72_792_854, 5_855_273_942, 2_064_487_691, 596_843_735, 36_103_954),
    "few sequences": (83_023_958, 5_932_124_738, 2_237_496_521, 581_566_010, 36_625_162),
    "light ends": (66_947_792, 5_840_933_744, 1_760_111_215, 585_137_702, 35_429_325),
    "padded": (79_253_169, 6_457_702_992, 2_318_019_315, 655_331_541, 43_239_059),
    "aligned": (67_296_775, 5_840_933_744, 1_830_049_829, 585_453_311, 35_826_003),
    "degrees": (50_889_229, 5_775_728_176, 1_716_629_264, 594_017_080, 36_099_372),
    "pipeline": (55_854_670, 2_253_360_251, 1_226_257_057, 169_795_273, 12_198_260),
    "chunks": (55_236_537, 3_197_419_328, 1_229_488_662, 302_286_805, 18_415_150),
    "in order": (106_429_318, 12_199_969_255, 2_912_880_854, 1_019_664_273, 80_719_230),
    "in order, at least": (115_067_388, 13_350_519_816, 3_675_936_762, 851_849_993, 79_152_616),
    "verl": (79_570_055, 5_918_992_276, 2_192_255_341, 603_978_268, 36_582_486),
    "roll": (84_398_497, 6_639_058_944, 2_241_593_658, 622_507_976, 38_042_803),
    "mindspeed": (76_930_626, 5_934_358_258, 2_047_001_776, 593_554_125, 35_928_042),
    "many": (609_937_328, 46_178_491_216, 12_839_729_866, 5_012_176_124, 551_354_026),
    "shared prompts": (154_980_443, 6_874_966_000, 2_265_075_047, 1_045_724_957, 163_124_681),
    "shared prompts, tight cap": (196_047_696, 7_108_409_878, 2_727_608_804, 1_123_474_525, 197_607_021),
    "images": (264_203_337, 6_619_099_915, 3_826_001_206, 1_069_061_976, 163_868_673),
}
"""Of `LENGTHS`, in turn."""


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_plans_take_the_recorded_time(name: str, lengths: str) -> None:
    assert plan_time(lengths, **OPTIONS[name]) == RECORDED[name][LENGTHS.index(lengths)]


@pytest.mark.parametrize(("max_tokens", "recorded"), [(150, 296806), (300, 267868), (1000, 267868)])
def test_trees_take_the_recorded_time(max_tokens: int, recorded: int) -> None:
    assert tree_time(max_tokens) == recorded
