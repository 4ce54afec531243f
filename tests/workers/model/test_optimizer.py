import pytest
import torch

from workers.config import OptimizerConfig
from workers.errors import ConfigError
from workers.model.optimizer import learning_rate_factor, make_optimizer, make_schedule, resume_schedule


def factors(config: OptimizerConfig, total_steps: int) -> list[float]:
    """Share of the peak learning rate used at each step, as torch's scheduler applies it."""
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(2, 2))], config)
    schedule = make_schedule(optimizer, config, total_steps)
    used = []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    return used


def test_warm_up_rises_in_equal_stairs_and_starts_above_zero():
    assert factors(OptimizerConfig(warmup_steps=3), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_and_cosine_fall_from_the_peak_towards_zero():
    assert factors(OptimizerConfig(schedule="linear"), 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert factors(OptimizerConfig(schedule="cosine"), 4) == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_linear_and_cosine_end_at_the_final_ratio_and_stay_there():
    ends_high = {"final_learning_rate_ratio": 0.2, "total_steps": 4}
    assert factors(OptimizerConfig(schedule="linear", **ends_high), 6) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert factors(OptimizerConfig(schedule="cosine", **ends_high), 6) == pytest.approx(
        [1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2, 0.2], abs=1e-6
    )


def test_a_schedule_resumes_where_it_was_and_goes_on_as_if_it_had_never_stopped():
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(2, 2))], config)
    schedule = make_schedule(optimizer, config, 8)
    resume_schedule(schedule, 3)
    used = []
    for _ in range(5):
        used.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    assert used == factors(config, 8)[3:]


def test_the_configured_end_wins_over_the_length_of_the_run_and_holds_after_it():
    config = OptimizerConfig(schedule="linear", total_steps=2)
    assert factors(config, 4) == pytest.approx([1, 0.5, 0, 0])
    assert learning_rate_factor(100, config, 2) == 0


def test_a_schedule_that_ends_within_its_warm_up_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps"):
        factors(OptimizerConfig(schedule="cosine", warmup_steps=5), 5)


def test_only_matrices_decay():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, vector], OptimizerConfig(learning_rate=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(vector.detach(), torch.ones(2))


def test_frozen_parameters_are_left_out():
    trainable, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = make_optimizer([trainable, frozen], OptimizerConfig())
    assert [parameter for group in optimizer.param_groups for parameter in group["params"]] == [trainable]
