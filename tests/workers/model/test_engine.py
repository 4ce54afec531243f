from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.refusals import refused
from tests.workers.model.cpu_engine import assert_same, backward, build_engine, weights
from tests.workers.model.ranks import gloo_loops
from tests.workers.model.tiny import random_sequences
from workers.batch.metrics import merge, results
from workers.config.optimizer import StepSettings
from workers.config.roles import OptimizerConfig
from workers.errors import DataError
from workers.model.losses import Denominators, sft
from workers.model.losses.distillation import hidden_states, log_probs
from workers.model.losses.logprobs import OutputLayer
from workers.model.optimizer.optimizer import clear_state
from workers.model.rows.packing import ModelInput

ALL = [(0, 11)]


build = partial(
    build_engine,
    dtype="float32",
    optimizer=OptimizerConfig(learning_rate=1e-2),
    total_steps=100,
)


def test_weights_go_out_as_they_are_after_the_latest_update(model):
    """Also after a pass without backward, which leaves parameters gathered."""
    engine = build(model)
    sequences = random_sequences(dtype=torch.float32)
    backward(engine, sequences)
    engine.log_probs(sequences, ALL)
    before = weights(engine)
    engine.optimizer_step()
    after = dict(engine.named_weights())
    assert all((after[name] != before[name]).any() for name in before)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def test_engines_that_save_and_are_gone_leave_no_threads(model, tmp_path):
    """Of one process, whose group the first makes."""
    found = []
    for step in range(3):
        engine = build(model)
        engine.save_checkpoint(tmp_path / str(step), step=step)
        engine.wait_for_checkpoint()
        del engine
        found.append(gloo_loops())
    assert found[0] > 0 and len({*found}) == 1


def test_log_probs_stand_at_their_tokens_whatever_the_order_of_micro_batches(model):
    engine = build(model)
    sequences = random_sequences()
    whole, metrics = engine.log_probs(sequences, ALL)
    cut, cut_metrics = engine.log_probs(sequences, [(6, 11), (0, 0), (0, 2), (2, 6)])
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
    assert whole.dtype == torch.float32
    assert (whole[sequences.tokens["loss_mask"]] < 0).all()
    assert not whole[~sequences.tokens["loss_mask"]].any()
    assert results(cut_metrics) == pytest.approx(results(metrics), rel=1e-5)
    assert set(metrics) == {"entropy", "rollout_mismatch_mean", "rollout_mismatch_max"}


CUT = [(6, 11), (0, 0), (0, 2), (2, 6)]


def read_states_too(rows: ModelInput, layer: OutputLayer) -> tuple[torch.Tensor, ...]:
    return *hidden_states(rows, layer), *log_probs(rows, layer)


def test_sums_and_read_outputs_are_those_of_the_tokens(model):
    engine, sequences = build(model), random_sequences()
    whole, metrics = engine.log_probs(sequences, ALL)
    bounds = sequences.offsets.tolist()
    expected = [whole[begin:end].double().sum() for begin, end in pairwise(bounds)]
    for micro_batches in (ALL, CUT):
        sums = engine.sequence_log_probs(sequences, micro_batches)
        torch.testing.assert_close(sums, torch.stack(expected), rtol=1e-5, atol=1e-5)
        (column,) = engine.read_outputs(sequences, micro_batches, log_probs)
        torch.testing.assert_close(torch.from_numpy(column), whole, rtol=1e-5, atol=1e-5)
        states, again = engine.read_outputs(sequences, micro_batches, read_states_too)
        assert states.ndim == 2
        assert (states.any(axis=1) == sequences.tokens["loss_mask"].numpy()).all()
        torch.testing.assert_close(torch.from_numpy(again), whole, rtol=1e-5, atol=1e-5)
    _, entropies, _ = engine.log_probs_and_entropies(sequences, CUT)
    masked = entropies[sequences.tokens["loss_mask"]]
    assert results(metrics)["entropy"] == pytest.approx(masked.mean().item(), rel=1e-5)


def test_a_loss_that_reads_hidden_states_has_them_at_its_tokens(model):
    engine, sequences, seen = build(model), random_sequences(dtype=torch.float32), []

    def loss(predictions, denominators):
        seen.append((predictions.hidden.detach(), predictions.log_probs.detach()))
        return sft(predictions, denominators)

    loss.reads_hidden = True
    expected = engine.read_outputs(sequences, ALL, read_states_too)
    engine.forward_backward(sequences, ALL, loss, Denominators.of(sequences))
    mask = sequences.tokens["loss_mask"]
    for tensor, column in zip(seen[0], expected, strict=True):
        assert tensor.shape == column[mask.numpy()].shape
        torch.testing.assert_close(tensor, torch.from_numpy(column)[mask])


def test_the_mean_of_values_is_over_tokens(model):
    engine, sequences = build(model, head="value"), random_sequences()
    # A new head gives 0 everywhere.
    engine.module.get_parameter("model.score.weight").to_local().data.fill_(0.1)
    values, metrics = engine.values(sequences, CUT)
    masked = values[sequences.tokens["loss_mask"]]
    assert masked.all() and not values[~sequences.tokens["loss_mask"]].any()
    assert metrics["values"].weight == len(masked)
    assert results(metrics) == pytest.approx({"values": masked.mean().item()}, rel=1e-5)


@pytest.mark.parametrize(
    ("head", "passes"),
    [
        ("lm", ("log_probs", "log_probs_and_entropies", "sequence_log_probs")),
        ("value", ("values", "scores")),
    ],
)
def test_every_pass_without_gradients_has_the_layout_that_its_plan_counts(
    model, head, passes
):
    engine = build(model, head=head, layout="padded", forward_layout="packed")
    rows, lay_out = [], engine.layout.lay_out
    engine.layout.lay_out = lambda *given, **named: (
        rows.append(lay_out(*given, **named)) or rows[-1]
    )
    sequences = random_sequences()
    for name in passes:
        getattr(engine, name)(sequences, ALL)
    assert [row.input_ids.numel() for row in rows] == [sequences.num_tokens] * len(passes)


