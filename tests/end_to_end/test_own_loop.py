"""A loop of one's own over real engines and ranks: samples of published weights, gradients of a batch in
calls.
"""

import numpy as np

import ballast
from controller.observability.run_folder import RunFolder
from tests.refusals import refused
from workers.config.roles import SamplingConfig

CALLS = 3


def test_a_loop_of_ones_own_samples_learns_publishes_and_is_recorded(
    ray_session, settings: list[str]
) -> None:
    with ballast.open(
        overrides=[*settings, "run.name=own-loop", "run.checkpoint_every=1"]
    ) as run:
        first = run.sample(run.prompts(4), n=3)
        greedy = run.sample(
            [[5, 6, 7], "12+34="],
            sampling=SamplingConfig(temperature=0.0, max_new_tokens=8),
            seed=1,
        )
        before = run.forward(first.result().batch)
        batch, sampled = first.result().batch, first.result().sequences
        assert [len(each.ids) for each in sampled] == (
            batch["length"] - batch["prompt_tokens"]
        ).tolist()
        assert before.result().metrics["rollout_mismatch_max"] < 1e-3
        rows = before.result().log_probs
        for row, each in zip(rows, sampled, strict=True):
            np.testing.assert_allclose(
                row[len(each.prompt_ids) :], each.log_probs, atol=1e-3
            )
        columns = {"advantages": np.linspace(-1, 1, len(batch))}
        for part in np.array_split(np.arange(len(batch)), CALLS):
            run.forward_backward(batch, rows=part, columns=columns)
        ahead = run.sample(
            [[5, 6, 7]], sampling=SamplingConfig(temperature=0.0, max_new_tokens=8)
        )
        stepped, version = run.step(learning_rate=1e-2), run.publish()
        after = run.sample(
            [[5, 6, 7]], sampling=SamplingConfig(temperature=0.0, max_new_tokens=8)
        )
        assert stepped.result()["learning_rate"] == 1e-2 and version.result() == 1
        old, same, new = (each.result().sequences[0] for each in (greedy, ahead, after))
        # Asked for before the weights were published.
        np.testing.assert_array_equal(same.ids, old.ids)
        assert new.ids.tolist() != old.ids.tolist() or not np.allclose(
            new.log_probs, old.log_probs, atol=1e-3
        )
        with refused("role='critic'"):
            run.forward(batch, role="critic")
        assert run.validate().result().keys() >= {"reward"}
        folder = run.export("mine").result()
    assert (folder / "config.json").is_file() and (run.folder / "report.html").is_file()
    (row,) = RunFolder(run.folder).metrics
    assert row["policy/learning_rate"] == 1e-2 and row["rollout/samples"] == 15
    resumed = [*settings, "run.name=own-loop", "run.resume=auto"]
    with ballast.open(overrides=resumed) as run:
        assert run.steps == 1
        (found,) = (
            run.sample(
                [[5, 6, 7]], sampling=SamplingConfig(temperature=0.0, max_new_tokens=8)
            )
            .result()
            .sequences
        )
        np.testing.assert_array_equal(found.ids, new.ids)


def test_a_setting_that_the_loop_itself_decides_is_refused(settings: list[str]) -> None:
    with (
        refused("rollout.max_staleness=1"),
        ballast.open(overrides=[*settings, "rollout.max_staleness=1"]),
    ):
        raise AssertionError
