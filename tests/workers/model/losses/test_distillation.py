"""A teacher's prompts and columns, and what the student's output layer reads, against rows written by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.model.losses.loss_cases import tokens_of
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto, object_column
from workers.batch.metrics import results
from workers.config.loss import DistillationConfig
from workers.config.roles import LossConfig, RolloutCorrectionConfig
from workers.model.losses import Denominators, make_policy_loss, make_sft_loss, to_metrics
from workers.model.losses.distillation import (
    Distilled,
    TopTokens,
    WholeLayer,
    WithHidden,
    as_numpy,
    at_tokens_of,
    distilled,
    log_probs,
    with_teacher_prompts,
)
from workers.model.losses.divergence import linear_divergence, top_log_probs
from workers.model.losses.logprobs import Head, OutputLayer, log_probs_of
from workers.model.rows.packing import pack

KINDS = ("reverse_kl", "forward_kl", "jsd")


def samples(**columns: Any) -> DataProto:
    """Responses 3, 4, 5, whose second token is not the policy's, and 2, 3."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [False, False, True, False, True]},
        {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]},
    ]
    batch = DataProto.from_list(rows)
    return replace(batch, columns=columns)


def with_prompts(**columns: Any) -> DataProto:
    """The samples with longer prompts for the teacher: of 4 and of 2 tokens."""
    prompts = object_column([np.array([7, 0, 9, 6]), np.array([6, 5])])
    lengths = {"length": torch.tensor([7, 4]), "prompt_tokens": torch.tensor([4, 2])}
    batch = samples(**lengths, **columns)
    return replace(batch, objects={"teacher_prompt": prompts})


def test_a_teacher_reads_the_responses_behind_its_own_prompts() -> None:
    batch = with_prompts(
        reward=torch.tensor([1.0, 2.0]), **{CONTEXT_DEGREE: torch.tensor([1, 2])}
    )
    teacher_batch = with_teacher_prompts(batch)
    assert teacher_batch.lengths.tolist() == [7, 4]
    assert teacher_batch.tokens["input_ids"].tolist() == [7, 0, 9, 6, 3, 4, 5, 6, 5, 2, 3]
    trained = teacher_batch.tokens["loss_mask"].nonzero().flatten()
    assert trained.tolist() == [4, 6, 9, 10]
    # The ranks that share a sequence read it together. No other column is the teacher's.
    assert set(teacher_batch.columns) == {CONTEXT_DEGREE}
    assert teacher_batch.columns[CONTEXT_DEGREE].tolist() == [1, 2]


def test_without_prompts_of_its_own_a_teacher_reads_the_samples() -> None:
    for batch in (samples(), with_prompts().slice(0, 0)):
        assert with_teacher_prompts(batch) is batch
        assert at_tokens_of(batch, batch, "values") == "values"


