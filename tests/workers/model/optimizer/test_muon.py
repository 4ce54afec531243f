"""Muon's step is torch's own, on whole matrices and on each expert, in every layout of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from controller.actors.launch import worker_arguments
from controller.config import load
from tests.controller.config_workspace import write_workspace
from tests.workers.model.cases import way
from tests.workers.model.cpu_engine import assert_same, build_engine, weights
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import OptimizerConfig
from workers.model.losses import Denominators, sft
from workers.model.optimizer.optimizer import make_optimizer, optimizer_state

RATES = {"lr": 0.1, "weight_decay": 0.2}
BETAS = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}


def test_matrices_and_each_expert_take_torchs_step_and_all_else_adamws() -> None:
    torch.manual_seed(0)
    shapes = {
        "wide": (3, 8),
        "tall": (9, 4),
        "experts": (3, 4, 6),
        "embedding": (5, 4),
        "norm": (4,),
    }
    mine = {name: torch.nn.Parameter(torch.rand(shape)) for name, shape in shapes.items()}
    config = OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=0.2)
    optimizer = make_optimizer(
        mine.items(), config, {mine[name] for name in ("wide", "tall", "experts")}
    )
    theirs = {
        name: torch.nn.Parameter(each.detach().clone())
        for name, each in mine.items()
        if name != "experts"
    }
    experts = [torch.nn.Parameter(each.clone()) for each in mine["experts"].detach()]
    expected = [
        torch.optim.Muon(
            [theirs["wide"], theirs["tall"], *experts],
            **RATES,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW([theirs["embedding"]], **RATES, **BETAS),
        torch.optim.AdamW([theirs["norm"]], lr=0.1, weight_decay=0.0, **BETAS),
    ]
    optimizer_state(optimizer)  # what a checkpoint before the first step does
    for _ in range(3):
        for each in mine.values():
            each.grad = torch.randn(each.shape)
        for name, each in theirs.items():
            each.grad = mine[name].grad
        for expert, gradient in zip(experts, mine["experts"].grad, strict=True):
            expert.grad = gradient
        for each in (optimizer, *expected):
            each.step()
    theirs["experts"] = torch.nn.Parameter(torch.stack([each.detach() for each in experts]))
    assert_same(mine, {name: theirs[name] for name in mine})
    kept = {name: set(optimizer.state[each]) for name, each in mine.items()}
    assert kept["wide"] == kept["experts"] == {"momentum_buffer"}
    assert kept["norm"] == {"step", "exp_avg", "exp_avg_sq"}


def trained(
    path: str,
    arguments: dict[str, Any],
    sharing: int,
    steps: range = range(3),
    dtype: str = "float64",
    saved: str = "",
) -> dict[str, Tensor]:
    """Train from a checkpoint on, if steps do not begin at 0, and else save one there."""
    given = {"lora": arguments["model"].lora, "dtype": dtype, **vars(arguments["parallel"])}
    engine = build_engine(path, optimizer=arguments["optimizer"], **given)
    if steps.start:
        engine.load_checkpoint(f"{saved}/{steps.start}")
    for step in steps:
        whole, share = random_sequences(12, seed=step), 12 // sharing
        first = dp_rank(engine.parallel) * share
        engine.forward_backward(
            whole.slice(first, first + share), [(0, share)], sft, Denominators.of(whole)
        )
        engine.optimizer_step()
    if saved and not steps.start:
        engine.save_checkpoint(f"{saved}/{steps.stop}", step=steps.stop)
        engine.wait_for_checkpoint()
    return weights(engine)


def arguments_of(path: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """What a worker of the policy gets from a configuration."""
    rates = ("policy.optimizer.learning_rate=1e-3", "policy.optimizer.weight_decay=0.1")
    return worker_arguments(
        load(write_workspace(folder), (f"model.path={path}", *rates, *overrides)), "policy"
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("family", "lora_rank", "layouts"),
    [
        ("qwen2", 0, ["dp 4, copies 2", "dp 2, tp 2", "pp 2"]),
        ("qwen3_moe", 0, ["dp 4, ep 2", "dp 2, tp 2, ep 2"]),
        ("qwen2", 3, ["dp 4"]),
    ],
)
def test_ranks_that_share_matrices_take_the_step_of_one_process(
    tmp_path: Path, ranks: RankPool, family: str, lora_rank: int, layouts: list[str]
) -> None:
    path = save_tiny_model(tmp_path / "tiny", family, tie_word_embeddings=False)
    arguments = arguments_of(
        path, tmp_path, "policy.optimizer.name=muon", f"model.lora.rank={lora_rank}"
    )
    expected = trained(path, arguments, 1)
    for layout in map(way, layouts):
        for found in ranks.run(
            trained,
            layout.ranks,
            path,
            arguments | {"parallel": layout.parallel},
            layout.dp,
        ):
            assert_same(found, expected, 1e-6)


NAME = "policy.optimizer.name"
STATES = "policy.optimizer.state_dtype"
CUSTOM = f"policy.optimizer.name=custom policy.optimizer.function={__name__}:adagrad"


def adagrad(
    named: list[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Its state begins at 0.1, unlike AdamW's."""
    return torch.optim.Adagrad(
        [each for _, each in named], lr=config.learning_rate, initial_accumulator_value=0.1
    )


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("chosen", "rate", "layout", "tolerance"),
    [
        (f"{NAME}=muon", 1e-5, "tp 2", 1e-6),
        (f"{NAME}=sgd", 0.1, "tp 2", 1e-6),
        (CUSTOM, 1e-2, "tp 2", 1e-6),
        *(
            (f"{NAME}={name} {STATES}={state_dtype}", 1e-4, "dp 2", 1e-4)
            for name in ("adamw", "muon")
            for state_dtype in ("bfloat16", "int8")
        ),
    ],
)
def test_a_run_resumes_to_the_bit_and_on_another_layout(
    tmp_path: Path, ranks: RankPool, chosen: str, rate: float, layout: str, tolerance: float
) -> None:
    """To the bit on one rank, in float32. On others gradients round otherwise, and bfloat16 magnifies that in
    Muon.
    """
    path = save_tiny_model(tmp_path / "tiny", tie_word_embeddings=False, hidden_size=64)
    arguments = arguments_of(
        path, tmp_path, *chosen.split(), f"policy.optimizer.learning_rate={rate}"
    )
    on_two = way(layout)
    shared = arguments | {"parallel": on_two.parallel}
    begun, ended = range(2), range(2, 4)
    expected = trained(path, arguments, 1, range(4), "float32")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    trained(path, arguments, 1, begun, "float32", one)
    assert_same(trained(path, arguments, 1, ended, "float32", one), expected)
    ranks.run(trained, 2, path, shared, on_two.dp, begun, "float32", two)
    from_two = trained(path, arguments, 1, ended, "float32", two)
    assert_same(from_two, expected, tolerance)
    to_two = ranks.run(trained, 2, path, shared, on_two.dp, ended, "float32", one)[0]
    assert_same(to_two, expected, tolerance)
