"""Compute one mini-batch on training ranks and by transformers alone, and compare.

Case (model, loss, how to compute) + Way (ranks, how they share it) --engine, a random plan--> Outcome
Case --transformers' forward pass, one unpadded sequence at a time, the loss written out again--> Outcome
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import (
    compute_in_float64,
    random_sequences,
    relative_error,
    unpacked_log_probs,
    unpacked_values,
)
from workers.config import LoraConfig, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig, ValueLossConfig
from workers.dataproto import DataProto
from workers.metrics import Metrics, merge, results
from workers.model.engine import TrainingEngine
from workers.model.lora import add_adapters
from workers.model.losses import Denominators, group_tokens, make_policy_loss, make_value_loss
from workers.model.parallel import full_tensor
from workers.model.shared_attention import SharedAttention

CONSTANT_LENGTH = 40
LOAD = "expert_load_max_over_mean"
GROUPS = torch.arange(11) // 3  # of the sequences
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.1, warmup_steps=1, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One model and loss, and settings that must not change what is learned."""

    family: str = "qwen2"
    tied: bool = True
    layers: int = 2
    sizes: tuple[tuple[str, Any], ...] = ()  # more of the model's configuration
    head: str = "lm"  # value: a critic and its loss
    dtype: str = "float64"
    aggregation: str = "token_mean"
    temperature: float = 1.0
    reshard_after_forward: bool = True
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    layout: str = "packed"
    forward_layout: str = "same"
    length_multiple: int = 1
    share_prefixes: str = "never"
    shared_by: str = "tree"  # attention of shared tokens: a call a tree as on CPUs, a level or a path as on GPUs
    router_replay: str = "none"
    router_losses: tuple[float, float] = (0.0, 0.0)  # coefficients of load-balancing and z-loss
    lora: tuple[tuple[str, Any], ...] = ()

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.dtype == "float64" else 1e-5

    @property
    def adapters(self) -> LoraConfig:
        return LoraConfig(**dict(self.lora))

    @property
    def model(self) -> tuple[Any, ...]:
        """The settings that the model's files depend on."""
        return self.family, self.tied, self.layers, self.sizes, self.head

    @property
    def sequences(self) -> DataProto:
        sequences = random_sequences(branching=self.share_prefixes == "always")
        columns = sequences.columns | {"group_tokens": group_tokens(sequences, GROUPS)}
        tokens = sequences.tokens
        if self.router_replay != "none":
            tokens = tokens | {"routed_experts": recorded_choices(sequences, self.layers)}
        if self.head == "value":
            tokens = tokens | {"returns": torch.linspace(-1, 2, sequences.num_tokens, dtype=torch.float64)}
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


@dataclass(frozen=True)
class Way:
    """Ranks and how they share the model."""

    ranks: int
    parallel: ParallelConfig

    @property
    def dp(self) -> int:
        parallel = self.parallel
        return self.ranks // (parallel.context_parallel * parallel.tensor_parallel * parallel.pipeline_parallel)


NAMES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "virtual": "virtual_stages", "copies": "replicate"}
NAMES |= {"ulysses": "context_parallel", "ring": "context_parallel", "ep": "expert_parallel"}


def way(text: str) -> Way:
    """From sizes such as "dp 2, ring 2, deferred". dp counts the ranks of all copies, and is their number by default.
    deferred: gradients are reduced in the last micro-step alone."""
    words = [part.split() for part in text.split(", ")]
    sizes = {word[0]: int(word[1]) for word in words if len(word) == 2}
    settings: dict[str, Any] = {NAMES[name]: size for name, size in sizes.items() if name != "dp"}
    if "ring" in sizes:
        settings["context_parallel_method"] = "ring"
    parallel = ParallelConfig(**settings, defer_gradient_reduction="deferred" in text)
    dp = sizes.get("dp", parallel.replicate)
    return Way(dp * parallel.context_parallel * parallel.tensor_parallel * parallel.pipeline_parallel, parallel)


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


@cache
def seed_with_gaps(dp: int, first: int) -> int:
    """A seed whose plan has four micro-steps, in some of which a rank has no work."""
    for seed in count(100 * first):
        plan = random_plan(dp, seed)
        spans = [span for share in plan for span in share.micro_batches]
        if len(plan[0].micro_batches) == 4 and any(start == stop for start, stop in spans):
            return seed
    raise AssertionError


