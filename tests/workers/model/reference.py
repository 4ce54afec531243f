"""The outcome of a case by transformers' own forward pass, one unpadded sequence at a time, in float64.

Losses, metrics and the optimiser's step are written out again.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from tests.workers.model.cases import CENTRED, GROUPS, OPTIMIZER, Case, Outcome, of_hidden
from tests.workers.model.float64 import compute_states_in_float64
from tests.workers.model.tiny import (
    WITH_STATES,
    compute_in_float64,
    log_probs_in,
    teacher_of,
    unpacked_distributions,
    unpacked_values,
)
from workers.batch.dataproto import DataProto
from workers.config.model import ROUNDED
from workers.config.roles import LoraConfig, LossConfig
from workers.model.checkpoint.lora import add_adapters
from workers.model.low_bit_linear import dequantize, quantize

LOAD = "expert_load_max_over_mean"


@cache
def reference_outcome(case: Case, path: str) -> Outcome:
    kind = AutoModelForCausalLM if case.head == "lm" else AutoModelForSequenceClassification
    attention = "eager" if case.family == "gpt_oss" else "sdpa"  # which leaves out sinks
    model = kind.from_pretrained(path, dtype=torch.float64, attn_implementation=attention)
    if case.lora:
        add_adapters(model, case.adapters)
    if case.base_dtype in ROUNDED:
        round_base(model, case.base_dtype)
    keep_float64(case, model)
    sequences = case.sequences
    mismatch = replay_routers(model, sequences, case.router_replay)
    load, routers = expert_load(model), router_losses(model, case.router_losses)
    outputs, loss, metrics = (policy_reference if case.head == "lm" else value_reference)(
        case, model, sequences
    )
    added, measured = routers()
    (loss + added).backward()
    gradients = {
        name: each.grad.clone()
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    reference_update(model)
    steps = {"grad_norm": float(norm), "skipped_steps": 0.0, "learning_rate": 0.5e-2}
    return Outcome(
        dict(enumerate(outputs)),
        {**metrics, **load(), **mismatch(), **measured, **steps, "loss": loss.item()},
        gradients,
        # By the names of the files.
        revert_weight_conversion(model, merged_weights(model, case.adapters)),
    )


def round_base(model: Any, base_dtype: str) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(".base_layer.weight"):
            parameter.data.copy_(dequantize(*quantize(parameter.data, base_dtype)))


def policy_reference(
    case: Case, model: Any, sequences: DataProto
) -> tuple[list[Tensor], Tensor, dict[str, float]]:
    distributions = list(unpacked_distributions(model, sequences, case.temperature))
    found = log_probs_in(distributions, sequences)
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    outputs = [
        (torch.stack(both, -1) * mask[:, None]).detach()
        for both, mask in zip(found, masks, strict=True)
    ]
    distances = None
    if case.distillation[0]:
        distances = divergences(
            case, teacher_of(model.name_or_path), sequences, distributions
        )
    hidden = hidden_terms(model, sequences) if case.hidden_states else None
    return outputs, *reference_loss(
        found, sequences, case.loss, distances=distances, added=hidden
    )


def hidden_terms(model: Any, sequences: DataProto) -> list[Tensor]:
    """`of_hidden` of the states before each token, [L] of each sequence; position 0 holds 0."""
    found = []
    for ids in sequences.tokens["input_ids"].split(sequences.lengths.tolist()):
        terms = of_hidden(
            model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        )
        found.append(torch.cat([terms.new_zeros(1), terms]))
    return found


def divergences(
    case: Case, path: str, sequences: DataProto, students: list[Tensor]
) -> list[Tensor]:
    """From the teacher at `path`, [L] of each sequence; position 0 holds 0."""
    over, kind = case.distillation
    teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    keep_float64(case, teacher)
    found, starts = [], sequences.offsets
    with torch.no_grad():
        teachers = list(unpacked_distributions(teacher, sequences, case.temperature))
    for index, (log_p, log_q) in enumerate(zip(students, teachers, strict=True)):
        if over == "token":
            ids = sequences.tokens["input_ids"][starts[index] + 1 : starts[index + 1], None]
            distance = (log_p - log_q[:, : log_p.shape[-1]]).gather(-1, ids).squeeze(-1)
        elif over == "vocabulary":
            distance = divergence(
                kind, log_p.exp(), log_q[:, : log_p.shape[-1]].softmax(-1)
            )
        else:
            top = log_q[:, : log_p.shape[-1]].topk(case.taught.top_k).indices
            parts = [each.exp().gather(-1, top) for each in (log_p, log_q)]
            distance = divergence(
                kind,
                *(torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in parts),
            )
        found.append(torch.cat([log_p.new_zeros(1), distance]))
    return found


def divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """Of distributions over the last dimension, by the definitions."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one.log() - other.log())).sum(-1)

    m = (p + q) / 2
    return {
        "reverse_kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jsd": (kl(p, m) + kl(q, m)) / 2,
    }[kind]


