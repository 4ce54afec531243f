"""The promise of the engine: how a mini-batch is cut, packed and spread over ranks changes nothing beyond rounding.

Reference: transformers' own forward pass, one unpadded sequence at a time, and the loss written out again. Against it:
random plans in shuffled order, with empty micro-batches, on 1, 2 and 4 ranks (gloo processes, FSDP2, HSDP), under
context parallelism by both methods, tensor parallelism, and the two together.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from controller.actors.roles import _model_arguments
from controller.config import load
from tests.controller.config_workspace import write_workspace
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import (
    compute_in_float64,
    random_sequences,
    relative_error,
    save_tiny_model,
    unpacked_log_probs,
)
from workers.config import LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from workers.dataproto import DataProto
from workers.metrics import Metrics, merge, results
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, group_tokens, make_policy_loss, sft
from workers.model.parallel import full_tensor
from workers.model.shared_attention import SharedAttention

CONSTANT_LENGTH = 40
LOAD = "expert_load_max_over_mean"
GROUPS = torch.arange(11) // 3  # of the sequences
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.1, warmup_steps=1, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One model, loss and way to compute it."""

    family: str = "qwen2"
    tied: bool = True
    dtype: str = "float64"
    aggregation: str = "token_mean"
    temperature: float = 1.0
    reshard_after_forward: bool = True
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    layout: str = "packed"
    forward_layout: str = "same"
    share_prefixes: str = "never"
    shared_by: str = "tree"  # attention of shared tokens: a call a tree as on CPUs, a level or a path as on GPUs
    layers: int = 2
    router_replay: str = "none"
    router_losses: tuple[float, float] = (0.0, 0.0)  # coefficients of load-balancing and z-loss

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.dtype == "float64" else 1e-5

    @property
    def sequences(self) -> DataProto:
        sequences = random_sequences(branching=self.share_prefixes == "always")
        columns = sequences.columns | {"group_tokens": group_tokens(sequences, GROUPS)}
        tokens = sequences.tokens
        if self.router_replay != "none":
            tokens = tokens | {"routed_experts": recorded_choices(sequences, self.layers)}
        return replace(sequences, columns=columns, tokens=tokens)

    @property
    def loss(self) -> LossConfig:
        return LossConfig(
            aggregation=self.aggregation,
            constant_length=CONSTANT_LENGTH if self.aggregation == "sequence_mean_token_sum_norm" else 0,
            clip_high=0.3,
            entropy_coefficient=0.02,
            kl_coefficient=0.1,
        )


CASES = {
    "qwen2": Case(),
    "qwen2 float32": Case(dtype="float32", reshard_after_forward=False),
    "qwen2 padded": Case(layout="padded"),
    "qwen2 packed, padded forward": Case(forward_layout="padded"),
    "qwen2 padded, packed forward": Case(layout="padded", forward_layout="packed"),
    "qwen2 gathered": Case(reshard_after_forward=False, aggregation="sequence_mean_token_mean"),
    "qwen3 untied": Case("qwen3", tied=False, aggregation="sequence_mean_token_mean", temperature=0.7),
    "llama checkpointed": Case("llama", aggregation="sequence_mean_token_sum", gradient_checkpointing=True),
    "mistral windowed": Case("mistral windowed"),
    "qwen2 shared": Case(share_prefixes="always", shared_by="level"),
    "qwen3 shared": Case(
        "qwen3", tied=False, aggregation="sequence_mean_token_mean", temperature=0.7, share_prefixes="always"
    ),
    "llama shared, checkpointed": Case(
        "llama",
        aggregation="sequence_mean_token_sum",
        gradient_checkpointing=True,
        share_prefixes="always",
        shared_by="level",
    ),
    "qwen2 shared, by norm": Case(
        aggregation="sequence_mean_token_sum_norm", share_prefixes="always", shared_by="path"
    ),
    "qwen2 shared, by group": Case(aggregation="group_mean_token_mean", share_prefixes="always"),
    "qwen3_moe shared": Case("qwen3_moe", tied=False, share_prefixes="always"),
    "mistral offloaded": Case("mistral", tied=False, gradient_checkpointing=True, activation_offload=True),
    "qwen2 of 5 layers": Case(layers=5),
    "qwen3 of 8 layers, untied": Case(
        "qwen3", tied=False, aggregation="sequence_mean_token_mean", temperature=0.7, layers=8
    ),
    "qwen3_moe of 3 layers": Case(
        "qwen3_moe", tied=False, reshard_after_forward=False, share_prefixes="always", layers=3
    ),
}