def test_columns_return_to_the_trained_tokens_of_the_samples() -> None:
    batch = with_prompts()
    values = np.arange(22).reshape(11, 2)
    columns = at_tokens_of(batch, with_teacher_prompts(batch), values)
    expected = np.zeros((8, 2), int)
    expected[[2, 4, 6, 7]] = values[[4, 6, 9, 10]]
    assert columns.tolist() == expected.tolist() and columns.dtype == values.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_rank_takes_its_tokens_of_the_teachers_layer(
    dtype: torch.dtype, with_bias: bool
) -> None:
    """Tokens 3 to 6 of the student, of which the teacher has three."""
    weight = torch.arange(12.0).reshape(6, 2).to(dtype)
    bias = torch.arange(6.0).to(dtype) if with_bias else None
    layer = WholeLayer(
        as_numpy(weight), None if bias is None else as_numpy(bias), 1.5, 0.3, dtype
    )
    students = Head(0.7, softcap=2.5, factor=0.9, group=None, first_id=3)
    part = layer.on(OutputLayer(torch.zeros(1, 5), torch.zeros(4, 5), None, students, 8))
    assert part.weight.dtype == dtype and torch.equal(part.weight, weight[3:6])
    assert part.bias is None if bias is None else torch.equal(part.bias, bias[3:6])
    assert part.head == Head(0.7, softcap=1.5, factor=0.3, group=None, first_id=3)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def layers() -> tuple[OutputLayer, WholeLayer, Tensor]:
    """The student's layer with hidden states of the 4 trained tokens, the teacher's layer, and its states of
    all 8 tokens.
    """
    head = Head(0.7, softcap=None, factor=1.0, group=None, first_id=0)
    student = OutputLayer(random(4, 3), random(9, 3, seed=1), None, head, 3)
    teacher = WholeLayer(as_numpy(random(9, 2, seed=2)), None, None, 0.5, torch.float64)
    return student, teacher, random(8, 2, seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_reads_the_divergence_from_its_teachers_columns(kind: str) -> None:
    student, teacher, hidden = layers()
    sequences = samples()
    at_tokens = sequences.tokens["loss_mask"].nonzero().flatten()
    teacher_layer = teacher.on(student)
    ids, top_values = top_log_probs(
        OutputLayer(hidden, teacher_layer.weight, None, teacher_layer.head, 3),
        count=2,
        tokens=9,
    )
    columns = {
        "teacher_hidden": hidden,
        "teacher_top_ids": ids.int(),
        "teacher_top_log_probs": top_values,
    }
    rows = pack(replace(sequences, tokens=sequences.tokens | columns))
    by_top = linear_divergence(
        student, kind, ids=ids[at_tokens], log_probs=top_values[at_tokens]
    )
    by_vocabulary = linear_divergence(
        student, kind, teacher=teacher_layer, teacher_hidden=hidden[at_tokens]
    )
    for whole_layer, divergence in ((None, by_top), (teacher, by_vocabulary)):
        outputs = Distilled(kind, whole_layer)(rows, student)
        known = *log_probs_of(student, rows.targets), divergence
        assert len(outputs) == 3
        assert all(map(torch.equal, outputs, known))


def test_a_rank_without_sequences_reads_no_teacher() -> None:
    student, teacher, _ = layers()
    nothing = replace(student, hidden=random(0, 3))
    for whole_layer in (None, teacher):
        outputs = Distilled("jsd", whole_layer)(pack(samples().slice(0, 0)), nothing)
        assert [len(output) for output in outputs] == [0, 0, 0]


def objective(**settings: Any) -> Any:
    return make_policy_loss(LossConfig(distillation=DistillationConfig(**settings)))


def test_a_loss_reads_the_divergence_that_its_settings_name() -> None:
    _, teacher, _ = layers()
    assert distilled(make_sft_loss(), teacher) is None
    assert distilled(objective(coefficient=0.0), teacher) is None
    assert distilled(objective(coefficient=0.5, over="token"), teacher) is None
    for over, whole_layer in (("top_k", None), ("vocabulary", teacher)):
        read = distilled(objective(coefficient=0.5, over=over, divergence="jsd"), teacher)
        assert isinstance(read, Distilled)
        assert (read.divergence, read.whole) == ("jsd", whole_layer)


def test_a_loss_of_hidden_states_reads_a_copy_of_them() -> None:
    student, _, _ = layers()
    rows = pack(samples())
    alone = make_policy_loss(LossConfig(hidden_states=True))
    read = distilled(alone, None)
    assert isinstance(read, WithHidden) and read.read is None
    outputs = read(rows, student)
    known = *log_probs_of(student, rows.targets), student.hidden
    assert all(map(torch.equal, outputs, known)) and len(outputs) == 3
    assert outputs[2].data_ptr() != student.hidden.data_ptr()
    distillation = DistillationConfig(coefficient=0.5)
    taught = make_policy_loss(LossConfig(hidden_states=True, distillation=distillation))
    both = distilled(taught, None)
    assert isinstance(both, WithHidden) and isinstance(both.read, Distilled)


def test_a_teacher_gives_its_likeliest_tokens_or_log_probs_of_the_targets() -> None:
    student, _, _ = layers()
    rows = pack(samples())
    (outputs,) = log_probs(rows, student)
    assert torch.equal(outputs, log_probs_of(student, rows.targets)[0])
    outputs = TopTokens(count=2, tokens=5)(pack(samples()), student)
    known = top_log_probs(student, count=2, tokens=5)
    assert all(map(torch.equal, outputs, known))


@pytest.mark.parametrize("over", ["token", "top_k"])
def test_the_objective_is_the_weighted_sum_of_its_terms(over: str) -> None:
    """The correction weighs the policy loss and a distillation of sampled tokens, and no other term."""
    current = [-1.0, -2.0]
    old = [-1.5, -1.75]
    reference = [-0.5, -2.5]
    teacher = [-2.0, -0.5]
    advantages = [1.0, -3.0]
    predictions = tokens_of(
        current,
        old_log_probs=old,
        rollout_log_probs=[-1.7, -1.25],
        reference_log_probs=reference,
        teacher_log_probs=teacher,
        advantages=advantages,
    )
    divergence = torch.tensor([0.25, 2.0], dtype=torch.float64)
    entropy = torch.tensor([0.5, 0.75], dtype=torch.float64)
    predictions = replace(predictions, divergence=divergence, entropy=entropy)
    config = LossConfig(
        clip_low=0.9,
        clip_high=9.0,
        entropy_coefficient=0.03,
        kl_coefficient=0.2,
        kl_estimator="k2",
        distillation=DistillationConfig(coefficient=0.7, over=over),
        rollout_correction=RolloutCorrectionConfig("token", cap=1.1),
    )
    loss, statistics = make_policy_loss(config)(predictions, Denominators(2, 1))
    ratios = [float(np.exp(new - past)) for new, past in zip(current, old, strict=True)]
    distances = [new - known for new, known in zip(current, teacher, strict=True)]
    expected = 0.0
    # Ratios to the sampler of e^0.2, above the cap, and e^-0.5.
    for token, weight in enumerate((1.1, float(np.exp(-0.5)))):
        term = -ratios[token] * advantages[token]
        if over == "token":
            term += 0.7 * ratios[token] * distances[token]
        expected += weight * term - 0.03 * float(entropy[token])
        expected += 0.2 * (reference[token] - current[token]) ** 2 / 2
        expected += 0.7 * float(divergence[token]) * (over == "top_k")
    assert loss.item() == pytest.approx(expected / 2)
    metrics = results(to_metrics([statistics]))
    assert metrics["teacher_divergence"] == pytest.approx(
        sum(distances) / 2 if over == "token" else 2.25 / 2
    )
    assert metrics["reference_kl"] == pytest.approx((0.125 + 0.125) / 2)
