"""Experts in rows by expert equal transformers' own function in float64, and routes are made once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from controller.actors.launch import worker_arguments
from controller.config import load
from tests.controller.config_workspace import write_workspace
from tests.workers.model.cpu_engine import backward
from tests.workers.model.exact import CountedCalls
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    save_tiny_model,
    tiny_config,
)
from workers.config.roles import LoraConfig, OptimizerConfig
from workers.model.engine import TrainingEngine
from workers.model.moe import experts as moe
from workers.model.moe.expert_adapters import add_expert_adapters
from workers.model.moe.experts import GroupedExperts
from workers.model.sharding.tensor_parallel import find_experts


def outcome(
    module: Any, dtype: torch.dtype, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> list[Tensor]:
    """Outputs, and the gradients of inputs and parameters, in float64."""
    module.to(dtype).zero_grad()
    inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weights)]
    outputs = module(inputs[0], chosen, inputs[1])
    outputs.square().sum().backward()
    gradients = [tensor.grad for tensor in (*inputs, *module.parameters())]
    return [tensor.double() for tensor in (outputs, *gradients)]


def random_experts(model: torch.nn.Module) -> tuple[Any, Tensor]:
    """The first experts of a model, and hidden states of 9 tokens."""
    module: Any = find_experts(model)[0]
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    size = module.down_proj.shape[-1 if module.is_transposed else 1]
    return module, torch.randn(9, size, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_rows_by_expert_give_what_transformers_gives(
    family: str, dtype: torch.dtype
) -> None:
    """With biases or not, an expert without tokens and one with most."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float64)
    model.set_experts_implementation("eager")
    module, hidden = random_experts(model)
    chosen = torch.tensor(
        [[0, 2], [2, 0], [3, 2], [2, 3], [2, 0], [2, 3], [2, 0], [3, 0], [0, 2]]
    )
    inputs = hidden, chosen, torch.rand(9, 2, dtype=torch.float64)
    expected = outcome(module, torch.float64, *inputs)
    GroupedExperts().compute(module)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for wanted, actual in zip(expected, outcome(module, dtype, *inputs), strict=True):
        assert relative_error(actual, wanted) < tolerance


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_adapters_of_any_rank_compute_in_bfloat16(rank: int) -> None:
    """Grouped products take rows of 16 bytes, which a rank of 3 does not fill."""
    torch.manual_seed(0)
    config = LoraConfig(rank=rank, target_parameters="experts.gate_up_proj")
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=torch.float64)
    add_expert_adapters(model, config)
    module, hidden = random_experts(model)
    inputs = hidden, torch.randint(4, (9, 2)), torch.rand(9, 2, dtype=torch.float64)
    GroupedExperts().compute(module)
    expected = outcome(module, torch.float64, *inputs)
    for wanted, actual in zip(
        expected, outcome(module, torch.bfloat16, *inputs), strict=True
    ):
        assert relative_error(actual, wanted) < 3e-2


class RecordedCalls(CountedCalls):
    """Lists operators in order, and the host's waits among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator._schema.name.partition("::")[2])
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def around_waits(self) -> list[tuple[list[str], list[str]]]:
        """Return operators since the last exchange, and up to the next two, of each wait."""
        waits = [index for index, name in enumerate(self.names) if name == WAIT]
        ends = [index for index, name in enumerate(self.names) if name == EXCHANGE]
        around = []
        for wait in waits:
            before = max(end for end in ends if end < wait)
            after = [end for end in ends if end > wait][1]
            names = self.names[before + 1 : wait], self.names[wait + 1 : after]
            around.append(names)
        return around


WAIT = "wait for sizes"
EXCHANGE = "alltoall_base_"


def exchanges(arguments: dict[str, Any]) -> tuple[int, int, list[tuple[int, int]]]:
    """All-to-alls of a layer in a micro-batch, how often the host waits for their sizes, and of each wait
    the gathers queued before it, and the computing operators between it and the exchanges of rows.
    """
    engine = TrainingEngine(
        arguments.pop("model"), optimizer=OptimizerConfig(), total_steps=1, **arguments
    )
    sequences = random_sequences(dtype=torch.float32)
    read = moe.on_host
    calls = RecordedCalls()

    def recorded(*sizes: Any) -> list[list[int]]:
        calls.names.append(WAIT)
        return read(*sizes)

    moe.on_host = recorded
    with calls:
        backward(engine, sequences, [(0, 5), (5, 11)])
    moe.on_host = read
    around = []
    for before, after in calls.around_waits():
        computing = [name for name in after if name not in (*ALLOCATIONS, EXCHANGE)]
        around.append((before.count("index_select"), len(computing)))
    return (
        calls.counts["c10d.alltoall_base_.default"] // 4,
        calls.names.count(WAIT) // 4,
        around,
    )


ALLOCATIONS = {"empty", "new_empty", "zeros", "new_zeros", "slice", "view", "detach"}


def test_recomputation_follows_the_routes_of_the_first_pass(
    ranks: RankPool, tmp_path
) -> None:
    """Counts, rows, weights and outputs travel; recomputed are rows and weights; gradients travel back. While
    the host waits, the device gathers rows and weights, and then nothing delays the exchange.
    """
    path = save_tiny_model(tmp_path / "experts", "qwen3_moe", tie_word_embeddings=False)
    shared = (
        f"model.path={path}",
        "policy.data_parallel=2",
        "policy.parallel.expert_parallel=2",
    )
    for checkpointing, all_to_alls in (("false", 7), ("true", 9)):
        config = load(
            write_workspace(tmp_path),
            (*shared, f"model.gradient_checkpointing={checkpointing}"),
        )
        settings = worker_arguments(config, "policy")
        arguments = {name: settings[name] for name in ("model", "device", "parallel")}
        expected = (all_to_alls, 1, [(2, 0)] * 4)
        assert ranks.run(exchanges, 2, arguments) == [expected] * 2