@dataclass(frozen=True)
class Way:
    """Ranks and how they share the model."""

    ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def dp(self) -> int:
        parallel = self.parallel
        return self.ranks // (parallel.context_parallel * parallel.tensor_parallel * parallel.pipeline_parallel)


def shared(
    ranks: int,
    cp: int = 1,
    method: str = "ulysses",
    tp: int = 1,
    replicate: int = 1,
    pp: int = 1,
    virtual: int = 1,
) -> Way:
    return Way(ranks, ParallelConfig(cp, method, tp, replicate, pipeline_parallel=pp, virtual_stages=virtual))


WAYS = {
    "1 rank": Way(),
    "2 ranks": Way(2),
    "4 ranks": Way(4),
    "2 copies on 2 ranks": shared(4, replicate=2),
    "ulysses 2": shared(2, cp=2),
    "ulysses 4, more than key-value heads": shared(4, cp=4),
    "ring 2": shared(2, cp=2, method="ring"),
    "ring 4": shared(4, cp=4, method="ring"),
    "dp 2, ulysses 2": shared(4, cp=2),
    "2 copies, ring 2": shared(4, cp=2, method="ring", replicate=2),
    "tp 2": shared(2, tp=2),
    "dp 2, tp 2": shared(4, tp=2),
    "2 copies, tp 2": shared(4, tp=2, replicate=2),
    "ulysses 2, tp 2": shared(4, cp=2, tp=2),
    "ring 2, tp 2": shared(4, cp=2, method="ring", tp=2),
    "pp 2": shared(2, pp=2),
    "pp 4": shared(4, pp=4),
    "pp 2, dp 2": shared(4, pp=2),
    "pp 2, 2 copies": shared(4, pp=2, replicate=2),
    "pp 2, ulysses 2": shared(4, cp=2, pp=2),
    "pp 2, ring 2": shared(4, cp=2, method="ring", pp=2),
    "pp 2, tp 2": shared(4, tp=2, pp=2),
    "pp 2 x 2": shared(2, pp=2, virtual=2),
    "pp 4 x 2": shared(4, pp=4, virtual=2),
    "pp 2 x 2, 2 copies": shared(4, pp=2, virtual=2, replicate=2),
    "pp 2 x 2, ring 2": shared(4, cp=2, method="ring", pp=2, virtual=2),
}
IN_STAGES = [way for way in WAYS if way.startswith("pp")]


# One model in every way, and every other model in those that could treat it differently.
COMBINATIONS = [
    *(("qwen2", way) for way in WAYS if way not in IN_STAGES),
    *(("qwen2 of 5 layers", way) for way in IN_STAGES if way != "pp 4 x 2"),
    ("qwen3 of 8 layers, untied", "pp 4 x 2"),
    *(("qwen3 of 8 layers, untied", way) for way in ("pp 4", "pp 2, ring 2", "pp 2, tp 2")),
    ("qwen3_moe of 3 layers", "pp 2, dp 2"),
    *(("qwen2 padded", way) for way in ("pp 2", "pp 2, 2 copies")),
    ("qwen2 shared", "pp 2, ulysses 2"),
    ("llama checkpointed", "pp 2, 2 copies"),
    ("mistral offloaded", "pp 2"),
    *(("qwen2 float32", way) for way in ("2 ranks", "ring 2, tp 2")),
    *(("qwen2 padded", way) for way in ("1 rank", "4 ranks", "ulysses 2", "ring 2", "tp 2")),
    ("qwen2 packed, padded forward", "1 rank"),
    ("qwen2 padded, packed forward", "ring 2, tp 2"),
    *(("qwen2 gathered", way) for way in ("dp 2, ulysses 2", "ring 2")),
    *(("qwen3 untied", way) for way in ("2 ranks", "ring 4", "ulysses 2, tp 2")),
    *(("llama checkpointed", way) for way in ("2 copies, ring 2", "dp 2, tp 2")),
    ("mistral offloaded", "ulysses 2, tp 2"),
    ("mistral windowed", "ulysses 2"),
    *(("qwen2 shared", way) for way in ("1 rank", "4 ranks", "2 copies on 2 ranks", "ulysses 2", "ring 2", "tp 2")),
    *(("qwen3 shared", way) for way in ("2 ranks", "ulysses 4, more than key-value heads", "ulysses 2, tp 2")),
    *(("qwen3 shared", way) for way in ("ring 4", "ring 2, tp 2")),
    *(("llama shared, checkpointed", way) for way in ("dp 2, ulysses 2", "2 copies, ring 2", "dp 2, tp 2")),
    *(("qwen2 shared, by norm", way) for way in ("2 ranks", "ulysses 2", "ring 4")),
    *(("qwen2 shared, by group", way) for way in ("2 ranks", "ulysses 2", "ring 2")),
    *(("qwen3_moe shared", way) for way in ("2 ranks", "ring 2")),
]


