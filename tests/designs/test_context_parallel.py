"""C: context parallelism, from a configuration."""

import numpy as np
import pytest

from tests.controller.config_workspace import refusal
from tests.designs.configured import SMALL, Result, compute, configuration
from tests.end_to_end.processes import ROOT
from tests.workers.model.ranks import RankPool

METHODS = ("ulysses", "ring")


def shared(method: str, size: int = 2) -> tuple[str, ...]:
    name = "policy.parallel.context_parallel"
    return "policy.data_parallel=1", f"{name}={size}", f"{name}_method={method}"


@pytest.fixture(scope="module")
def alone(ranks: RankPool, workspace, request) -> Result:
    """By one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        return compute(
            ranks, str(workspace / "config.yaml"), *SMALL, "policy.data_parallel=1"
        )


@pytest.mark.parametrize("method", METHODS)
def test_c1_c6_p5_losses_and_log_probs_are_those_of_one_rank(
    ranks: RankPool, file: str, alone: Result, method: str
) -> None:
    """Whole and in order on every rank; the gradient's norm says that they carry it."""
    result = compute(ranks, file, *SMALL, *shared(method))
    for name in ("loss", "grad_norm", "entropy"):
        assert result.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-9)
    for row, log_probs in alone.log_probs.items():
        np.testing.assert_allclose(result.log_probs[row], log_probs, atol=1e-6)


def test_c2_ulysses_wants_heads_that_divide_and_names_ring(
    ranks: RankPool, file: str, alone: Result
) -> None:
    """Four query heads on two of keys and values: ring over three ranks, Ulysses over four, not three or
    eight.
    """
    assert "ring" in refusal(*SMALL, *shared("ulysses", 3))
    assert "ring" in refusal(*SMALL, *shared("ulysses", 8))
    for method, size in (("ring", 3), ("ulysses", 4)):
        result = compute(ranks, file, *SMALL, *shared(method, size))
        assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-9)


def test_c3_ring_is_causal_only(file: str) -> None:
    assert "ulysses" in refusal(*SMALL, *shared("ring"), "model.path=windowed")
    configuration(file, *SMALL, *shared("ulysses"), "model.path=windowed")


def test_c4_ulysses_goes_to_whole_sequences_of_a_share_of_the_heads_and_back(
    ranks: RankPool, file: str
) -> None:
    """Two layers, and in each: queries, keys and values there, outputs back. Ring sends keys and values
    round.
    """
    exchanged = {}
    for method in METHODS:
        found = compute(ranks, file, *SMALL, *shared(method)).collectives
        exchanged[method] = sum(
            count for name, count in found.items() if "alltoall" in name.replace("_", "")
        )
    assert exchanged["ulysses"] >= 2 * 2 and exchanged["ring"] == 0


def test_c5_the_documentation_says_how_long_a_chunk_must_be_for_ring_to_hide_its_communication() -> (
    None
):
    """Tokens from which a step's attention takes as long as its exchange: K / H * FLOP/s / bandwidth."""
    text = (ROOT / "docs" / "parallelism.md").read_text()
    assert "c >= (K / H) F / B" in text
    for link, bytes_per_s in (("450 GB/s", 450e9), ("50 GB/s", 50e9)):
        (line,) = [line for line in text.splitlines() if f", {link} |" in line]
        chunk, whole, grouped = (
            float(cell.replace(",", "")) for cell in line.split("|")[2:5]
        )
        assert chunk == pytest.approx(5e14 / bytes_per_s, rel=0.02)
        assert whole == pytest.approx(2 * 5e14 / bytes_per_s, rel=0.02)
        assert grouped == pytest.approx(2 * 5e14 / 8 / bytes_per_s, rel=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_c9_latent_attention_whose_values_are_smaller_than_its_keys(
    ranks: RankPool, file: str, method: str
) -> None:
    model = ("model.path=latent", *SMALL)
    alone, both = (
        compute(ranks, file, *model, "policy.data_parallel=1"),
        compute(ranks, file, *model, *shared(method)),
    )
    assert both.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-9)
    assert both.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-6)