def test_bfloat16_computes_in_bfloat16_and_keeps_parameters_in_float32(model):
    narrow = build(model, dtype="bfloat16")
    sequences = random_sequences()
    log_probs, _ = narrow.log_probs(sequences, ALL)
    expected, _ = build(model).log_probs(sequences, ALL)
    backward(narrow, sequences)
    assert {parameter.dtype for parameter in narrow.module.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in narrow.module.parameters()} == {
        torch.float32
    }
    assert 1e-4 < (log_probs - expected).abs().mean() < 0.2


def test_a_frozen_engine_gives_log_probs_and_refuses_to_train(model):
    engine = build(model, optimizer=None)
    sequences = random_sequences()
    trained, _ = build(model).log_probs(sequences, ALL)
    torch.testing.assert_close(engine.log_probs(sequences, ALL)[0], trained)
    with refused("frozen"):
        backward(engine, sequences)
    with refused("frozen"):
        engine.optimizer_step()


def test_rows_left_out_or_named_twice_are_refused_but_training_takes_a_part(model):
    engine, sequences = build(model), random_sequences()
    for micro_batches, named in (
        ([(0, 5), (6, 11)], "sequences 5 to 5"),
        ([(0, 5)], "sequences 5 to 10"),
        ([(0, 6), (5, 11)], "(5, 11)"),
        ([(0, 12)], "11 sequences"),
    ):
        with refused(named, DataError):
            engine.log_probs(sequences, micro_batches)
    backward(engine, sequences, [(3, 6), (0, 2)])
    with pytest.raises(DataError):
        backward(engine, sequences, [(0, 2), (1, 3)])
    with pytest.raises(DataError):
        backward(engine, sequences, [])


def test_number_of_parameters_counts_tied_weights_once(model):
    expected = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert build(model).num_parameters == expected


def test_the_log_probs_of_a_training_pass_are_those_of_a_forward_pass(model):
    engine, sequences = build(model), random_sequences(dtype=torch.float32)
    whole, _ = engine.log_probs(sequences, ALL)
    cut = [(0, 4), (4, 4), (4, 11)]
    found, metrics = engine.forward_backward_log_probs(
        sequences, cut, sft, Denominators.of(sequences)
    )
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    again = backward(build(model), sequences, cut)
    assert results(metrics) == pytest.approx(results(again))


def test_settings_of_one_step_are_of_this_step_alone(model):
    """A step with settings equals one of an engine configured so, and the next is as configured."""
    sequences = random_sequences(dtype=torch.float32)
    given = StepSettings(
        learning_rate=3e-3,
        beta1=0.5,
        beta2=0.7,
        epsilon=1e-5,
        weight_decay=0.3,
        max_grad_norm=0.01,
    )
    same = {
        name: getattr(given, name)
        for name in ("beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm")
    }
    engine, configured = (
        build(model),
        build(model, optimizer=OptimizerConfig(learning_rate=3e-3, **same)),
    )
    taken = []
    for each, settings in ((engine, given), (configured, StepSettings())):
        backward(each, sequences)
        taken.append(results(each.optimizer_step(settings)))
    assert taken[0] == pytest.approx(taken[1])
    assert_same(weights(engine), weights(configured))
    backward(engine, sequences)
    assert results(engine.optimizer_step())["learning_rate"] == 1e-2
    assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_metrics_of_steps_join_as_means_of_rates_and_norms(model):
    falling = OptimizerConfig(learning_rate=1e-2, schedule="linear")
    engine, sequences = build(model, optimizer=falling, total_steps=4), random_sequences()
    steps, norms = [], []
    for _ in range(2):
        backward(engine, sequences)
        gradients = [weight.grad.to_local() for weight in engine.module.parameters()]
        norms.append(torch.stack([part.norm() for part in gradients]).norm().item())
        steps.append(engine.optimizer_step())
    first, second = map(results, steps)
    assert (first["learning_rate"], second["learning_rate"]) == (1e-2, 0.75e-2)
    assert [first["grad_norm"], second["grad_norm"]] == pytest.approx(norms)
    assert results(merge(steps)) == pytest.approx(
        {
            "learning_rate": 0.875e-2,
            "skipped_steps": 0.0,
            "grad_norm": sum(norms) / 2,
        }
    )
    backward(engine, sequences)
    next(engine.module.parameters()).grad.fill_(torch.nan)
    skipped = results(engine.optimizer_step())
    assert skipped == {"learning_rate": 0.5e-2, "skipped_steps": 1.0}


def test_a_setting_that_the_optimiser_lacks_is_refused(model):
    engine, sequences = (
        build(model, optimizer=OptimizerConfig(name="sgd")),
        random_sequences(dtype=torch.float32),
    )
    backward(engine, sequences)
    with refused("policy.optimizer.name=sgd"):
        engine.optimizer_step(StepSettings(beta1=0.5))


def test_a_cleared_state_takes_the_first_step_again(model):
    engine, sequences = build(model), random_sequences(dtype=torch.float32)
    first = weights(engine)
    moved = []
    for _ in range(2):
        for name, weight in engine.module.model.named_parameters():
            weight.to_local().data.copy_(first[name])
        backward(engine, sequences)
        engine.optimizer_step()
        moved.append(weights(engine))
        clear_state(engine.optimizer)
    assert_same(*moved)
