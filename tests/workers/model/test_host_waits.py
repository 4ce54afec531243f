"""The host waits for the device in no micro-batch: every kind of model with every loss, on the simulated GPU.

    configuration --> engine of a role --1 and 2 micro-batches--> waits, copies and kernels of the second

A wait is an operator whose result the host reads, a copy that is not pinned, or an event that the host awaits.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model.ranks import PRELOADED
from workers.config.loss import POLICY_LOSS_NAMES, SUM_LOSS_NAMES

QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "one layer": QWEN2 | {"num_hidden_layers": 1},
    "qwen3_moe": QWEN2
    | EXPERTS
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
    },
    "qwen2_moe": QWEN2
    | EXPERTS
    | {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": 32,
    },
    "gpt_oss": QWEN2
    | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
}
PROMPT, RESPONSES, TOKENS = 16, 4, 64
"""Prompt tokens that the samples of a micro-batch share, samples of a micro-batch, tokens of a sample."""


@dataclass(frozen=True)
class Case:
    """An engine of a role. losses: kinds of `make_loss`, each with settings that no engine reads.

    copies: at most these for a micro-batch: the row and the loss's columns, an expert's counted cells, a router
    loss's cells.
    """

    model: str = "qwen2"
    role: str = "policy"
    settings: tuple[str, ...] = ()
    losses: tuple[tuple[str, ...], ...] = (("",),)
    passes: tuple[str, ...] = ()
    copies: int = 4


@dataclass(frozen=True)
class More:
    """What one more micro-batch adds."""

    waits: int
    copies: int
    kernels: int


def measure_more(case: Case, folder: Path) -> dict[str, More]:
    """Return the work of one more micro-batch by loss and by pass. Run it inside `fake_gpus`."""
    import json

    from controller.actors.launch import worker_arguments
    from controller.config import load
    from controller.config.role_table import ROLES
    from tests.controller.config_workspace import write_workspace
    from workers.model.engine import TrainingEngine
    from workers.model.losses import Denominators
    from workers.model.memory.fake_gpu import DEVICE

    path = folder / case.model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[case.model]))
    settings = [f"model.path={path}", "model.dtype=bfloat16", *case.settings]
    if case.role == "critic":
        settings += ["algorithm.advantage=gae", f"critic.path={path}"]
    workspace = write_workspace(folder)
    arguments = worker_arguments(load(workspace, settings), case.role)
    names = ("optimizer", "total_steps", "parallel", "temperature")
    engine = TrainingEngine(
        arguments["model"],
        **{name: arguments[name] for name in names},
        device=f"{DEVICE}:0",
        head=ROLES[case.role].head,
    )
    sequences, cuts = make_sequences(engine.vocabulary, count=2)
    more = {}
    for kind, *of_loss in case.losses:
        config = load(workspace, [*settings, *of_loss])
        batch = sequences
        if config.algorithm.loss.distillation.coefficient:
            batch = add_teacher(engine, sequences, config, MODELS[case.model])
        loss_function = make_loss(config, case.role, kind)
        update = partial(
            engine.forward_backward,
            batch,
            loss_function=loss_function,
            denominators=Denominators.of(batch),
        )
        more[", ".join((kind, *of_loss))] = second_micro_batch(
            lambda count, update=update: update(cuts[:count])
        )
    for name in case.passes:
        run = getattr(engine, name)
        more[name] = second_micro_batch(
            lambda count, run=run: run(sequences.slice(0, cuts[count - 1][1]), cuts[:count])
        )
    return more


def second_micro_batch(run: Callable[[int], Any]) -> More:
    from tests.benchmarks.simulated_work import counting

    works = []
    for count in (1, 2):
        with counting() as work:
            run(count)
        works.append(work)
    step = works[1].plus(works[0], -1)
    return More(step.waits, step.copies, int(step.kernels.total()))


def make_loss(config: Any, role: str, kind: str) -> Any:
    """Return the loss of a role's worker. kind: empty for the configuration's, or another's name."""
    from workers.config.loss import SumLossConfig, SupervisedLossConfig, WeightedLossConfig
    from workers.roles.critic import CriticWorker
    from workers.roles.policy import PolicyWorker
    from workers.roles.reward_model import RewardModelTrainer

    others: dict[str, Any] = {"sft": SupervisedLossConfig(), "pairs": WeightedLossConfig()}
    others |= {f"sum {name}": SumLossConfig(name) for name in SUM_LOSS_NAMES}
    if role == "policy":
        settings = others[kind] if kind else config.policy_loss
        return PolicyWorker.loss_function(None, settings)
    if kind:
        return RewardModelTrainer.loss_function(None, others.get(kind, kind))
    return CriticWorker.loss_function(None, config.critic.loss)


