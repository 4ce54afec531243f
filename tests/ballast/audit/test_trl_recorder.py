"""The recorder of TRL's GRPOTrainer writes what the trainer's loss read."""

from pathlib import Path

import numpy as np
import pytest

from ballast.audit import read_bundle
from tests.ballast.audit.trl_runs import END, record_run

RUNS = {
    "dapo": ({"loss_type": "dapo"}, "token_mean"),
    "grpo": ({"loss_type": "grpo", "beta": 0.1}, "sequence_mean_token_mean"),
    "bnpo": ({"loss_type": "bnpo", "gradient_accumulation_steps": 1}, "token_mean"),
    "bnpo of micro-batches": ({"loss_type": "bnpo"}, None),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "sequence_mean_token_sum_norm",
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 2.0, "scale_rewards": "batch"},
        "token_mean",
    ),
    "masked": (
        {"mask_truncated_completions": True, "max_completion_length": 24},
        "token_mean",
    ),
    "two iterations": (
        {"num_iterations": 2, "loss_type": "grpo"},
        "sequence_mean_token_mean",
    ),
    "two updates of a generated batch": (
        {"steps_per_generation": 4, "loss_type": "grpo"},
        None,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_bundle_holds_what_the_loss_read(name: str, tmp_path: Path) -> None:
    settings, aggregation = RUNS[name]
    paths = record_run(tmp_path, **settings)
    assert len(paths) == (1 if "steps_per_generation" in settings else 2)
    for path in paths:
        bundle = read_bundle(path)
        algorithm = bundle.facts.algorithm
        if aggregation is not None:
            assert algorithm.aggregation == aggregation
        offsets = bundle.offsets
        mask = bundle.token_column("loss_mask")
        assert bundle.row_count % algorithm.group_size == 0
        for row in range(bundle.row_count):
            ids = bundle.token_column("token_ids")[offsets[row] : offsets[row + 1]]
            prompt_length = bundle.row_column("prompt_length")[row]
            completion = ids[prompt_length:]
            assert bundle.row_column("rewards")[row] == np.sum(completion % 2 == 0) / 8
            assert bundle.row_column("truncated")[row] == (completion[-1] != END)
            is_masked = settings.get("mask_truncated_completions") and completion[-1] != END
            row_mask = mask[offsets[row] : offsets[row + 1]]
            assert row_mask.tolist() == [0] * prompt_length + [0 if is_masked else 1] * len(
                completion
            )
        trained = mask.astype(bool)
        old = bundle.token_column("old_logprobs")[trained]
        np.testing.assert_allclose(
            bundle.token_column("sampler_logprobs")[trained], old, atol=2e-5
        )
        assert bundle.has("reference_logprobs") == bool(algorithm.kl_coefficient)
        assert len(bundle.facts.gradient_norm) == len(bundle.facts.loss)
        assert min(bundle.facts.gradient_norm) > 0


def test_a_bundle_names_what_trl_does_not_compute(tmp_path: Path) -> None:
    paths = record_run(tmp_path, loss_type="sapo", logging_steps=2)
    bundle = read_bundle(paths[0])
    assert {"reference_logprobs", "gradient_norm", "algorithm.loss"} <= set(bundle.missing)
    assert bundle.facts.algorithm.loss is None
