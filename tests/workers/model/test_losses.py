"""What all losses share: normalisers, KL and entropy, custom losses, metrics."""

import itertools

import pytest
import torch

from tests.refusals import refused
from tests.workers.model.losses.loss_cases import (
    computed_in_parts,
    tokens_of,
    with_log_probs,
)
from tests.workers.model.reference import aggregated, reference_loss
from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.roles import POLICY_LOSS_NAMES, LossConfig
from workers.errors import ConfigError, DataError
from workers.model.losses import (
    POLICY_LOSSES,
    Denominators,
    Predictions,
    Statistics,
    group_tokens,
    kl_estimate,
    make_policy_loss,
    make_sft_loss,
    mean,
    per_sequence_loss,
    policy_loss,
    sft,
    to_metrics,
)

AGGREGATIONS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean_token_mean",
]
# Sequence 1, alone without loss tokens, shares group 0.
GROUPS = torch.tensor([0, 0, 1, 2, 1, 0, 3, 3, 2, 0, 2])


def config_of(aggregation: str, **others: object) -> LossConfig:
    constant = 40 if aggregation == "sequence_mean_token_sum_norm" else 0
    return LossConfig(aggregation=aggregation, constant_length=constant, **others)


def grouped(sequences: DataProto) -> DataProto:
    """With the column that `group_mean_token_mean` reads."""
    columns = sequences.columns | {"group_tokens": group_tokens(sequences, GROUPS)}
    return DataProto(sequences.lengths, sequences.tokens, columns)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_metrics_equal_their_definitions_wherever_the_mini_batch_is_cut(
    aggregation,
):
    """Metrics count tokens: the parts have different numbers of them, and one has none."""
    sequences = grouped(with_log_probs(random_sequences()))
    config = config_of(
        aggregation,
        clip_low=0.1,
        clip_high=0.3,
        entropy_coefficient=0.01,
        kl_coefficient=0.05,
    )
    loss, _, statistics = computed_in_parts(
        sequences, [2, 2, 9], make_policy_loss(config), Denominators.of(sequences, GROUPS)
    )
    log_probs = sequences.tokens["log_probs"].split(sequences.lengths.tolist())
    expected, metrics = reference_loss(
        [(values, 0.5 * values**2) for values in log_probs], sequences, config, GROUPS
    )
    assert loss == pytest.approx(float(expected), rel=1e-12)
    assert results(to_metrics(statistics)) == pytest.approx(metrics | {"loss": loss})


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_estimate((q / p).log(), estimator)).sum(), exact)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sft_is_the_negative_log_likelihood_under_its_normaliser(aggregation):
    sequences = grouped(with_log_probs(random_sequences()))
    config = config_of(aggregation)
    lengths, mask = sequences.lengths.tolist(), sequences.tokens["loss_mask"]
    by_token = zip(
        sequences.tokens["log_probs"].split(lengths), mask.split(lengths), strict=True
    )
    learned = [
        (-log_probs[mask], group)
        for (log_probs, mask), group in zip(by_token, GROUPS.tolist(), strict=True)
    ]
    expected = aggregated(
        *zip(*[each for each in learned if len(each[0])], strict=True), config
    )
    loss_function = (
        sft
        if aggregation == "token_mean"
        else make_sft_loss(aggregation, config.constant_length)
    )
    loss, _, _ = computed_in_parts(
        sequences, [3, 7], loss_function, Denominators.of(sequences, GROUPS)
    )
    assert loss == pytest.approx(float(expected), rel=1e-12)


def test_denominators_count_only_what_has_a_loss_token():
    sequences = random_sequences()
    assert Denominators.of(sequences) == Denominators(
        sequences.num_loss_tokens, len(sequences) - 1
    )
    assert (
        Denominators.of(sequences, torch.arange(len(sequences))).groups
        == len(sequences) - 1
    )


def packed_form(
    predictions: Predictions, config: LossConfig
) -> tuple[torch.Tensor, Statistics]:
    centred = predictions.log_probs - predictions.sequence_mean(predictions.log_probs)
    return -predictions["advantages"] * centred.exp(), {"spread": mean(centred.abs())}


def one_by_one(
    sequence: Predictions, config: LossConfig
) -> tuple[torch.Tensor, Statistics]:
    centred = sequence.log_probs - sequence.log_probs.mean()
    return -sequence["advantages"] * centred.exp(), {"spread": mean(centred.abs())}


policy_loss("test_packed", aggregation="sequence_mean_token_mean")(packed_form)
policy_loss("test_one_by_one", aggregation="sequence_mean_token_mean")(
    per_sequence_loss(one_by_one)
)


@policy_loss("test_of_a_sequence", aggregation="sequence_mean_token_mean")
@per_sequence_loss
def of_a_sequence(
    sequence: Predictions, config: LossConfig
) -> tuple[torch.Tensor, Statistics]:
    return -sequence["advantages"][0] * sequence.log_probs.sum(), {}


