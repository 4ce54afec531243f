"""Plans by every algorithm, in both layouts, with tight and wide caps."""

from typing import Any

from balancing.context_degrees import ContextDegrees
from tests.balancing.fixed_batches import recorded_times

OPTIONS: dict[str, dict[str, Any]] = {
    "wide cap": {"cap": 2.0},
    "tight cap": {"cap": 1.0},
    "few sequences": {"cap": 2.0, "max_sequences": 3},
    "light ends": {"cap": 1.5, "order": "small_ends"},
    "padded": {"cap": 2.0, "layout": "padded"},
    "aligned": {"cap": 1.5, "length_multiple": 64, "multiple_of": 2},
    "degrees": {"cap": 0.5, "context_degrees": ContextDegrees(4, 0.25)},
    "in order": {"cap": 1.0, "algorithm": "none"},
    "in order, at least": {"cap": 4.0, "algorithm": "none", "min_count": 7},
    "verl": {"cap": 1.0, "algorithm": "verl"},
    "roll": {"cap": 2.0, "algorithm": "roll"},
    "mindspeed": {"cap": 2.0, "algorithm": "mindspeed_rl"},
    "many": {"cap": 2.0, "sequences": 3000, "ranks": 16},
}
RECORDED = {
    "wide cap": (61_870_814, 5_840_933_744, 1_697_563_218, 579_452_825, 34_700_101),
    "tight cap": (72_792_854, 5_855_273_942, 2_064_487_691, 596_843_735, 36_103_954),
    "few sequences": (83_023_958, 5_932_124_738, 2_237_496_521, 581_566_010, 36_625_162),
    "light ends": (66_947_792, 5_840_933_744, 1_760_111_215, 585_137_702, 35_429_325),
    "padded": (79_253_169, 6_457_702_992, 2_318_019_315, 655_331_541, 43_239_059),
    "aligned": (67_296_775, 5_840_933_744, 1_830_049_829, 585_453_311, 35_826_003),
    "degrees": (50_889_229, 5_775_728_176, 1_716_629_264, 594_017_080, 36_099_372),
    "in order": (106_429_318, 12_199_969_255, 2_912_880_854, 1_019_664_273, 80_719_230),
    "in order, at least": (
        115_067_388,
        13_350_519_816,
        3_675_936_762,
        851_849_993,
        79_152_616,
    ),
    "verl": (79_570_055, 5_918_992_276, 2_192_255_341, 603_978_268, 36_582_486),
    "roll": (84_398_497, 6_639_058_944, 2_241_593_658, 622_507_976, 38_042_803),
    "mindspeed": (76_930_626, 5_934_358_258, 2_047_001_776, 593_554_125, 35_928_042),
    "many": (609_937_328, 46_178_491_216, 12_839_729_866, 5_012_176_124, 551_354_026),
}
test_plans_take_the_recorded_time = recorded_times(OPTIONS, RECORDED)
