from controller.training_loop import Outcome


def test_the_summary_has_medians_over_steps() -> None:
    steps = tuple({"time/step_s": s, "throughput/tokens_per_s": 100 / s} for s in (1.0, 2.0, 10.0))
    summary = Outcome({"reward": 0.1}, {"reward": 0.5}, steps, last_step=9).summary()
    assert (summary["seconds_per_step"], summary["tokens_per_second"]) == (2.0, 50.0)
    assert summary["validation"]["after"] == {"reward": 0.5}
    assert summary["steps"] == 9  # also of those that came before the run went on from a checkpoint