def value_reference(
    case: Case, model: Any, sequences: DataProto
) -> tuple[list[Tensor], Tensor, dict[str, float]]:
    """A value stands at the token it is a value before: the hidden state one earlier."""
    found = unpacked_values(model, sequences)
    values = torch.cat([torch.cat([each[:1] * 0, each[:-1]]) for each in found])
    mask, lengths = sequences.tokens["loss_mask"], sequences.lengths.tolist()
    scores = torch.cat([each[-1:].expand(len(each)) for each in found])
    outputs = torch.stack([values * mask, scores], -1).detach()
    loss = 0.5 * (values - sequences.tokens["returns"])[mask].square().mean()
    if case.scored:
        loss = score_reference(case.scored, torch.cat(found)[mask], sequences)
    return list(outputs.split(lengths)), loss, {}


def score_reference(name: str, scores: Tensor, sequences: DataProto) -> Tensor:
    """Of scores at the tokens with `loss_mask`, as the papers write it. Pairs are of sequences 0 and 1, 2 and
    3, ...
    """
    if name == "process":
        right, y = (
            scores.sigmoid(),
            sequences.tokens["label"][sequences.tokens["loss_mask"]],
        )
        return -(y * right.log() + (1 - y) * (1 - right).log()).mean()
    labels = sequences.columns["label"]
    if name == "regression":
        return ((scores - labels) ** 2).mean()
    chosen, rejected, margins = scores[0:10:2], scores[1:10:2], labels[0:10:2]
    ranked = -(chosen - rejected - margins).sigmoid().log()
    return (ranked + CENTRED * (chosen + rejected) ** 2).mean()


def merged_weights(model: Any, lora: LoraConfig) -> dict[str, Tensor]:
    """The model's weights by name, each adapter added to the weight it adapts: W + alpha / rank B A."""
    state = dict(model.state_dict())
    for name in [name for name in state if ".lora_A." in name]:
        stem, _, rest = name.partition(".lora_A.")
        change = state.pop(f"{stem}.lora_B.{rest}") @ state.pop(name)
        state[f"{stem}.weight"] = (
            state.pop(f"{stem}.base_layer.weight") + lora.alpha / lora.rank * change
        )
    return {name.replace(".base_layer.", "."): weight for name, weight in state.items()}


def replay_routers(
    model: torch.nn.Module, sequences: DataProto, setting: str
) -> Callable[[], dict[str, float]]:
    """Let the routers of a Qwen3-MoE choose as recorded, sequence after sequence; the metric of
    its passes.
    """
    if setting == "none":
        return dict
    recorded = sequences.tokens["routed_experts"].long().split(sequences.lengths.tolist())
    passes, differing, compared = Counter[int](), [], []

    def hook(layer: int) -> Callable[..., Any]:
        def choose(router: torch.nn.Module, given: Any, outputs: Any) -> Any:
            logits, _, own = outputs
            choice = recorded[passes[layer]][:, layer]
            passes[layer] += 1
            known = choice[:, :1] < 255
            compared.append(2 * int(known.sum()))
            differing.append(
                sum(
                    one not in mine
                    for one, mine in expert_pairs(choice[known[:, 0]], own[known[:, 0]])
                )
            )
            if setting == "compare":
                return outputs
            choice = torch.where(known, choice, own)
            scores = logits.softmax(-1).gather(-1, choice)
            return (
                logits,
                scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores,
                choice,
            )

        return choose

    for layer, decoder_layer in enumerate(model.model.layers):
        decoder_layer.mlp.gate.register_forward_hook(hook(layer))
    return lambda: {"router_mismatch": sum(differing) / sum(compared)}


def expert_pairs(choice: Tensor, own: Tensor) -> list[tuple[int, list[int]]]:
    return [
        (one, mine)
        for chosen, mine in zip(choice.tolist(), own.tolist(), strict=True)
        for one in chosen
    ]


def expert_load(model: torch.nn.Module) -> Callable[[], dict[str, float]]:
    chosen: dict[torch.nn.Module, list[Tensor]] = {}
    for module in model.modules():
        if hasattr(module, "experts"):
            chosen[module.experts] = []
            module.experts.register_forward_pre_hook(
                lambda experts, given: chosen[experts].append(given[1].flatten())
            )

    def load() -> dict[str, float]:
        counts = [
            torch.bincount(torch.cat(taken), minlength=experts.num_experts)
            for experts, taken in chosen.items()
        ]
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
                lambda router, given, outputs: (
                    passes[router].append((outputs[0], outputs[2])) or None
                )
            )

    def losses() -> tuple[Tensor, dict[str, float]]:
        layers = passes.values()
        balance = torch.stack(
            [
                torch.stack([balance_loss(*each) for each in layer]).mean()
                for layer in layers
            ]
        )
        z = torch.stack(
            [
                torch.cat([logits for logits, _ in layer]).logsumexp(-1).square().mean()
                for layer in layers
            ]
        )
        metrics = {
            "router_aux_loss": balance.mean().item(),
            "router_z_loss": z.mean().item(),
        }
        kept = {
            name: metrics[name]
            for name, each in zip(metrics, coefficients, strict=True)
            if each
        }
        return coefficients[0] * balance.sum() + coefficients[1] * z.sum(), kept

    return losses