@dataclass(frozen=True)
class RankShare:
    """What a plan gives one dp rank: rows of `random_sequences()`, and micro-batches over these."""

    rows: list[int]
    micro_batches: list[tuple[int, int]]


def random_plan(dp: int, seed: int, count: int = 11) -> list[RankShare]:
    """Sequences in random order; ranks with at least one; micro-batches of any size, none included, in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    bounds = (torch.randperm(count - 1, generator=generator)[: dp - 1] + 1).sort().values.tolist()
    steps = int(torch.randint(1, 5, (), generator=generator))
    shares = []
    for rows in order.tensor_split(bounds):
        cuts = torch.randint(0, len(rows) + 1, (steps - 1,), generator=generator).sort().values.tolist()
        spans = list(zip([0, *cuts], [*cuts, len(rows)], strict=True))
        shares.append(RankShare(rows.tolist(), [spans[i] for i in torch.randperm(steps, generator=generator)]))
    return shares


def build_engine(case: Case, path: str, parallel: ParallelConfig) -> TrainingEngine:
    engine = TrainingEngine(
        ModelConfig(
            path=path,
            dtype=case.dtype,
            gradient_checkpointing=case.gradient_checkpointing,
            activation_offload=case.activation_offload,
            layout=case.layout,
            forward_layout=case.forward_layout,
            share_prefixes=case.share_prefixes,
            min_shared_tokens=1,
            router_replay=case.router_replay,
            router_aux_loss_coefficient=case.router_losses[0],
            router_z_loss_coefficient=case.router_losses[1],
        ),
        optimizer=OPTIMIZER,
        total_steps=10,
        device="cpu",
        reshard_after_forward=case.reshard_after_forward,
        temperature=case.temperature,
        parallel=parallel,
    )
    keep_float64(case, engine.module.model)
    return engine


def keep_float64(case: Case, model: torch.nn.Module) -> None:
    """Norms and routers in float64 where tokens are shared. transformers' are in float32, also of a float64 model: then
    it shows in the gradients whether a token's parts are added before its norm, or after."""
    if case.share_prefixes == "always" or model._can_set_experts_implementation():
        compute_in_float64(model)


@dataclass
class Outcome:
    """What one way of computing gives: values by row of `random_sequences()`, then gradients and weights by name."""

    log_probs: dict[int, Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference_outcome(case: Case, path: str) -> Outcome:
    attention = "eager" if case.family == "gpt_oss" else "sdpa"  # which leaves out sinks
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=attention)
    keep_float64(case, model)
    sequences = case.sequences
    mismatch = replay_routers(model, sequences, case.router_replay)
    load, routers = expert_load(model), router_losses(model, case.router_losses)
    outputs = unpacked_log_probs(model, sequences, case.temperature)
    loss, metrics = reference_loss(outputs, sequences, case.loss)
    added, measured = routers()
    (loss + added).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    reference_update(model)
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    steps = {"grad_norm": float(norm), "skipped_steps": 0.0, "learning_rate": 0.5e-2}
    return Outcome(
        {index: (outputs[index][0] * masks[index]).detach() for index in range(len(sequences))},
        {**metrics, **load(), **mismatch(), **measured, **steps, "loss": loss.item()},
        gradients,
        revert_weight_conversion(model, dict(model.state_dict())),  # by the names of the files
    )


