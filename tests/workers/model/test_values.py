"""Value head, value loss and explained variance."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model, tiny_config
from workers.config import ModelConfig, OptimizerConfig, ParallelConfig, ValueLossConfig
from workers.dataproto import DataProto
from workers.errors import ConfigError, DataError
from workers.metrics import Metrics, merge, results
from workers.model.attention import choose_backend, packed_attention
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, ValuePredictions, explained_variance, make_value_loss, to_metrics
from workers.model.packing import ModelInput, pack, pad
from workers.model.values import PackedValueModel, last_cells, load_value_model, packed_value_model

CPU = torch.device("cpu")


def reward_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1), dtype=torch.float64)


def unpacked_values(model: PreTrainedModel, sequences: DataProto) -> list[Tensor]:
    """The head on transformers' own hidden states, [L] of every sequence run alone."""
    values = []
    for ids in sequences.tokens["input_ids"].split(sequences.lengths.tolist()):
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        values.append(model.score(hidden).squeeze(-1))
    return values


def through(module: PackedValueModel, rows: ModelInput, predicting: Tensor, layout: str) -> Tensor:
    if layout == "packed":
        backend = choose_backend("sdpa", CPU, torch.float64, module.required_features)
        attention = {"attention": packed_attention(backend, rows, CPU)}
    else:
        attention = {"attention": None, "attention_mask": rows.attention_mask}
    return module(rows.input_ids, rows.position_ids, predicting, **attention)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_values_and_gradients_equal_those_of_single_sequences(layout):
    sequences, model = random_sequences(), reward_model()
    module = packed_value_model(copy.deepcopy(model), ModelConfig(layout=layout))
    rows = (pack if layout == "packed" else pad)(sequences, 4)
    values = through(module, rows, rows.predicting, layout)
    scores = through(module, rows, last_cells(rows, len(sequences)), layout)
    values.square().sum().backward()
    scores.square().sum().backward()

    alone = unpacked_values(model, sequences)
    masks = sequences.tokens["loss_mask"].split(sequences.lengths.tolist())
    # A value stands at the token it is a value before: the hidden state one earlier.
    before = torch.cat([value[:-1][mask[1:]] for value, mask in zip(alone, masks, strict=True)])
    last = torch.stack([value[-1] for value in alone])
    # One after the other, as above: transformers' norms round each one's gradient to float32.
    before.square().sum().backward(retain_graph=True)
    last.square().sum().backward()
    assert relative_error(values, before) < 1e-9
    assert relative_error(scores, last) < 1e-9
    for (name, parameter), other in zip(module.model.named_parameters(), model.parameters(), strict=True):
        assert relative_error(parameter.grad, other.grad) < 1e-9, name


def test_a_micro_batch_without_work_has_no_values():
    nothing = random_sequences().slice(0, 0)
    for rows in (pack(nothing), pad(nothing)):
        assert len(last_cells(rows, 0)) == len(rows.predicting) == 0


def test_a_critic_from_a_causal_lm_starts_at_0_and_is_read_again_as_it_was_written(tmp_path):
    path = save_tiny_model(tmp_path / "lm")
    critic = load_value_model(ModelConfig(path=path), torch.float64)
    assert not critic.model.score.weight.any()
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    torch.testing.assert_close(critic.model.model.norm.weight, policy.model.norm.weight, rtol=0, atol=0)
    torch.nn.init.normal_(critic.model.score.weight)
    critic.model.save_pretrained(tmp_path / "critic")
    again = load_value_model(ModelConfig(path=str(tmp_path / "critic")), torch.float64)
    torch.testing.assert_close(again.model.score.weight, critic.model.score.weight, rtol=0, atol=0)


def test_an_incomplete_model_is_refused(tmp_path):
    path = save_tiny_model(tmp_path / "lm")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    state = {name: weight for name, weight in model.state_dict().items() if "layers.0.mlp.up" not in name}
    model.save_pretrained(path, state_dict=state)
    with pytest.raises(ConfigError, match=r"lacks 1 weights, the first is model\.layers\.0\.mlp\.up_proj"):
        load_value_model(ModelConfig(path=path), torch.float64)


OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
ROWS = ([7, 2, 10, 0, 5, 1], [3, 9, 6, 8, 4])
MICRO_BATCHES = ([(0, 2), (2, 5), (5, 6)], [(3, 5), (0, 3), (0, 0)])
TOGETHER = ([list(range(11))], [[(0, 4), (4, 11)]])  # of ranks that share every sequence


