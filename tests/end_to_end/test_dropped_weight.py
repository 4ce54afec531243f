"""A run whose policy leaves a weight out of an update stops: no engine samples with old and new weights mixed."""

import pytest

from tests.end_to_end.test_whole_loop import run_loop
from workers.errors import RolloutError


@pytest.mark.slow
def test_an_update_that_leaves_a_weight_out_stops_the_run_and_is_named(ray_session, settings: list[str]) -> None:
    """The policy is changed in its own process, by the module of a custom loss."""
    overrides = [*settings, "run.name=dropped", "policy.ranks=1", "data.validation=''", "validation.prompts=0"]
    overrides += ["algorithm.loss.name=custom", "algorithm.loss.function=tests.end_to_end.dropping:loss"]
    overrides += ["resources.user_code_timeout_s=300"]  # it imports all that a policy's actor does
    with pytest.raises(RolloutError, match=r"a part of model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        run_loop(overrides)
