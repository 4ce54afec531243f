"""The device of a test: a CPU in `make test`, so that the bodies are executed without a GPU, and CUDA with
`-m gpu`.
"""

import pytest
import torch

NEEDS_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand"),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
