"""Steps that are not a number, and input that a model would take without a word."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from tests.refusals import refused
from tests.workers.model.cpu_engine import backward, build_engine, weights
from tests.workers.model.tiny import VOCABULARY, random_sequences, save_tiny_model
from workers.batch.dataproto import DataProto
from workers.config.roles import OptimizerConfig
from workers.errors import DataError, NonFiniteError
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, Predictions, sft
from workers.model.rows.packing import check_sequences, max_positions

ALL = [(0, 5), (5, 11)]


def build(model: str, max_skipped_steps: int = 10) -> TrainingEngine:
    optimizer = OptimizerConfig(learning_rate=1e-2, max_skipped_steps=max_skipped_steps)
    return build_engine(model, optimizer=optimizer)


def without_number(value: float):
    """The supervised loss, plus `value` in the micro-batch of the spoiled sequence: its gradient stays
    finite.
    """

    def loss_function(predictions: Predictions, denominators: Denominators):
        loss, statistics = sft(predictions, denominators)
        return (loss + value if predictions.columns["spoiled"].any() else loss), statistics

    return loss_function


def gradient_without_number(predictions: Predictions, denominators: Denominators):
    loss, statistics = sft(predictions, denominators)
    return loss + (predictions.log_probs * 0).abs().pow(0.5).sum(), statistics


def spoil(sequences: DataProto, row: int) -> DataProto:
    columns = {**sequences.columns, "spoiled": torch.arange(len(sequences)) == row}
    return DataProto(sequences.lengths, sequences.tokens, columns)


def skip_twice_and_go_on(model: str) -> tuple[list[float], bool]:
    """On every rank; only the last rank's batch is bad, in the loss alone: its gradient is finite."""
    engine = build(model, max_skipped_steps=3)
    sequences = random_sequences()
    bad = spoil(sequences, 7 if dist.get_rank() == dist.get_world_size() - 1 else -1)
    denominators = Denominators.of(sequences)
    before = weights(engine)
    skipped = []
    for loss in (without_number(torch.inf), without_number(torch.nan)):
        engine.forward_backward(bad, ALL, loss, denominators)
        skipped.append(
            engine.optimizer_step()["skipped_steps"].value * dist.get_world_size()
        )
    unchanged = all(
        torch.equal(weight, before[name]) for name, weight in engine.named_weights()
    )
    # A good one starts the count again.
    for loss in (sft, without_number(torch.nan), without_number(torch.nan)):
        engine.forward_backward(bad, ALL, loss, denominators)
        skipped.append(
            engine.optimizer_step()["skipped_steps"].value * dist.get_world_size()
        )
    engine.forward_backward(bad, ALL, without_number(torch.nan), denominators)
    with pytest.raises(NonFiniteError) as error:
        engine.optimizer_step()
    return skipped, unchanged, str(error.value)


@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_without_number_on_one_rank_skips_the_step_on_all_and_too_many_stop_the_run(
    model, ranks, count
):
    for skipped, unchanged, message in ranks.run(skip_twice_and_go_on, count, model):
        assert skipped == [1, 1, 0, 1, 1]
        assert unchanged
        assert message.startswith(
            "3 optimiser steps in a row were skipped (optimizer.max_skipped_steps=3). In the last, the "
            f"loss was NaN or infinite for rank {count - 1}: row 5, row 6, row 7, row 8, row 9, row 10. "
            "Look"
        )


def test_a_gradient_without_number_is_skipped_though_the_loss_is_finite_and_names_all_sequences_by_uid(
    model,
):
    engine = build(model, max_skipped_steps=1)
    sequences = random_sequences()
    objects = {"uid": np.array([f"{uid}" for uid in range(70, 81)], dtype=object)}
    uids = DataProto(sequences.lengths, sequences.tokens, sequences.columns, objects)
    metrics = engine.forward_backward(
        uids, ALL, gradient_without_number, Denominators.of(sequences)
    )
    assert torch.isfinite(torch.tensor(metrics["loss"].value))
    with pytest.raises(
        NonFiniteError, match=r"gradient.*rank 0: uid 70, .*uid 77 and 3 more"
    ):
        engine.optimizer_step()


@pytest.mark.parametrize("start", [2, 3, 5])
def test_sequences_of_a_loss_without_number_are_named_by_uid_and_sample(model, start):
    """Those of its micro-batch, of which eight are named."""
    engine = build(model, max_skipped_steps=1)
    sequences = spoil(random_sequences(), 7)
    columns = sequences.columns | {"sample": torch.arange(11) + 20}
    objects = {"uid": np.array([f"{uid}" for uid in range(70, 81)], dtype=object)}
    bad = DataProto(sequences.lengths, sequences.tokens, columns, objects)
    engine.forward_backward(
        bad, [(0, start), (start, 11)], without_number(torch.nan), Denominators.of(bad)
    )
    names = [f"uid {70 + row} sample {20 + row}" for row in range(start, 11)]
    rest = " and 1 more" if start == 2 else ""
    with pytest.raises(
        NonFiniteError, match=f"the loss .*rank 0: {', '.join(names[:8])}{rest}. Look"
    ):
        engine.optimizer_step()


def test_the_count_of_skipped_steps_is_part_of_a_checkpoint(model, tmp_path):
    engine, resumed = build(model, max_skipped_steps=2), build(model, max_skipped_steps=2)
    bad = spoil(random_sequences(), 0)
    denominators = Denominators.of(bad)
    engine.forward_backward(bad, ALL, without_number(torch.nan), denominators)
    engine.optimizer_step()
    engine.save_checkpoint(tmp_path / "step-1", step=1)
    engine.wait_for_checkpoint()
    resumed.load_checkpoint(tmp_path / "step-1")
    resumed.forward_backward(bad, ALL, without_number(torch.nan), denominators)
    with pytest.raises(NonFiniteError):
        resumed.optimizer_step()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    path = save_tiny_model(tmp_path, vocab_size=VOCABULARY - 2)
    with refused(f"t{VOCABULARY - 1}"):
        build(path)


@pytest.mark.parametrize("bad_id", [-1, VOCABULARY])
def test_an_id_outside_the_vocabulary_names_its_sequence(model, bad_id):
    sequences = random_sequences()
    sequences.tokens["input_ids"][int(sequences.lengths[:4].sum())] = bad_id
    for call in (
        lambda engine: engine.log_probs(sequences, ALL),
        lambda engine: backward(engine, sequences, ALL),
    ):
        with refused(f"sequence 4 holds the id {bad_id}", DataError):
            call(build(model))


def test_positions_without_a_limit_of_their_own_have_none():
    assert max_positions(transformers.Qwen2Config(max_position_embeddings=64)) == 64
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    }
    assert (
        max_positions(
            transformers.Qwen2Config(max_position_embeddings=64, rope_parameters=yarn)
        )
        is None
    )
    assert max_positions(transformers.XLNetConfig()) is None


ROW = {"input_ids": torch.arange(4), "loss_mask": torch.arange(4) > 0}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([ROW | {"input_ids": torch.ones(4)}], "'input_ids'"),
        ([ROW | {"loss_mask": torch.ones(4)}], "'loss_mask'"),
        ([{"input_ids": torch.arange(4)}], "'loss_mask'"),
        ([ROW, {name: values[:0] for name, values in ROW.items()}], "sequence 1 "),
        ([ROW, {name: values.repeat(33) for name, values in ROW.items()}], "sequence 1 "),
    ],
)
def test_m2_columns_and_sequences_that_the_model_cannot_take_are_refused(rows, named):
    with refused(named, DataError):
        check_sequences(DataProto.from_list(rows), 37, 128)
