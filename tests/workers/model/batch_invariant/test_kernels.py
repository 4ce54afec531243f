"""`model.batch_invariant`: the kernels of the installed vLLM, their numbers in Triton's interpreter against
float64, and the bits of a sequence alone, in a row, and decoded.
"""

import inspect
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.refusals import refused
from tests.workers.model.tiny import relative_error
from workers.model.batch_invariant import kernels
from workers.model.batch_invariant.kernels import CALLED, check_card, load_kernels
from workers.model.batch_invariant.paged_row import BLOCK_TOKENS, lay_blocks

LENGTHS = (5, 2, 37, 18)
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="needs Triton, whose interpreter computes: pip install --no-deps triton==3.7.1",
)


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    file = tmp_path_factory.mktemp("kernels") / "computed.pt"
    command = [sys.executable, "-m", "tests.workers.model.batch_invariant.computed"]
    # Of the process from its start: transformers imports Triton, whose functions are chosen then.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([*command, str(file)], check=True, env=environment)
    return torch.load(file, weights_only=True)


def linear(tokens, *weights):
    return tokens @ torch.cat(weights).T


def norm(rows, weight):
    return rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight


def gate(halves):
    first, second = halves.chunk(2, dim=1)
    return F.silu(first) * second


def rotation(query, key):
    positions = torch.tensor([0.0, 1, 2, 40, 41], dtype=torch.float64)
    steps = torch.arange(8, dtype=torch.float64)
    angles = positions[:, None, None] * 10_000.0 ** (-steps / 8)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(heads):
        first, second = heads.chunk(2, dim=-1)
        numbers = torch.complex(first, second) * turn
        return torch.cat([numbers.real, numbers.imag], dim=-1)

    return turned(query), turned(key)


def attention(query, key, value):
    outputs = []
    for part in zip(*(x.split([5, 2, 37]) for x in (query, key, value)), strict=True):
        heads = [tensor.transpose(0, 1)[None] for tensor in part]
        output = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=0.3, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


FORMULAS = {
    "linear": linear,
    "norm": norm,
    "norm of a sum": norm,
    "gate": gate,
    "rotation": rotation,
    "attention": attention,
}


@needs_triton
@pytest.mark.parametrize("name", FORMULAS)
def test_an_operator_and_its_gradients_equal_float64(computed, name):
    case = computed["operators"][name]
    leaves = [tensor.double().requires_grad_() for tensor in case["inputs"]]
    expected = FORMULAS[name](*leaves)
    expected = expected if isinstance(expected, tuple) else (expected,)
    total = sum(
        (output * weight.double()).sum()
        for output, weight in zip(expected, case["weights"], strict=True)
    )
    gradients = torch.autograd.grad(total, leaves)
    for actual, reference in zip(
        [*case["outputs"], *case["gradients"]], [*expected, *gradients], strict=True
    ):
        assert relative_error(actual.double(), reference) < 3e-6


@needs_triton
def test_operators_give_the_bits_of_the_engines_layers(computed):
    for name, (engine, ours) in computed["engine layers"].items():
        assert torch.equal(engine, ours), name


@needs_triton
def test_a_sequence_has_the_same_bits_alone_and_in_any_row(computed):
    results = computed["model"]
    predicted = [length - 1 for length in LENGTHS]
    packed = results["packed"][0].split(predicted)
    reversed_row = results["reversed"].split(predicted[::-1])[::-1]
    for alone, in_row, in_other_row in zip(
        results["alone"], packed, reversed_row, strict=True
    ):
        assert alone.isfinite().all()
        assert torch.equal(alone, in_row) and torch.equal(alone, in_other_row)


@needs_triton
def test_a_decoded_token_has_the_bits_of_the_row(computed):
    attention_of = computed["decoding"]
    assert torch.equal(attention_of["whole"], attention_of["decoded"])


@needs_triton
def test_a_model_computes_what_its_own_modules_do(computed):
    results = computed["model"]
    log_probs, entropy, gradients = results["packed"]
    expected_log_probs, expected_entropy, expected_gradients = results["ordinary"]
    assert relative_error(log_probs, expected_log_probs) < 3e-6
    assert relative_error(entropy, expected_entropy) < 3e-6
    for name, gradient, expected in zip(
        results["names"], gradients, expected_gradients, strict=True
    ):
        assert relative_error(gradient, expected) < 1e-5, name


def test_the_installed_vllm_has_the_kernels(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "1")  # which is set for the process
    loaded = load_kernels()
    for names in CALLED.values():
        for name, arguments in names.items():
            parameters = inspect.signature(getattr(loaded, name)).parameters
            required = [
                parameter.name
                for parameter in parameters.values()
                if parameter.default is parameter.empty
            ]
            assert set(required) <= set(arguments.split()), name
    schema = loaded.silu_and_mul.default._schema
    assert [argument.name for argument in schema.arguments] == ["out", "input"]


def test_the_engines_layers_reach_these_kernels():
    """What an engine computes under the switch, as read from the source of the installed vLLM."""
    layers = import_module("vllm.model_executor.layers.layernorm").RMSNorm
    linear_method = import_module("vllm.model_executor.layers.linear")
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for function, called in (
        (layers.forward_cuda, "rms_norm_batch_invariant("),
        (linear_method.UnquantizedLinearMethod.apply, "linear_batch_invariant("),
        (embedding.UnquantizedEmbeddingMethod.apply, "linear_batch_invariant("),
    ):
        source = inspect.getsource(function)
        assert "VLLM_BATCH_INVARIANT" in source and called in source


def test_a_vllm_with_other_functions_is_refused(monkeypatch):
    module = SimpleNamespace(linear_batch_invariant=lambda tokens, weight: None)
    with refused("model.batch_invariant=true"):
        kernels._checked(module, "linear_batch_invariant", "input weight bias")


def test_a_missing_vllm_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "1")
    monkeypatch.setattr(kernels, "CALLED", {"vllm.no_such_module": {"kernel": "input"}})
    with refused("model.batch_invariant=true"):
        load_kernels.__wrapped__()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9)])
def test_an_old_card_is_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with refused("model.batch_invariant=true"):
        check_card(torch.device("cuda"))


def test_a_cpu_is_refused():
    with refused("model.batch_invariant=true"):
        check_card(torch.device("cpu"))


@pytest.mark.parametrize("lengths", [(1,), (16, 17), (5, 2, 37, 18), (32, 1, 1)])
def test_each_segment_has_blocks_of_its_own(lengths):
    slots, table = lay_blocks(lengths)
    start = 0
    used: set[int] = set()
    for row, length in enumerate(lengths):
        blocks = table[row, : -(-length // BLOCK_TOKENS)].tolist()
        cells = slots[start : start + length]
        assert [blocks[i // BLOCK_TOKENS] for i in range(length)] == (
            cells // BLOCK_TOKENS
        ).tolist()
        assert (cells % BLOCK_TOKENS).tolist() == [i % BLOCK_TOKENS for i in range(length)]
        assert not used & set(blocks)
        used |= set(blocks)
        start += length
    assert used == set(range(len(used)))
