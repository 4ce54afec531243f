"""FlashAttention 4: what is asked of the package, its numbers on a twin for CPUs, and the installed package."""

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.refusals import refused
from tests.workers.model.attention import compile_flash4, flash4_twin
from tests.workers.model.attention.flash4_twin import twin_in_use
from tests.workers.model.attention.reference_attention import all_scores_at_once
from tests.workers.model.tiny import relative_error
from workers.batch.dataproto import DataProto
from workers.model.attention import flash4
from workers.model.attention.attention import packed_attention
from workers.model.attention.flash_kernels import Block, Segments, attend, gradients
from workers.model.recomputation import _policy
from workers.model.rows.packing import pack

CPU = torch.device("cpu")
LENGTHS = (1, 7, 20, 3)
SCALE = 0.5


@pytest.fixture
def calls(monkeypatch):
    with twin_in_use(monkeypatch) as recorded:
        yield recorded


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("backend", "softcap", "has_sinks"),
    [
        ("flash4", None, False),
        ("flash4", None, True),
        ("varlen", None, True),
        ("sdpa", None, False),
        ("sdpa", None, True),
        ("sdpa", 1.5, False),
        ("sdpa", 1.5, True),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_a_packed_row_and_its_gradients_equal_all_scores_at_once(
    monkeypatch, window, has_sinks, backend, softcap
):
    """What `varlen` runs for gpt-oss on CUDA runs with the kernels that torch has for a CPU in their place."""
    tokens = sum(LENGTHS)
    inputs = [drawn(1, 4, tokens, 8), drawn(1, 2, tokens, 8), drawn(1, 2, tokens, 8)]
    sinks = drawn(4) if has_sinks else None
    rows = [{"input_ids": [1] * n, "loss_mask": [False] * n} for n in LENGTHS]
    attention = packed_attention(backend, pack(DataProto.from_list(rows)), CPU)
    features = {"window": window, "softcap": softcap, "sinks": sinks}
    used = {name: value for name, value in features.items() if value is not None}
    weights = drawn(1, tokens, 4, 8).detach()
    wanted = inputs + [sinks] * has_sinks
    is_flash4 = backend == "flash4"
    with twin_in_use(monkeypatch) if is_flash4 else nullcontext([]) as calls:
        actual = attention(*inputs, SCALE, **used)
        of_actual = torch.autograd.grad((actual * weights).sum(), wanted)
    windows = [(window - 1 if window else None, 0)] * is_flash4
    assert [call["window_size"] for call in calls] == windows
    expected = all_scores_at_once(inputs, LENGTHS, SCALE, **features)
    assert relative_error(actual, expected) < 1e-12
    of_expected = torch.autograd.grad((expected * weights).sum(), wanted)
    torch.testing.assert_close(of_actual, of_expected, rtol=1e-9, atol=1e-12)


def test_parts_of_a_ring_give_the_whole_attention_and_its_gradients(calls):
    """A causal part, and earlier keys that all queries see, merged by their log-sum-exp."""
    lengths = [4, 9, 2]
    own = Segments.of(lengths, CPU)
    causal = Block(own, own, causal=True)
    earlier = Block(own, own, causal=False)
    tokens = sum(lengths)
    query, first, second = (
        drawn(tokens, 4, 8),
        drawn(2, tokens, 2, 8),
        drawn(2, tokens, 2, 8),
    )
    output = torch.zeros(tokens, 4, 8, dtype=torch.float64)
    lse = torch.full((4, tokens), -torch.inf, dtype=torch.float64)
    with torch.no_grad():
        for key_value, block in ((first, earlier), (second, causal)):
            attend(query, key_value, SCALE, block, output, lse)
    expected = whole_attention(query, first, second, lengths)
    assert relative_error(output, expected) < 1e-12
    weights = drawn(*expected.shape).detach()
    of_expected = torch.autograd.grad((expected * weights).sum(), (query, first, second))
    with torch.no_grad():
        parts = [
            gradients(weights, query, key_value, output, lse, SCALE, block)
            for key_value, block in ((first, earlier), (second, causal))
        ]
    (query_of_first, of_first), (query_of_second, of_second) = parts
    of_actual = (query_of_first + query_of_second, of_first, of_second)
    for gradient, reference in zip(of_actual, of_expected, strict=True):
        assert relative_error(gradient, reference) < 1e-12
    assert [call["window_size"] for call in calls] == [(None, None), (None, 0)]


def whole_attention(
    query: torch.Tensor, first: torch.Tensor, second: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    outputs = []
    for q, earlier, later in zip(
        query.split(lengths), first.split(lengths, 1), second.split(lengths, 1), strict=True
    ):
        key, value = torch.cat([earlier, later], dim=1).repeat_interleave(2, dim=2)
        visible = torch.ones(len(q), 2 * len(q)).tril(len(q)) == 1
        scores = torch.einsum("qhd,khd->hqk", q, key) * SCALE
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", shares, value))
    return torch.cat(outputs)


def test_the_operators_have_the_shapes_and_gradients_that_torch_checks(calls):
    """With values smaller than keys, which the package takes."""
    segments = Segments.of([3, 5], CPU)
    shapes = ((8, 4, 16), (8, 2, 16), (8, 2, 8))
    tensors = [drawn(*shape).detach().float().requires_grad_() for shape in shapes]
    bounds = (segments.bounds, segments.bounds, 5, 5)
    torch.library.opcheck(flash4.flash4_attention, (*tensors, *bounds, True, 2, SCALE))
    plain = [tensor.detach() for tensor in tensors]
    output, lse = flash4.flash4_attention(*plain, *bounds, True, 2, SCALE)
    arguments = (torch.ones_like(output), *plain, output, lse, *bounds, True, 2, SCALE)
    torch.library.opcheck(flash4.flash4_attention_backward, arguments)


def test_selective_recomputation_keeps_its_output():
    kept = _policy(set(), None, torch.ops.ballast.flash4_attention.default)
    assert kept == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_backward_pass_is_deterministic_where_torch_shall_be(
    monkeypatch, is_deterministic
):
    seen = []

    def backward(**arguments):
        seen.append(arguments["deterministic"])
        return flash4_twin.varlen_backward(**arguments)

    package = SimpleNamespace(
        flash_attn_varlen_func=flash4_twin.varlen_forward, _flash_attn_bwd=backward
    )
    monkeypatch.setattr(flash4, "load_package", lambda: package)
    segments = Segments.of([4], CPU)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        inputs = [drawn(4, 2, 8) for _ in range(3)]
        bounds = (segments.bounds, segments.bounds, 4, 4)
        output, _lse = flash4.flash4_attention(*inputs, *bounds, True, None, SCALE)
        output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [is_deterministic]


def test_a_package_whose_functions_lack_an_argument_is_refused(monkeypatch):
    def without_lse(q, k, v):
        raise AssertionError

    package = SimpleNamespace(flash_attn_varlen_func=without_lse)
    monkeypatch.setattr(flash4, "import_module", lambda _: package)
    flash4.load_package.cache_clear()
    with refused(
        "model.attention=flash4: flash_attn_varlen_func of the installed flash-attn-4 has no causal"
    ):
        flash4.load_package()


def test_the_twin_takes_what_is_called():
    twins = (flash4_twin.varlen_forward, flash4_twin.varlen_backward)
    for twin, arguments in zip(twins, flash4.CALLED.values(), strict=True):
        assert set(inspect.signature(twin).parameters) == set(arguments.split())


def installed_package():
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    flash4.load_package.cache_clear()
    return flash4.load_package()


def test_the_installed_package_takes_what_is_called():
    package = installed_package()
    assert set(flash4.CALLED) <= set(vars(package))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["90", "100"])
def test_the_installed_package_compiles_both_passes_for_a_card(architecture):
    installed_package()
    variables = {
        "FLASH_ATTENTION_ARCH": f"sm_{architecture}",
        "CUTE_DSL_ARCH": f"sm_{architecture}a",
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
    command = [sys.executable, "-m", compile_flash4.__name__]
    result = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("compiled") == len(compile_flash4.KINDS)
