"""The doctor on a machine with GPUs: `python -m ballast doctor` finds nothing that would not work."""

import pytest
import torch

from ballast import doctor
from tests.gpu.conftest import NEEDS_CUDA

pytestmark = list(NEEDS_CUDA)


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_nothing_fails_on_this_machine(
    placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if placement == "apart" and torch.cuda.device_count() < 2:
        pytest.skip("a rank and an engine of its own take two GPUs")
    code = doctor.main(["resources.device=cuda", f"rollout.placement={placement}"])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "ok    log-probs after it" in output