def build_engine(case: Case, path: str, parallel: ParallelConfig) -> TrainingEngine:
    engine = TrainingEngine(
        ModelConfig(
            path=path,
            dtype=case.dtype,
            gradient_checkpointing=case.gradient_checkpointing,
            activation_offload=case.activation_offload,
            layout=case.layout,
            forward_layout=case.forward_layout,
            length_multiple=case.length_multiple,
            share_prefixes=case.share_prefixes,
            min_shared_tokens=1,
            router_replay=case.router_replay,
            router_aux_loss_coefficient=case.router_losses[0],
            router_z_loss_coefficient=case.router_losses[1],
            lora=case.adapters,
        ),
        optimizer=OPTIMIZER,
        total_steps=10,
        device="cpu",
        reshard_after_forward=case.reshard_after_forward,
        temperature=case.temperature,
        parallel=parallel,
        head=case.head,
    )
    keep_float64(case, engine.module.model)
    return engine


def keep_float64(case: Case, model: Any) -> None:
    """Norms and routers in float64 where tokens are shared. transformers' are in float32, also of a float64 model: then
    it shows in the gradients whether a token's parts are added before its norm, or after."""
    if case.share_prefixes == "always" or model._can_set_experts_implementation():
        compute_in_float64(model)


@dataclass
class Outcome:
    """outputs: by row of the mini-batch, [L, 2], log-probs and entropies, or values and the score of the sequence."""

    outputs: dict[int, Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@cache
def reference_outcome(case: Case, path: str) -> Outcome:
    kind = AutoModelForCausalLM if case.head == "lm" else AutoModelForSequenceClassification
    attention = "eager" if case.family == "gpt_oss" else "sdpa"  # which leaves out sinks
    model = kind.from_pretrained(path, dtype=torch.float64, attn_implementation=attention)
    if case.lora:
        add_adapters(model, case.adapters)
    keep_float64(case, model)
    sequences = case.sequences
    mismatch = replay_routers(model, sequences, case.router_replay)
    load, routers = expert_load(model), router_losses(model, case.router_losses)
    outputs, loss, metrics = (policy_reference if case.head == "lm" else value_reference)(case, model, sequences)
    added, measured = routers()
    (loss + added).backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    reference_update(model)
    steps = {"grad_norm": float(norm), "skipped_steps": 0.0, "learning_rate": 0.5e-2}
    return Outcome(
        dict(enumerate(outputs)),
        {**metrics, **load(), **mismatch(), **measured, **steps, "loss": loss.item()},
        gradients,
        revert_weight_conversion(model, merged_weights(model, case.adapters)),  # by the names of the files
    )


def policy_reference(case: Case, model: Any, sequences: DataProto) -> tuple[list[Tensor], Tensor, dict[str, float]]:
    found = unpacked_log_probs(model, sequences, case.temperature)
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    outputs = [(torch.stack(both, -1) * mask[:, None]).detach() for both, mask in zip(found, masks, strict=True)]
    return outputs, *reference_loss(found, sequences, case.loss)


def value_reference(case: Case, model: Any, sequences: DataProto) -> tuple[list[Tensor], Tensor, dict[str, float]]:
    """A value stands at the token it is a value before: the hidden state one earlier."""
    found = unpacked_values(model, sequences)
    values = torch.cat([torch.cat([each[:1] * 0, each[:-1]]) for each in found])
    mask, lengths = sequences.tokens["loss_mask"], sequences.lengths.tolist()
    scores = torch.cat([each[-1:].expand(len(each)) for each in found])
    outputs = torch.stack([values * mask, scores], -1).detach()
    loss = 0.5 * (values - sequences.tokens["returns"])[mask].square().mean()
    return list(outputs.split(lengths)), loss, {}


def merged_weights(model: Any, lora: LoraConfig) -> dict[str, Tensor]:
    """The model's weights by name, each adapter added to the weight it adapts: W + alpha / rank B A."""
    state = dict(model.state_dict())
    for name in [name for name in state if ".lora_A." in name]:
        stem, _, rest = name.partition(".lora_A.")
        change = state.pop(f"{stem}.lora_B.{rest}") @ state.pop(name)
        state[f"{stem}.weight"] = state.pop(f"{stem}.base_layer.weight") + lora.alpha / lora.rank * change
    return {name.replace(".base_layer.", "."): weight for name, weight in state.items()}


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
        for parameter in (each for each in model.parameters() if each.grad is not None):
            decay = OPTIMIZER.weight_decay if parameter.ndim >= 2 else 0.0
            step = parameter.grad / (parameter.grad.abs() + OPTIMIZER.epsilon)
            parameter.mul_(1 - rate * decay).sub_(rate * step)


def engine_outcomes(cases: list[Case], paths: list[str], way: Way, seeds: list[int]) -> list[dict[str, Any]]:
    """On one rank: one optimiser step of each case under a random plan."""
    found = []
    for case, path, seed in zip(cases, paths, seeds, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedAttention, "_way", lambda *_, case=case: case.shared_by)
            found.append(step_outcome(case, path, way, seed))
    return found


def step_outcome(case: Case, path: str, way: Way, seed: int) -> dict[str, Any]:
    """Whole gradients and weights, own outputs and metrics."""
    engine, whole = build_engine(case, path, way.parallel), case.sequences
    share = random_plan(way.dp, seed)[dp_rank(engine.parallel)]
    mine = whole.select_idxs(share.rows)
    if case.head == "lm":
        columns = list(engine.log_probs_and_entropies(mine, share.micro_batches)[:2])
    else:
        scores = engine.scores(mine, share.micro_batches)
        columns = [engine.values(mine, share.micro_batches)[0], torch.repeat_interleave(scores, mine.lengths)]
    metrics = learn(engine, case, way, seed)
    gradients = whole_gradients(engine)
    metrics |= engine.optimizer_step()
    outputs = torch.stack(columns, -1).split(mine.lengths.tolist())
    return {
        "leads": engine.parallel.leads_dp_group,
        "outputs": dict(zip(share.rows, outputs, strict=True)),
        "metrics": metrics,
        "gradients": gradients,
        "weights": {name: weight.clone() for name, weight in engine.named_weights()},
    }


def learn(engine: TrainingEngine, case: Case, way: Way, seed: int) -> Metrics:
    """Forward and backward passes of the mini-batch under a random plan."""
    share, whole = random_plan(way.dp, seed)[dp_rank(engine.parallel)], case.sequences
    loss = make_policy_loss(case.loss) if case.head == "lm" else make_value_loss(ValueLossConfig(clip=0.0))
    mine = whole.select_idxs(share.rows)
    return engine.forward_backward(mine, share.micro_batches, loss, Denominators.of(whole, GROUPS))


def whole_gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    """Of the whole model by name, on every rank; a weight that two stages hold has the sum of its gradients."""
    stage, parameters = engine.stage, engine.module.model.named_parameters()
    mine = {name: full_tensor(each.grad).clone() for name, each in parameters if each.grad is not None}
    whole: dict[str, Tensor] = {}
    for part in stage.of_all(mine):
        for name, gradient in part.items():
            name = stage.tied[0] if stage.tied and name == stage.tied[1] else name
            whole[name] = whole[name] + gradient if name in whole else gradient
    return whole


def join_ranks(parts: list[dict[str, Any]]) -> Outcome:
    """What the driver makes of the ranks' results: those of one rank of each dp group."""
    leaders = [part for part in parts if part["leads"]]
    outputs = {row: values for part in leaders for row, values in part["outputs"].items()}
    for part in parts:
        for row, values in part["outputs"].items():
            torch.testing.assert_close(values, outputs[row], rtol=0, atol=0)  # the same on every rank of a dp group
    metrics = results(merge(part["metrics"] for part in leaders))
    return Outcome(outputs, metrics, parts[0]["gradients"], parts[0]["weights"])


def assert_same(case: Case, actual: Outcome, expected: Outcome) -> None:
    left_out = {LOAD, "router_mismatch"} if case.share_prefixes == "always" else set()  # a shared token counts once
    left_out |= {"values", "returns", "returns_square", "value_error", "value_error_square"}
    found, known = (
        {name: each for name, each in outcome.metrics.items() if name not in left_out} for outcome in (actual, expected)
    )
    assert found == pytest.approx(known, rel=case.tolerance)
    assert actual.outputs.keys() == expected.outputs.keys()
    for row, outputs in expected.outputs.items():
        torch.testing.assert_close(actual.outputs[row], outputs.float(), rtol=1e-5, atol=1e-6)
    assert_gradients(actual.gradients, expected, case.tolerance)
    assert actual.weights.keys() == expected.weights.keys()
    if case.dtype == "float64":
        for name, weight in expected.weights.items():
            # Looser than the gradients: a first step of AdamW divides each by its own size, however small.
            assert relative_error(actual.weights[name], weight) < 1e-6, name


def assert_gradients(actual: dict[str, Tensor], expected: Outcome, tolerance: float) -> None:
    assert actual.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert relative_error(actual[name].double(), gradient) < tolerance, name


def check(ranks: RankPool, text: str, cases: list[Case], paths: list[str]) -> None:
    """That every case learns on the ranks of way(text) what one unpadded sequence at a time does."""
    on_ranks = way(text)
    seeds = [seed_with_gaps(on_ranks.dp, index) for index in range(len(cases))]
    by_rank = ranks.run(engine_outcomes, on_ranks.ranks, cases, paths, on_ranks, seeds)
    for case, path, parts in zip(cases, paths, zip(*by_rank, strict=True), strict=True):
        try:
            assert_same(case, join_ranks(list(parts)), reference_outcome(case, path))
        except AssertionError as error:
            error.add_note(f"on {text}: {case}")
            raise


class CountedCalls(TorchDispatchMode):
    """Counts operators by name. (torch's CommDebugMode loses track of modules that are called in a backward pass.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))