def make_sequences(vocabulary: int, count: int) -> tuple[Any, list[tuple[int, int]]]:
    """Return `count` micro-batches, each of one group of samples, with every column that a loss reads."""
    import torch

    from workers.batch.dataproto import DataProto

    generator = torch.Generator().manual_seed(0)

    def random_ids(length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (length,), generator=generator)

    zeros = torch.zeros(TOKENS)
    names = [f"{kind}_log_probs" for kind in ("old", "reference", "rollout")]
    names += ["old_values", "returns", "weights", "old_entropies"]
    rows = []
    for _ in range(count):
        prompt = random_ids(PROMPT)
        for _ in range(RESPONSES):
            ids = torch.cat([prompt, random_ids(TOKENS - PROMPT)])
            mask = torch.arange(TOKENS) >= PROMPT
            rows.append({"input_ids": ids, "loss_mask": mask} | dict.fromkeys(names, zeros))
    ones = torch.ones(len(rows))
    columns = dict.fromkeys(("advantages", "coefficient", "label", "group_tokens"), ones)
    cuts = [(index * RESPONSES, (index + 1) * RESPONSES) for index in range(count)]
    return DataProto.from_list(rows, columns), cuts


def add_teacher(engine: Any, sequences: Any, config: Any, model: dict[str, Any]) -> Any:
    from workers.model.memory import memory_trace

    request = {"roles": {"policy": {"description": model}}}
    taught = config.algorithm.loss.distillation
    return memory_trace._with_teacher(engine, sequences, taught, request)


_entered = ExitStack()  # until the process ends


def enter_fake_gpus() -> None:
    """Make this process rank 0 of 2, each with a simulated GPU."""
    import torch

    from workers.model.memory.fake_gpu import fake_gpus

    torch.set_num_threads(1)
    _entered.enter_context(fake_gpus(2))


@pytest.fixture(scope="module")
def rank() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context, enter_fake_gpus) as pool:
        yield pool


DISTILLATION = "algorithm.loss.distillation"
LORA = "model.lora.rank=8"
SMALL_LORA = "model.lora.rank=4"  # less than a grouped product's row takes
EXPERT_LORA = "model.lora.target_parameters=experts.gate_up_proj,experts.down_proj"
NO_PREFIXES = "model.share_prefixes=never"
RECOMPUTED = "model.gradient_checkpointing=full"
ROUTER_LOSSES = (
    "model.router_aux_loss_coefficient=0.01",
    "model.router_z_loss_coefficient=0.01",
)
CORRECTION = "algorithm.loss.rollout_correction"
POLICY_LOSSES = [("", f"algorithm.loss.name={name}") for name in POLICY_LOSS_NAMES]
POLICY_LOSSES += [
    ("", "algorithm.loss.kl_coefficient=0.1", f"{CORRECTION}.weights=token"),
    ("", f"{CORRECTION}.rejection=sequence"),
    *((f"sum {name}",) for name in SUM_LOSS_NAMES),
    ("sft",),
    ("pairs",),
]
DISTILLED = [
    ("", f"{DISTILLATION}.coefficient=1", f"{DISTILLATION}.over={kind}")
    for kind in ("token", "top_k", "vocabulary")
]
VALUE_LOSSES = [("",), ("pairs",), ("regression",), ("process",)]
READ = ("log_probs", "log_probs_and_entropies")
WITHOUT_WAITS = {
    "losses of a policy": Case("one layer", losses=tuple(POLICY_LOSSES), passes=READ),
    "losses from a teacher": Case("one layer", losses=tuple(DISTILLED)),
    "critic": Case(role="critic", losses=tuple(VALUE_LOSSES), passes=("values", "scores")),
    "no shared prefixes": Case(settings=(NO_PREFIXES,), passes=READ),
    "padded": Case(settings=("model.layout=padded", NO_PREFIXES), passes=READ),
    # One copy brings the row and its segments, and one the loss's columns.
    "recomputed": Case(
        settings=(RECOMPUTED,),
        losses=(("", "algorithm.loss.kl_coefficient=0.1"),),
        passes=READ,
        copies=2,
    ),
    "adapters": Case(settings=(LORA,), passes=("log_probs",)),
    "adapters on nf4": Case(settings=(LORA, "model.base_dtype=nf4")),
    "experts": Case("qwen3_moe", settings=(RECOMPUTED, *ROUTER_LOSSES), passes=READ),
    "a shared expert": Case("qwen2_moe", passes=("log_probs",)),
    "biased experts": Case("gpt_oss", settings=(NO_PREFIXES,), passes=("log_probs",)),
    "adapters of experts": Case("qwen3_moe", settings=(SMALL_LORA, EXPERT_LORA)),
}


@pytest.mark.drawn(2, always=("recomputed",))
@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_the_host_waits_for_no_micro_batch(
    name: str, rank: ProcessPoolExecutor, tmp_path: Path
) -> None:
    case = WITHOUT_WAITS[name]
    more = rank.submit(measure_more, case, tmp_path).result()
    assert {label: work.waits for label, work in more.items()} == dict.fromkeys(more, 0)
    assert max(work.copies for work in more.values()) <= case.copies
    assert min(work.kernels for work in more.values()) > 50


@pytest.mark.parametrize("settings", [(), (RECOMPUTED,)])
def test_shared_experts_wait_once_a_layer(
    settings: tuple[str, ...], rank: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """The counts of tokens arrive on the host. Backward and recomputation read the same."""
    parallel = "policy.parallel.expert_parallel=2"
    case = Case("qwen3_moe", settings=(parallel, *settings), passes=("log_probs",))
    more = rank.submit(measure_more, case, tmp_path).result()
    layers = MODELS["qwen3_moe"]["num_hidden_layers"]
    assert {work.waits for work in more.values()} == {layers}
