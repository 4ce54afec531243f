"""Models cut into stages: where they are cut, that each family computes the same there, and what cannot be
cut.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.refusals import refused
from tests.workers.model.cpu_engine import backward, build_engine
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import OptimizerConfig
from workers.model.engine import TrainingEngine
from workers.model.sharding.stage_split import split_layers

MICRO_BATCHES = [(0, 4), (4, 4), (4, 7), (7, 11)]


def costs_of(ranges: list[range], costs: list[float], last: float) -> list[float]:
    found = [sum(costs[layer] for layer in layers) for layers in ranges]
    found[-1] += last
    return found


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 20),
)
def test_the_most_expensive_stage_costs_as_little_as_possible(costs, parts, last):
    if len(costs) < parts:
        with refused("policy.parallel.pipeline_parallel"):
            split_layers(costs, last, parts)
        return
    ranges = split_layers(costs, last, parts)
    assert [layer for layers in ranges for layer in layers] == list(range(len(costs)))
    assert len(ranges) == parts
    assert all(ranges)
    every = [
        [
            range(start, stop)
            for start, stop in zip((0, *cuts), (*cuts, len(costs)), strict=True)
        ]
        for cuts in combinations(range(1, len(costs)), parts - 1)
    ]
    best = min(max(costs_of(cut, costs, last)) for cut in every)
    assert max(costs_of(ranges, costs, last)) == best


def build(path: str, stages: int, **settings: Any) -> TrainingEngine:
    return build_engine(
        path,
        dtype="float32",
        share_prefixes="never",
        check_numerics=True,
        pipeline_parallel=stages,
        **settings,
    )


def what_stages_hold(
    paths: list[str],
) -> list[tuple[int, list[str]]]:
    """(parameters of the whole model, names of this rank's) of each model; building one proves
    its log-probs.
    """
    engines = [build(path, 2, optimizer=None) for path in paths]
    return [
        (
            engine.num_parameters,
            [name for name, _ in engine.module.model.named_parameters()],
        )
        for engine in engines
    ]


def test_families_of_the_common_form_pass_the_check_in_stages(
    ranks: RankPool, tmp_path: Path
):
    """gemma2 scales the embedding and caps logits, gemma3 has two rotary tables, gpt_oss sinks, mixtral
    experts.
    """
    families = ("gemma2", "gemma3", "gpt_oss", "mixtral", "llama")
    paths = [save_tiny_model(tmp_path / family, family) for family in families]
    first, last = ranks.run(what_stages_hold, 2, paths)
    for (total, begins), (also, ends) in zip(first, last, strict=True):
        assert total == also
        assert {name.split(".")[2] for name in begins if ".layers." in name} == {"0"}
        assert {name.split(".")[2] for name in ends if ".layers." in name} == {"1"}
        assert "model.embed_tokens.weight" in begins
        assert "model.norm.weight" in ends


def tied_copies(path: str) -> Tensor | None:
    engine = build(path, 4, optimizer=OptimizerConfig(learning_rate=1e-2))
    sequences = random_sequences(dtype=torch.float32)
    for _ in range(3):
        backward(engine, sequences, MICRO_BATCHES)
        engine.optimizer_step()
    names = dict(engine.module.model.named_parameters())
    found = [
        names[name]
        for name in ("model.embed_tokens.weight", "lm_head.weight")
        if name in names
    ]
    return found[0].detach().to_local().clone() if found else None


def test_both_copies_of_a_tied_weight_stay_alike_to_the_last_bit(
    ranks: RankPool, tmp_path: Path
):
    first, *between, last = ranks.run(
        tied_copies, 4, save_tiny_model(tmp_path / "model", num_hidden_layers=4)
    )
    assert between == [None, None]
    assert torch.equal(first, last)


def layouts(path: str, virtual: int) -> tuple[int, int]:
    """(micro-batches laid out, and still held at the end) of an update and a forward pass."""
    engine = build(path, 2, virtual_stages=virtual)
    sequences, laid_out, works = random_sequences(dtype=torch.float32), [], []
    lay_out, run = engine.layout.lay_out, engine.runner.run
    engine.layout.lay_out = lambda *given, **named: (
        laid_out.append(given) or lay_out(*given, **named)
    )
    engine.runner.run = lambda work: works.append(work) or run(work)
    backward(engine, sequences, MICRO_BATCHES)
    engine.log_probs(sequences, MICRO_BATCHES)
    return len(laid_out), sum(len(work.rows) for work in works)


def test_a_stage_lays_out_each_micro_batch_once_and_frees_it(
    ranks: RankPool, tmp_path: Path
):
    path = save_tiny_model(tmp_path / "model", num_hidden_layers=4)
    for virtual in (1, 2):
        assert ranks.run(layouts, 2, path, virtual) == [(2 * len(MICRO_BATCHES), 0)] * 2