def for_a_critic() -> DataProto:
    sequences = random_sequences()
    returns = torch.linspace(-1, 2, sequences.num_tokens, dtype=torch.float64)
    return DataProto(sequences.lengths, sequences.tokens | {"returns": returns}, sequences.columns)


def critic_on_a_rank(path: str, context_parallel: int) -> tuple[dict[int, Tensor], Metrics, dict[str, Tensor]]:
    """(values by row, metrics, gradients by name) of this rank's share."""
    shares = (ROWS, MICRO_BATCHES) if context_parallel == 1 else TOGETHER
    rows, micro_batches = (share[dist.get_rank() // context_parallel] for share in shares)
    engine = TrainingEngine(
        ModelConfig(path=path, dtype="float64"),
        optimizer=OPTIMIZER,
        total_steps=5,
        device="cpu",
        head="value",
        parallel=ParallelConfig(context_parallel=context_parallel),
    )
    mine = for_a_critic().select_idxs(rows)
    values, _ = engine.values(mine, micro_batches)
    loss_function = make_value_loss(ValueLossConfig(clip=0.0))
    metrics = engine.forward_backward(mine, micro_batches, loss_function, Denominators.of(for_a_critic()))
    gradients = {name: p.grad.full_tensor().clone() for name, p in engine.module.model.named_parameters()}
    return dict(zip(rows, values.split(mine.lengths.tolist()), strict=True)), metrics, gradients


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_a_critic_on_two_ranks_equals_one_on_single_sequences(context_parallel, tmp_path, ranks):
    path = save_tiny_model(tmp_path)  # for its tokenizer
    reward_model().save_pretrained(path)
    parts = ranks.run(critic_on_a_rank, 2, path, context_parallel)[::context_parallel]

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    sequences = for_a_critic()
    alone = torch.cat([torch.cat([value[:1] * 0, value[:-1]]) for value in unpacked_values(model, sequences)])
    mask = sequences.tokens["loss_mask"]
    loss = 0.5 * (alone - sequences.tokens["returns"])[mask].square().mean()
    loss.backward()
    assert results(merge(part[1] for part in parts))["loss"] == pytest.approx(loss.item(), rel=1e-9)
    expected = (alone * mask).detach().float().split(sequences.lengths.tolist())
    for by_row, _, gradients in parts:
        for row, values in by_row.items():
            torch.testing.assert_close(values, expected[row], rtol=1e-5, atol=1e-6)
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-9, name


def scores_on_a_rank(path: str, context_parallel: int, layout: str) -> dict[int, Tensor]:
    shares = (ROWS, MICRO_BATCHES) if dist.get_world_size() > context_parallel else TOGETHER
    rows, micro_batches = (share[dist.get_rank() // context_parallel] for share in shares)
    engine = TrainingEngine(
        ModelConfig(path=path, dtype="float64", layout=layout),
        optimizer=None,
        total_steps=0,
        device="cpu",
        head="value",
        parallel=ParallelConfig(context_parallel=context_parallel),
    )
    scores = engine.scores(random_sequences().select_idxs(rows), micro_batches)
    return dict(zip(rows, scores, strict=True))


@pytest.mark.parametrize(
    ("count", "context_parallel", "layout"), [(1, 1, "packed"), (2, 1, "padded"), (2, 1, "packed"), (2, 2, "packed")]
)
def test_a_reward_model_scores_each_sequence_at_its_last_token(count, context_parallel, layout, tmp_path, ranks):
    path = save_tiny_model(tmp_path)  # for its tokenizer
    reward_model().save_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        alone = [values[-1] for values in unpacked_values(model, random_sequences())]
    parts = ranks.run(scores_on_a_rank, count, path, context_parallel, layout)
    assert {row for part in parts for row in part} == set(range(11))
    for part in parts:
        for row, score in part.items():
            assert score.item() == pytest.approx(alone[row].item(), rel=1e-5, abs=1e-6)


def test_training_a_critic_explains_more_of_the_returns(tmp_path):
    sequences, path = for_a_critic(), save_tiny_model(tmp_path)
    engine = TrainingEngine(
        ModelConfig(path=path, dtype="float64"), optimizer=OPTIMIZER, total_steps=30, device="cpu", head="value"
    )
    assert not engine.values(sequences, [(0, 11)])[0].any()
    loss_function, explained = make_value_loss(ValueLossConfig(clip=0.0)), []
    for _ in range(30):
        metrics = engine.forward_backward(sequences, [(0, 11)], loss_function, Denominators.of(sequences))
        explained.append(explained_variance(metrics))
        engine.optimizer_step()
    assert explained[0] == pytest.approx(0.0)
    assert explained[-1] > 0.5


def test_a_head_gives_only_what_it_has(tmp_path):
    path, sequences = save_tiny_model(tmp_path), random_sequences()

    def frozen(head: str) -> TrainingEngine:
        return TrainingEngine(ModelConfig(path=path), optimizer=None, total_steps=0, device="cpu", head=head)

    with pytest.raises(ConfigError, match="head='value'"):
        frozen("value").log_probs(sequences, [(0, 11)])
    with pytest.raises(ConfigError, match="head='lm'"):
        frozen("lm").values(sequences, [(0, 11)])
    with pytest.raises(ConfigError, match="head=reward is not one of lm, value"):
        frozen("reward")


def predictions(values: Tensor, **columns: list[float]) -> ValuePredictions:
    return ValuePredictions(
        values=values,
        columns={name: torch.tensor(column, dtype=values.dtype) for name, column in columns.items()},
        sequence_index=torch.zeros(len(values), dtype=torch.int64),
        num_sequences=1,
    )


def test_the_clipped_loss_by_hand():
    # Returns are 1. From 0.0 to 0.8, clipped to 0.2: the worse error counts, without gradient. From 0.5 to 0.6: not
    # clipped. From 2.0 to 1.5, clipped to 1.8: the worse again. From 0.9 to 1.5, clipped to 1.1: its own is worse.
    values = torch.tensor([0.8, 0.6, 1.5, 1.5], dtype=torch.float64, requires_grad=True)
    batch = predictions(values, returns=[1.0] * 4, old_values=[0.0, 0.5, 2.0, 0.9])
    loss, statistics = make_value_loss(ValueLossConfig(clip=0.2))(batch, Denominators(4, 1))
    loss.backward()
    assert loss.item() == pytest.approx((0.8**2 + 0.4**2 + 0.8**2 + 0.5**2) / 2 / 4)
    assert values.grad.tolist() == pytest.approx([0.0, -0.1, 0.0, 0.125])
    assert results(to_metrics([statistics]))["value_clip_fraction"] == 0.5


def test_without_a_clip_it_is_a_regression():
    values = torch.tensor([0.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss, _ = make_value_loss(ValueLossConfig(clip=0.0))(predictions(values, returns=[1.0, 1.0]), Denominators(2, 1))
    loss.backward()
    assert loss.item() == pytest.approx((1 + 4) / 2 / 2)
    assert values.grad.tolist() == pytest.approx([-0.5, 1.0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_loss_and_explained_variance_do_not_depend_on_the_cut(aggregation):
    sequences = random_sequences()
    generator = torch.Generator().manual_seed(1)
    returns = 5 + torch.randn(sequences.num_tokens, generator=generator, dtype=torch.float64)
    values = returns + 0.5 * torch.randn(sequences.num_tokens, generator=generator, dtype=torch.float64)
    tokens = sequences.tokens | {"returns": returns, "values": values, "old_values": values + 0.3}
    sequences = DataProto(sequences.lengths, tokens, sequences.columns)
    loss_function = make_value_loss(ValueLossConfig(clip=0.2, aggregation=aggregation))
    denominators = Denominators.of(sequences)

    def in_parts(*edges: int) -> tuple[float, dict]:
        total, statistics = 0.0, []
        for start, stop in itertools.pairwise(edges):
            part = sequences.slice(start, stop)
            row = pack(part)
            own = part.tokens["values"][row.loss_positions]
            loss, measured = loss_function(ValuePredictions.gather(own, part, row), denominators)
            total += loss.item()
            statistics.append(measured)
        return total, to_metrics(statistics)

    whole, metrics = in_parts(0, 11)
    cut, cut_metrics = in_parts(0, 1, 2, 7, 7, 11)
    assert cut == pytest.approx(whole, rel=1e-12)
    mask = sequences.tokens["loss_mask"]
    expected = 1 - (returns - values)[mask].var(correction=0) / returns[mask].var(correction=0)
    assert explained_variance(metrics) == pytest.approx(float(expected), rel=1e-9)
    assert explained_variance(cut_metrics) == pytest.approx(float(expected), rel=1e-9)


def test_equal_returns_explain_nothing():
    batch = predictions(torch.tensor([0.1, 0.2, 0.3]), returns=[0.1, 0.1, 0.1])
    _, statistics = make_value_loss(ValueLossConfig(clip=0.0))(batch, Denominators(3, 1))
    assert math.isnan(explained_variance(to_metrics([statistics])))


def test_a_clip_needs_the_old_values():
    batch = predictions(torch.zeros(1), returns=[1.0])
    with pytest.raises(DataError, match="old_values"):
        make_value_loss(ValueLossConfig(clip=0.2))(batch, Denominators(1, 1))