@pytest.fixture(autouse=True, scope="module")
def registered():
    yield
    for name in ("test_packed", "test_one_by_one", "test_of_a_sequence"):
        del POLICY_LOSSES[name]


@pytest.mark.parametrize("aggregation", ["auto", "token_mean"])
def test_p6_a_custom_loss_sees_the_packed_row_or_whole_sequences_one_by_one(aggregation):
    sequences = with_log_probs(random_sequences())
    outcomes = []
    for name, cuts in itertools.product(
        ["test_packed", "test_one_by_one"], [[], [2, 2, 9]]
    ):
        loss_function = make_policy_loss(
            LossConfig(name, aggregation=aggregation, entropy_coefficient=0.1)
        )
        loss, gradients, statistics = computed_in_parts(
            sequences, cuts, loss_function, Denominators.of(sequences)
        )
        outcomes.append((loss, torch.cat(gradients), results(to_metrics(statistics))))
    for loss, gradient, metrics in outcomes[1:]:
        assert loss == pytest.approx(outcomes[0][0], rel=1e-12)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=1e-12, atol=1e-14)
        assert metrics == pytest.approx(outcomes[0][2], rel=1e-12)


def test_p6_one_number_a_sequence_is_averaged_over_sequences():
    sequences = with_log_probs(random_sequences())
    loss, _, _ = computed_in_parts(
        sequences,
        [5],
        make_policy_loss(LossConfig("test_of_a_sequence")),
        Denominators.of(sequences),
    )
    expected = []
    for index in range(len(sequences)):
        part = sequences.slice(index, index + 1)
        if part.num_loss_tokens:
            log_probs = part.tokens["log_probs"][part.tokens["loss_mask"]]
            expected.append(-float(part.columns["advantages"]) * float(log_probs.sum()))
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-12)


def test_a_custom_loss_is_found_by_its_path():
    config = LossConfig("custom", function=f"{__name__}:of_a_sequence")
    assert make_policy_loss(config).loss is POLICY_LOSSES["test_of_a_sequence"]


def test_a_custom_loss_of_a_file_is_executed_once(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from workers.model.losses import policy_loss\n\nwith open(__file__ + '.runs', 'a') as runs:\n"
        "    runs.write('x')\n\n\n@policy_loss('of_a_file', aggregation='token_mean')\n"
        "def loss(predictions, config):\n    return -predictions.log_probs, {}\n"
    )
    config = LossConfig("custom", function=f"{tmp_path}/mine.py:loss")
    try:
        assert (
            make_policy_loss(config).loss
            is make_policy_loss(config).loss
            is POLICY_LOSSES["of_a_file"]
        )
    finally:
        del POLICY_LOSSES["of_a_file"]
    assert (tmp_path / "mine.py.runs").read_text() == "x"


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("", "function"),
        (f"{__name__}:gone", "'gone'"),
        ("no.such.module:loss", "ModuleNotFoundError"),
        ("no/such/file.py:loss", "no/such/file.py"),
        (f"{__name__}:one_by_one", "normaliser"),
    ],
)
def test_a_custom_loss_that_cannot_be_used_is_refused(function, named):
    with refused(named):
        make_policy_loss(LossConfig("custom", function=function))


def test_a_loss_of_the_wrong_shape_is_refused():
    policy_loss("test_wrong_shape", aggregation="token_mean")(
        lambda predictions, config: (torch.zeros(1), {})
    )
    try:
        with refused("test_wrong_shape", DataError):
            make_policy_loss(LossConfig("test_wrong_shape"))(
                tokens_of([0.0] * 3), Denominators(3, 1)
            )
    finally:
        del POLICY_LOSSES["test_wrong_shape"]


ONE = Denominators(1, 1)


@pytest.mark.parametrize(
    ("named", "error", "use"),
    [
        (
            "reference_log_probs",
            DataError,
            lambda: make_policy_loss(LossConfig(kl_coefficient=0.1))(
                tokens_of([0.0], advantages=[1.0]), ONE
            ),
        ),
        ("kl_estimator=k4", ConfigError, lambda: kl_estimate(torch.zeros(1), "k4")),
        ("ppo_clip", ConfigError, lambda: make_policy_loss(LossConfig(name="ppo"))),
        ("dual_clip=0.5", ConfigError, lambda: make_policy_loss(LossConfig(dual_clip=0.5))),
        (
            "clip_cov_high",
            ConfigError,
            lambda: make_policy_loss(LossConfig("clip_cov", clip_cov_low=5.0)),
        ),
    ],
)
def test_what_is_missing_or_has_no_meaning_is_refused(named, error, use):
    with refused(named, error):
        use()


def test_every_loss_of_the_settings_is_registered():
    assert set(POLICY_LOSS_NAMES) <= set(POLICY_LOSSES)