def recorded_choices(sequences: DataProto, layers: int) -> Tensor:
    """int16 [T, layers, 2]: two of four experts, the same where sequences begin alike; -1 for each last token."""
    ids, ends = sequences.tokens["input_ids"], sequences.lengths.cumsum(0)
    places = torch.arange(len(ids)) - torch.repeat_interleave(ends - sequences.lengths, sequences.lengths)
    mixed = (7 * ids + 3 * places)[:, None] + 5 * torch.arange(layers)
    first = mixed % 4
    chosen = torch.stack([first, (first + 1 + mixed // 4 % 3) % 4], dim=-1)
    chosen[ends - 1] = -1
    return chosen.to(torch.int16)


def replay_routers(model: torch.nn.Module, sequences: DataProto, setting: str) -> Callable[[], dict[str, float]]:
    """Let the routers of a Qwen3-MoE choose as recorded, sequence after sequence; the metric of its passes."""
    if setting == "none":
        return dict
    recorded = sequences.tokens["routed_experts"].long().split(sequences.lengths.tolist())
    passes, differing, compared = Counter[int](), [], []

    def hook(layer: int) -> Callable[..., Any]:
        def choose(router: torch.nn.Module, given: Any, outputs: Any) -> Any:
            logits, _, own = outputs
            choice = recorded[passes[layer]][:, layer]
            passes[layer] += 1
            known = choice[:, :1] >= 0
            compared.append(2 * int(known.sum()))
            differing.append(sum(one not in mine for one, mine in expert_pairs(choice[known[:, 0]], own[known[:, 0]])))
            if setting == "compare":
                return outputs
            choice = torch.where(known, choice, own)
            scores = logits.softmax(-1).gather(-1, choice)
            return logits, scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores, choice

        return choose

    for layer, decoder_layer in enumerate(model.model.layers):
        decoder_layer.mlp.gate.register_forward_hook(hook(layer))
    return lambda: {"router_mismatch": sum(differing) / sum(compared)}


def expert_pairs(choice: Tensor, own: Tensor) -> list[tuple[int, list[int]]]:
    return [(one, mine) for chosen, mine in zip(choice.tolist(), own.tolist(), strict=True) for one in chosen]


def expert_load(model: torch.nn.Module) -> Callable[[], dict[str, float]]:
    """What the engine's metric is to be after the passes that follow: of a mixture of experts alone."""
    chosen: dict[torch.nn.Module, list[Tensor]] = {}
    for module in model.modules():
        if hasattr(module, "experts"):
            chosen[module.experts] = []
            module.experts.register_forward_pre_hook(lambda experts, given: chosen[experts].append(given[1].flatten()))

    def load() -> dict[str, float]:
        counts = [torch.bincount(torch.cat(taken), minlength=experts.num_experts) for experts, taken in chosen.items()]
        worst = [float(count.max() / count.double().mean()) for count in counts]
        return {LOAD: max(worst)} if worst else {}

    return load


def router_losses(
    model: torch.nn.Module, coefficients: tuple[float, float]
) -> Callable[[], tuple[Tensor | float, dict[str, float]]]:
    """What the routers' losses add to the loss, and their metrics, after passes of one sequence each."""
    if coefficients == (0.0, 0.0):
        return lambda: (0.0, {})
    passes: dict[torch.nn.Module, list[tuple[Tensor, Tensor]]] = {}
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            passes[module] = []
            module.register_forward_hook(
                lambda router, given, outputs: passes[router].append((outputs[0], outputs[2])) or None
            )

    def losses() -> tuple[Tensor, dict[str, float]]:
        layers = passes.values()
        balance = torch.stack([torch.stack([balance_loss(*each) for each in layer]).mean() for layer in layers])
        z = torch.stack([torch.cat([logits for logits, _ in layer]).logsumexp(-1).square().mean() for layer in layers])
        metrics = {"router_aux_loss": balance.mean().item(), "router_z_loss": z.mean().item()}
        kept = {name: metrics[name] for name, each in zip(metrics, coefficients, strict=True) if each}
        return coefficients[0] * balance.sum() + coefficients[1] * z.sum(), kept

    return losses


def balance_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """Of one sequence in one layer, as equations 17 to 20 of arXiv:2412.19437 have it."""
    experts = logits.shape[-1]
    load = torch.bincount(chosen.flatten(), minlength=experts).double() * experts / chosen.numel()
    return (load * logits.softmax(-1).mean(0)).sum()


def reference_loss(outputs: list, sequences: DataProto, config: LossConfig) -> tuple[Tensor, dict[str, float]]:
    """Sequence by sequence; metrics are plain means over all loss tokens."""
    by_sequence, watched, owners = [], [], []
    for index, (log_probs, entropy) in enumerate(outputs):
        part = sequences.slice(index, index + 1)
        mask = part.tokens["loss_mask"]
        if not mask.any():
            continue
        log_probs, entropy = log_probs[mask], entropy[mask]
        old, reference, rollout = (part.tokens[f"{name}_log_probs"][mask] for name in ("old", "reference", "rollout"))
        advantage = part.columns["advantages"]
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        kl = (reference - log_probs).exp() - 1 - (reference - log_probs)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        owners.append(int(GROUPS[index]))
        by_sequence.append(-surrogate - config.entropy_coefficient * entropy + config.kl_coefficient * kl)
        approximate_kl = ratio.log() - 1 + 1 / ratio
        was_clipped = (clipped * advantage < ratio * advantage).double()
        watched.append(torch.stack([was_clipped, approximate_kl, entropy, kl, (rollout - log_probs).abs()]).detach())
    every = torch.cat(watched, dim=1)
    names = ["clip_fraction", "approximate_kl", "entropy", "reference_kl", "rollout_mismatch_mean"]
    metrics = {**dict(zip(names, every.mean(1).tolist(), strict=True)), "rollout_mismatch_max": float(every[4].max())}
    aggregate = {
        "token_mean": lambda: torch.cat(by_sequence).mean(),
        "sequence_mean_token_mean": lambda: torch.stack([losses.mean() for losses in by_sequence]).mean(),
        "sequence_mean_token_sum": lambda: torch.stack([losses.sum() for losses in by_sequence]).mean(),
        "sequence_mean_token_sum_norm": lambda: (
            torch.stack([losses.sum() for losses in by_sequence]).mean() / CONSTANT_LENGTH
        ),
        "group_mean_token_mean": lambda: torch.stack(
            [
                torch.cat([losses for losses, owner in zip(by_sequence, owners, strict=True) if owner == group]).mean()
                for group in set(owners)
            ]
        ).mean(),
    }
    return aggregate[config.aggregation](), metrics


def reference_update(model: torch.nn.Module) -> None:
    """The first AdamW step by hand: corrected moments are the gradient and its square. Half the peak rate: warm-up."""
    rate = OPTIMIZER.learning_rate / 2
    with torch.no_grad():
        for parameter in model.parameters():
            decay = OPTIMIZER.weight_decay if parameter.ndim >= 2 else 0.0
            step = parameter.grad / (parameter.grad.abs() + OPTIMIZER.epsilon)
            parameter.mul_(1 - rate * decay).sub_(rate * step)


def engine_outcome(case: Case, path: str, way: Way, seed: int) -> dict[str, Any]:
    """On one rank: one optimiser step under a random plan. Whole gradients and weights, own log-probs and metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedAttention, "_way", lambda *_: case.shared_by)
        return step_outcome(case, path, way, seed)


def step_outcome(case: Case, path: str, way: Way, seed: int) -> dict[str, Any]:
    engine = build_engine(case, path, way.parallel)
    share = random_plan(way.dp, seed)[dp_rank(engine.parallel)]
    whole = case.sequences
    mine = whole.select_idxs(share.rows)
    log_probs, _ = engine.log_probs(mine, share.micro_batches)
    denominators = Denominators.of(whole, GROUPS)
    metrics = engine.forward_backward(mine, share.micro_batches, make_policy_loss(case.loss), denominators)
    gradients = whole_gradients(engine)
    metrics |= engine.optimizer_step()
    weights = {name: weight.clone() for name, weight in engine.named_weights()}
    by_row = dict(zip(share.rows, log_probs.split(mine.lengths.tolist()), strict=True))
    leads = engine.parallel.leads_dp_group
    return {"leads": leads, "log_probs": by_row, "metrics": metrics, "gradients": gradients, "weights": weights}


def whole_gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    """Of the whole model by name, on every rank; a weight that two stages hold has the sum of its gradients."""
    stage, model = engine.stage, engine.module.model
    mine = {name: full_tensor(parameter.grad).clone() for name, parameter in model.named_parameters()}
    whole: dict[str, Tensor] = {}
    for part in stage.of_all(mine):
        for name, gradient in part.items():
            name = stage.tied[0] if stage.tied and name == stage.tied[1] else name
            whole[name] = whole[name] + gradient if name in whole else gradient
    return whole


def join_ranks(parts: list[dict[str, Any]]) -> Outcome:
    """What the driver makes of the ranks' results: those of one rank of each dp group."""
    leaders = [part for part in parts if part["leads"]]
    metrics: Metrics = merge(part["metrics"] for part in leaders)
    log_probs = {row: values for part in leaders for row, values in part["log_probs"].items()}
    for part in parts:
        for row, values in part["log_probs"].items():
            torch.testing.assert_close(values, log_probs[row], rtol=0, atol=0)  # the same on every rank of a dp group
    return Outcome(log_probs, results(metrics), parts[0]["gradients"], parts[0]["weights"])


def assert_same(actual: Outcome, expected: Outcome, tolerance: float) -> None:
    assert actual.metrics == pytest.approx(expected.metrics, rel=tolerance)
    for row, log_probs in expected.log_probs.items():
        torch.testing.assert_close(actual.log_probs[row], log_probs.float(), rtol=1e-5, atol=1e-6)
    assert actual.gradients.keys() == expected.gradients.keys()
    assert actual.weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        assert relative_error(actual.gradients[name].double(), gradient) < tolerance, name


def check(ranks: RankPool, case: Case, path: str, way: Way, seed: int) -> None:
    actual = join_ranks(ranks.run(engine_outcome, way.ranks, case, path, way, seed))
    expected = cached_reference(case, path)
    if case.share_prefixes == "always":  # a shared token is routed once, and in the reference once a sequence
        for routed in (LOAD, "router_mismatch"):
            assert (actual.metrics.pop(routed, None) is None) == (routed not in expected.metrics)
            kept = {name: each for name, each in expected.metrics.items() if name != routed}
            expected = replace(expected, metrics=kept)
    assert_same(actual, expected, case.tolerance)
    if case.dtype == "float64":
        for name, weight in expected.weights.items():
            # Looser than the gradients: a first step of AdamW divides each by its own size, however small.
            assert relative_error(actual.weights[name], weight) < 1e-6, name


@cache
def cached_reference(case: Case, path: str) -> Outcome:
    return reference_outcome(case, path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny_model(
            folder / name.replace(" ", "-"),
            case.family,
            tie_word_embeddings=case.tied,
            num_hidden_layers=case.layers,
        )
        for name, case in CASES.items()
    }


@pytest.mark.parametrize(("name", "way"), COMBINATIONS)
def test_p7_c1_every_way_of_sharing_equals_one_unpadded_sequence_at_a_time(ranks: RankPool, paths, name, way):
    check(ranks, CASES[name], paths[name], WAYS[way], seed=list(WAYS).index(way))


@given(st.integers(0, 2**31), st.sampled_from(["1 rank", "2 ranks", "4 ranks", "dp 2, ulysses 2", "ring 2"]))
@settings(max_examples=8, deadline=None)
def test_p7_random_plans_change_nothing(ranks: RankPool, paths, seed, way):
    check(ranks, CASES["qwen2"], paths["qwen2"], WAYS[way], seed)


@given(st.integers(0, 2**31), st.sampled_from(["1 rank", "2 ranks", "dp 2, ulysses 2", "ring 2", "tp 2"]))
@settings(max_examples=6, deadline=None)
def test_random_plans_of_sequences_that_share_change_nothing(ranks: RankPool, paths, seed, way):
    check(ranks, CASES["qwen2 shared"], paths["qwen2 shared"], WAYS[way], seed)


@pytest.mark.parametrize(
    ("name", "way", "defer"),
    [
        ("qwen2 gathered", "2 copies on 2 ranks", False),
        ("qwen2 gathered", "2 copies on 2 ranks", True),
        ("llama checkpointed", "2 copies, ring 2", False),
        ("llama checkpointed", "2 copies, ring 2", True),
        ("qwen2", "2 copies, tp 2", True),
        ("qwen2", "2 ranks", True),
        ("qwen2 of 5 layers", "pp 2, 2 copies", True),
        ("qwen2 of 5 layers", "pp 2 x 2, 2 copies", False),
        ("qwen2 of 5 layers", "pp 2 x 2", True),
    ],
)
def test_gradients_are_the_same_in_whichever_micro_step_they_are_reduced(ranks: RankPool, paths, name, way, defer):
    """Of four micro-steps, in some of which a rank has no work."""
    plans = ((seed, random_plan(WAYS[way].dp, seed)) for seed in count())
    seed = next(seed for seed, plan in plans if len(plan[0].micro_batches) == 4 and has_empty(plan))
    parallel = replace(WAYS[way].parallel, defer_gradient_reduction=defer)
    check(ranks, CASES[name], paths[name], Way(WAYS[way].ranks, parallel), seed)


def has_empty(plan: list[RankShare]) -> bool:
    return any(start == stop for share in plan for start, stop in share.micro_batches)


def collectives(path: str, arguments: dict[str, Any]) -> dict[str, int]:
    """On every rank: how often four micro-steps of a mini-batch call each collective that gradients may travel by."""
    engine = TrainingEngine(ModelConfig(path=path, dtype="float32"), optimizer=OPTIMIZER, total_steps=10, **arguments)
    sequences = random_sequences(dtype=torch.float32)
    steps = [(0, 5), (5, 5), (5, 8), (8, 11)]
    with CountedCalls() as calls:
        engine.forward_backward(sequences, steps, sft, Denominators.of(sequences))
    return dict(calls.counts)


class CountedCalls(TorchDispatchMode):
    """Counts operators by name. (torch's CommDebugMode loses track of modules that are called in a backward pass.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("overrides", "scatters", "sums"),
    [
        ((), 4, 0),
        (("policy.parallel.replicate=2",), 4, 1),
        (("policy.parallel.defer_gradient_reduction=true",), 1, 0),
        (("policy.parallel.replicate=2", "policy.parallel.defer_gradient_reduction=true"), 1, 1),
    ],
)
def test_a_configuration_says_when_gradients_are_reduced(
    ranks: RankPool, paths, tmp_path, overrides: tuple[str, ...], scatters: int, sums: int
):
    """By default in each of four micro-steps, and between copies of the model in the last."""
    config = load(write_workspace(tmp_path), ("policy.ranks=4", "model.share_prefixes=never", *overrides))
    settings = _model_arguments(config, config.model, config.policy)
    arguments = {name: settings[name] for name in ("device", "parallel")}
    units = 3  # two layers and the root
    for counts in ranks.run(collectives, 4, paths["qwen2"], arguments):
        assert counts["c10d._reduce_scatter_base_.default"] == scatters * units
        assert counts.get("c10d.allreduce_.default", 0) == sums * units


def save_and_compare(path: str, target: str, parallel: ParallelConfig) -> list[str]:
    """On every rank: what is written loads again, and equals what was gathered. Returns folders beside it."""
    engine = build_engine(CASES["qwen2"], path, parallel)
    folder = Path(target)
    if dist.get_rank() == 0:
        folder.mkdir()  # an older folder under the same name is replaced
        (folder / "stale").touch()
    dist.barrier()
    engine.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    for name, weight in engine.named_weights():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
    return sorted(entry.name for entry in folder.parent.iterdir())


@pytest.mark.parametrize("way", ["2 copies, ring 2", "dp 2, tp 2", "pp 2, tp 2"])
def test_saved_weights_are_whole_under_every_sharding(ranks: RankPool, paths, tmp_path, way):
    target = tmp_path / "exported"
    parallel = WAYS[way].parallel
    for left in ranks.run(save_and_compare, WAYS[way].ranks, paths["qwen2"], str(target), parallel):
        assert left == ["exported"]
    assert (target / "tokenizer.json").exists()
    assert not (target / "stale").exists()


def step_with_nan(path: str, way: Way) -> tuple[Metrics, bool]:
    """On every rank, with NaN in the rows of the last dp rank; metrics, and whether the weights are as before."""
    engine = build_engine(CASES["qwen2"], path, way.parallel)
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    share = random_plan(way.dp, seed=0)[dp_rank(engine.parallel)]
    sequences = random_sequences().select_idxs(share.rows)
    if dp_rank(engine.parallel) == way.dp - 1:
        sequences.columns["advantages"].fill_(torch.nan)
    denominators = Denominators.of(random_sequences())
    engine.forward_backward(sequences, share.micro_batches, make_policy_loss(LossConfig()), denominators)
    metrics = engine.optimizer_step()
    if not engine.parallel.leads_dp_group:
        metrics = {}
    return metrics, all(torch.equal(weight, before[name]) for name, weight in engine.named_weights())


@pytest.mark.parametrize("way", ["2 ranks", "dp 2, ulysses 2", "pp 2, dp 2"])
def test_nan_on_one_rank_makes_all_skip_the_step_which_counts_once(ranks: RankPool, paths, way):
    parts = ranks.run(step_with_nan, WAYS[way].ranks, paths["qwen2"], WAYS[way])
    assert all(unchanged for _, unchanged in parts)
    metrics = results(merge(metrics for metrics, _ in parts))
    assert metrics["skipped_steps"] == 1
    assert "grad_norm" not in metrics


def train_and_save(path: str, way: Way, folder: str) -> dict[str, Tensor]:
    """On every rank: one step, a checkpoint, one more step under another plan; the weights after it."""
    engine = build_engine(CASES["qwen2"], path, way.parallel)
    take_step(engine, way, seed=0)
    engine.save_checkpoint(folder, step=1)
    engine.wait_for_checkpoint()
    take_step(engine, way, seed=1)
    return {name: weight.clone() for name, weight in engine.named_weights()}


def load_and_train(path: str, way: Way, folder: str) -> dict[str, Tensor]:
    engine = build_engine(CASES["qwen2"], path, way.parallel)
    engine.load_checkpoint(folder)
    take_step(engine, way, seed=2)
    return {name: weight.clone() for name, weight in engine.named_weights()}


def take_step(engine: TrainingEngine, way: Way, seed: int) -> None:
    share, whole = random_plan(way.dp, seed)[dp_rank(engine.parallel)], random_sequences()
    loss = make_policy_loss(CASES["qwen2"].loss)
    engine.forward_backward(whole.select_idxs(share.rows), share.micro_batches, loss, Denominators.of(whole))
    engine.optimizer_step()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp 2, tp 2", "ring 2"),
        ("2 copies, ring 2", "tp 2"),
        ("pp 2, dp 2", "1 rank"),
        ("pp 2, tp 2", "pp 2, ring 2"),
        ("2 ranks", "pp 2"),
    ],
)
def test_training_goes_on_from_a_checkpoint_under_another_sharding(ranks: RankPool, paths, tmp_path, before, after):
    folder = str(tmp_path / "checkpoint")
    expected = ranks.run(train_and_save, WAYS[before].ranks, paths["qwen2"], WAYS[before], folder)[0]
    for weights in ranks.run(load_and_train, WAYS[after].ranks, paths["qwen2"], WAYS[after], folder):
        for name, weight in expected.items():
            assert relative_error(weights[name], weight) < 1e-6, name
