"""A whole update with `model.batch_invariant`, on the simulated GPU: it reaches the operators, as often as its
layers and its recomputation say.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.workers.model.batch_invariant.simulated import LAYERS, count_by_mode
from tests.workers.model.ranks import PRELOADED

MODES = ("none", "full", "selective")
OF_A_LAYER = {"norm": 4, "linear": 4, "rotation": 1, "attention": 1, "gate": 1}
"""Norms of a layer: two of its input, two of its heads. Products: q k v, o, gate and up, down."""


@pytest.fixture(scope="module")
def calls():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(count_by_mode, MODES).result()


@pytest.mark.parametrize("mode", MODES)
def test_an_update_computes_by_the_engines_kernels(calls, mode):
    for name, count in OF_A_LAYER.items():
        recomputed = mode != "none" and (mode, name) != ("selective", "attention")
        expected = LAYERS * count * (1 + recomputed) + (name == "norm")  # and the last norm
        assert calls[mode][f"ballast::invariant_{name}"] == expected, name
    assert calls[mode]["ballast::engine_log_probs"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_backward_pass_is_that_of_flash_attention(calls, mode):
    assert calls[mode]["aten::_flash_attention_forward"] == LAYERS
    assert calls[mode]["aten::_flash_attention_backward"] == LAYERS
    assert not {name for name in calls[mode] if "linear" in name and "ballast" not in name}