def balance_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """Equations 17 to 20 of arXiv:2412.19437, of one sequence in one layer."""
    experts = logits.shape[-1]
    load = (
        torch.bincount(chosen.flatten(), minlength=experts).double()
        * experts
        / chosen.numel()
    )
    return (load * logits.softmax(-1).mean(0)).sum()


def reference_loss(
    outputs: list,
    sequences: DataProto,
    config: LossConfig,
    groups: Tensor = GROUPS,
    distances: list[Tensor] | None = None,
    added: list[Tensor] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """distances: to the teacher, [L] of each sequence. added: to the losses."""
    by_sequence, watched, owners, taught = [], [], [], []
    for index, (log_probs, entropy) in enumerate(outputs):
        part = sequences.slice(index, index + 1)
        mask = part.tokens["loss_mask"]
        if not mask.any():
            continue
        log_probs, entropy = log_probs[mask], entropy[mask]
        old, reference, rollout = (
            part.tokens[f"{name}_log_probs"][mask]
            for name in ("old", "reference", "rollout")
        )
        advantage = part.columns["advantages"]
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        kl = (reference - log_probs).exp() - 1 - (reference - log_probs)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        owners.append(int(groups[index]))
        losses = (
            -surrogate - config.entropy_coefficient * entropy + config.kl_coefficient * kl
        )
        if distances is not None:
            distance = distances[index][mask]
            taught.append(distance.detach())
            by_token = config.distillation.over == "token"
            losses = losses + config.distillation.coefficient * (
                ratio * taught[-1] if by_token else distance
            )
        by_sequence.append(losses if added is None else losses + added[index][mask])
        approximate_kl = ratio.log() - 1 + 1 / ratio
        was_clipped = (clipped * advantage < ratio * advantage).double()
        watched.append(
            torch.stack(
                [was_clipped, approximate_kl, entropy, kl, (rollout - log_probs).abs()]
            ).detach()
        )
    every = torch.cat(watched, dim=1)
    names = [
        "clip_fraction",
        "approximate_kl",
        "entropy",
        "reference_kl",
        "rollout_mismatch_mean",
    ]
    metrics = {
        **dict(zip(names, every.mean(1).tolist(), strict=True)),
        "rollout_mismatch_max": float(every[4].max()),
    }
    if distances is not None:
        metrics["teacher_divergence"] = float(torch.cat(taught).mean())
    return aggregated(by_sequence, owners, config), metrics


def aggregated(by_sequence: list[Tensor], owners: list[int], config: LossConfig) -> Tensor:
    """The losses [L] of sequences of groups `owners`, none of them empty, under the config's normaliser."""
    if config.aggregation == "token_mean":
        return torch.cat(by_sequence).mean()
    if config.aggregation == "sequence_mean_token_mean":
        return torch.stack([losses.mean() for losses in by_sequence]).mean()
    if config.aggregation == "group_mean_token_mean":
        groups: dict[int, list[Tensor]] = {}
        for losses, owner in zip(by_sequence, owners, strict=True):
            groups.setdefault(owner, []).append(losses)
        return torch.stack([torch.cat(group).mean() for group in groups.values()]).mean()
    sums = torch.stack([losses.sum() for losses in by_sequence]).mean()
    return (
        sums / config.constant_length
        if config.aggregation == "sequence_mean_token_sum_norm"
        else sums
    )


def reference_update(model: torch.nn.Module) -> None:
    """The first AdamW step by hand: corrected moments are the gradient and its square. Half the peak rate:
    warm-up.
    """
    rate = OPTIMIZER.learning_rate / 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            # experts' biases are stacked, Kimi's decay rates are [1, 1, heads, 1]
            is_matrix = parameter.ndim >= 2 and not name.endswith(("bias", "A_log"))
            decay = OPTIMIZER.weight_decay if is_matrix else 0.0
            step = parameter.grad / (parameter.grad.abs() + OPTIMIZER.epsilon)
            parameter.mul_(1 - rate * decay).sub_(rate * step)


def keep_float64(case: Case, model: Any) -> None:
    if case.family in WITH_STATES:
        compute_states_in_float64(model)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        return
    if (
        case.share_prefixes == "always"
        or case.hidden_states
        or model._can_set_experts_implementation()
    ):
        compute_in_float64(model)
