import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.tensor_memory import peak_tensor_bytes
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import relative_error
from workers.model.losses import logprobs
from workers.model.losses.logprobs import linear_log_probs

TRACED = [
    torch.compile(
        passed, backend="aot_eager", fullgraph=True, recompile_limit=logprobs.MOST_GRAPHS
    )
    for passed in (logprobs._predict, logprobs._differentiate)
]


def inputs(
    count: int = 13, hidden: int = 5, vocabulary: int = 11
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(
            *shape, generator=generator, dtype=torch.float64
        ).requires_grad_()

    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    return leaf(count, hidden), leaf(vocabulary, hidden), leaf(vocabulary), targets


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None = None,
    factor: float = 1.0,
):
    logits = factor * torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    all_log_probs = (logits / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=all_log_probs).entropy()
    return all_log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.drawn(8, covers=True)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("softcap", "factor"), [(None, 1.0), (None, 0.3), (1.5, 0.3)])
@pytest.mark.parametrize("passes", ["eager", "compiled"])
def test_values_and_gradients_equal_the_naive_ones(
    chunk_tokens, temperature, with_bias, softcap, factor, passes, monkeypatch
):
    """Compiled by a backend that only traces. On a GPU, inductor makes kernels of the same graphs."""
    if passes == "compiled":
        monkeypatch.setattr(logprobs, "_chunk_functions", lambda *_: TRACED)
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    used_bias = bias if with_bias else None
    settings = {"temperature": temperature, "softcap": softcap, "factor": factor}
    actual = linear_log_probs(
        hidden, weight, used_bias, targets, chunk_tokens=chunk_tokens, **settings
    )
    expected = naive(hidden, weight, used_bias, targets, **settings)
    upstream = torch.randn(2, len(targets), dtype=torch.float64)
    gradients = torch.autograd.grad((torch.stack(actual) * upstream).sum(), leaves)
    expected_gradients = torch.autograd.grad(
        (torch.stack(expected) * upstream).sum(), leaves
    )
    for one, other in zip(
        (*actual, *gradients), (*expected, *expected_gradients), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("output", [0, 1], ids=["log_probs", "entropy"])
def test_gradient_of_either_output_alone(output):
    hidden, weight, bias, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_log_probs(*leaves, targets, temperature=0.7, chunk_tokens=4)[
            output
        ],
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_is_that_of_gradients_and_two_chunks_of_logits(with_entropy: bool):
    count, size, vocabulary, chunk = 512, 8, 2000, 64
    hidden, weight, _, targets = inputs(count, size, vocabulary)

    def forward_and_backward() -> None:
        log_probs, entropy = linear_log_probs(
            hidden, weight, None, targets, chunk_tokens=chunk
        )
        (log_probs.sum() + entropy.sum() if with_entropy else log_probs.sum()).backward()

    gradients, logits = 8 * (vocabulary + count) * size, 8 * chunk * vocabulary
    assert peak_tensor_bytes(forward_and_backward) < gradients + 2.1 * logits


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = inputs()
    log_probs, _ = linear_log_probs(hidden, weight.detach(), None, targets)
    log_probs.sum().backward()
    assert hidden.grad is not None


def test_no_predicted_token_gives_zero_gradients_not_none():
    hidden, weight, _, targets = inputs(count=0)
    log_probs, entropy = linear_log_probs(hidden, weight, None, targets)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_half_precision_input_is_normalised_in_float32():
    hidden, weight, _, targets = inputs(count=64, hidden=32, vocabulary=500)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    log_probs, entropy = linear_log_probs(*narrow, None, targets)
    assert log_probs.dtype == entropy.dtype == torch.float32
    # The logits are rounded to bfloat16, nothing after them is: so from the rounded logits on the result is
    # exact.
    logits = torch.nn.functional.linear(*narrow).double()
    expected, expected_entropy = naive(logits, torch.eye(500).double(), None, targets, 1.0)
    assert relative_error(log_probs, expected) < 1e-6
    assert relative_error(entropy, expected_entropy) < 1e-6
    log_probs.sum().backward()
    assert narrow[0].grad.dtype == narrow[1].grad.dtype == torch.bfloat16
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow]
    naive(*wide, None, targets, 1.0)[0].sum().backward()
    # bfloat16 keeps 8 bits, of logits and of their gradients.
    for tensor, exact in zip(narrow, wide, strict=True):
        assert relative_error(tensor.grad.double(), exact.grad) < 2e-2


SHARED = {"temperature": 0.6, "softcap": 1.5, "factor": 0.3, "chunk_tokens": 4}


def computed_with_a_share(with_bias: bool, entropy_too: bool) -> dict[str, Tensor]:
    """On each rank: an uneven part of the vocabulary of 11 ids; results, and gradients of what this rank
    holds.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    first, stop = rank * 11 // count, (rank + 1) * 11 // count
    hidden, weight, bias, targets = inputs()
    own = [
        weight[first:stop].detach().requires_grad_(),
        bias[first:stop].detach().requires_grad_(),
    ]
    used_bias = own[1] if with_bias else None
    log_probs, entropy = linear_log_probs(
        hidden, own[0], used_bias, targets, group=dist.group.WORLD, first_id=first, **SHARED
    )
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    (
        (log_probs * upstream).sum() + (entropy * upstream.flip(0)).sum() * entropy_too
    ).backward()
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": own[0].grad,
        "bias": own[1].grad if with_bias else torch.zeros(0, dtype=torch.float64),
    }


@pytest.mark.parametrize(("with_bias", "entropy_too"), [(True, True), (False, False)])
@pytest.mark.parametrize("count", [2, 3])
def test_a_vocabulary_shared_over_ranks_gives_the_same(
    count: int, with_bias: bool, entropy_too: bool, ranks: RankPool
):
    parts = ranks.run(computed_with_a_share, count, with_bias, entropy_too)
    hidden, weight, bias, targets = inputs()
    log_probs, entropy = naive(
        hidden, weight, bias if with_bias else None, targets, 0.6, 1.5, 0.3
    )
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    (
        (log_probs * upstream).sum() + (entropy * upstream.flip(0)).sum() * entropy_too
    ).backward()
    expected = {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
    }
    for part in parts:
        for name, value in expected.items():
            torch.testing.assert_close(part[name], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([part["weight"] for part in parts]), weight.grad, rtol=1e-12, atol=1e-12
    )
    if with_bias:
        torch.testing.assert_close(
            torch.cat([part["bias"] for part in parts]), bias.grad, rtol=1e-12, atol=1e-12
        )


FAR_WEIGHT = torch.cat([500.0 + torch.arange(8.0).reshape(4, 2), torch.zeros(4, 2)])
"""The first rank's logits are about 1,000 above the second's: their exp overflows unless the greatest is taken."""
FAR_TARGETS = torch.tensor([0, 3, 7])


def far_logits_with_a_share() -> Tensor:
    first = 4 * dist.get_rank()
    log_probs, _ = linear_log_probs(
        torch.ones(3, 2),
        FAR_WEIGHT[first : first + 4],
        None,
        FAR_TARGETS,
        group=dist.group.WORLD,
        first_id=first,
    )
    return log_probs


def test_a_shared_vocabulary_takes_the_greatest_logit_of_all_ranks(ranks: RankPool) -> None:
    expected = FAR_WEIGHT.double().sum(-1).log_softmax(-1)[FAR_TARGETS].float()
    for log_probs in ranks.run(far_logits_with_a_share, 2):
        torch.testing.assert_close(log_probs, expected)
