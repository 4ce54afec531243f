import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.model.ranks import RankPool
from tests.workers.model.reference import divergence
from workers.model.losses.distillation import as_numpy, as_tensor
from workers.model.losses.divergence import (
    TeacherLayer,
    linear_divergence,
    terms,
    top_log_probs,
)
from workers.model.losses.logprobs import Head, OutputLayer

KINDS = ("reverse_kl", "forward_kl", "jsd")
TOP = 3
TEMPERATURE = 0.7
COUNT, STUDENTS_TOKENS, TEACHERS_TOKENS = 9, 13, 11  # the student's table is padded
STUDENT, TEACHER = {"softcap": 1.5, "factor": 0.3}, {"softcap": None, "factor": 1.0}


def models() -> tuple[list[Tensor], list[Tensor]]:
    """(hidden, weight, bias) of student and teacher, float64. Their hidden sizes differ."""
    generator = torch.Generator().manual_seed(3)

    def layer(size: int, tokens: int) -> list[Tensor]:
        shapes = (COUNT, size), (tokens, size), (tokens,)
        return [
            torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in shapes
        ]

    return layer(5, STUDENTS_TOKENS), layer(4, TEACHERS_TOKENS)


def head(settings: dict, group: dist.ProcessGroup | None = None, first: int = 0) -> Head:
    return Head(TEMPERATURE, settings["softcap"], settings["factor"], group, first)


def logits(layer: list[Tensor], settings: dict) -> Tensor:
    found = settings["factor"] * torch.nn.functional.linear(*layer)
    if settings["softcap"]:
        found = settings["softcap"] * torch.tanh(found / settings["softcap"])
    return found / TEMPERATURE


def expected(kind: str, over: str) -> tuple[Tensor, list[Tensor]]:
    student, teacher = models()
    z, given = logits(student, STUDENT), logits(teacher, TEACHER).detach()
    if over == "vocabulary":
        found = divergence(kind, z[:, :TEACHERS_TOKENS].softmax(-1), given.softmax(-1))
    else:
        q, p = given.softmax(-1), z.softmax(-1)
        top = q.topk(TOP).indices
        parts = [each.gather(-1, top) for each in (p, q)]
        found = divergence(
            kind, *(torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in parts)
        )
    return found, list(torch.autograd.grad((found * upstream()).sum(), student))


def upstream() -> Tensor:
    return torch.linspace(-1, 2, COUNT, dtype=torch.float64)


def computed(
    kind: str, over: str, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Divergence, and the gradients of hidden and this rank's rows of weight and bias."""
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    first, stop = (-(-STUDENTS_TOKENS // ranks) * each for each in (rank, rank + 1))
    student, teacher = models()
    leaves = [
        student[0],
        *(each[first:stop].detach().requires_grad_() for each in student[1:]),
    ]
    hidden, *rest = (each.detach() for each in teacher)
    own = [each[first:stop] for each in rest]
    of_teacher = head(TEACHER, group, first)
    if over == "vocabulary":
        given = {"teacher": TeacherLayer(*own, of_teacher), "teacher_hidden": hidden}
    else:
        found = top_log_probs(
            OutputLayer(hidden, *own, of_teacher, 4), count=TOP, tokens=STUDENTS_TOKENS
        )
        given = dict(zip(("ids", "log_probs"), found, strict=True))
    found = linear_divergence(
        OutputLayer(*leaves, head(STUDENT, group, first), 4), kind, **given
    )
    (found * upstream()).sum().backward()
    return found.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("over", ["vocabulary", "top_k"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_divergence(kind: str, over: str) -> None:
    found, gradients = computed(kind, over)
    value, expected_gradients = expected(kind, over)
    for one, other in zip((found, *gradients), (value, *expected_gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def computed_on_a_rank() -> list[tuple[Tensor, list[Tensor]]]:
    return [
        computed(kind, over, dist.group.WORLD)
        for kind in KINDS
        for over in ("vocabulary", "top_k")
    ]


def test_a_vocabulary_shared_over_ranks_gives_the_same(ranks: RankPool) -> None:
    parts = ranks.run(computed_on_a_rank, 2)
    for number, (kind, over) in enumerate(
        itertools.product(KINDS, ("vocabulary", "top_k"))
    ):
        value, (hidden, *weights) = expected(kind, over)
        for part in parts:
            torch.testing.assert_close(part[number][0], value, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(part[number][1][0], hidden, rtol=1e-11, atol=1e-12)
        for place, weight in enumerate(weights, 1):
            whole = torch.cat([part[number][1][place] for part in parts])
            torch.testing.assert_close(whole, weight, rtol=1e-11, atol=1e-12)


def likeliest(tokens: int, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The teacher's likeliest of the first `tokens` tokens, from this rank's rows of its layer: 7 and 4."""
    hidden, *rows = (values.detach() for values in models()[1])
    first = 7 * group.rank() if group else 0
    stop = first + 7 if group else TEACHERS_TOKENS
    rows = [values[first:stop] for values in rows]
    layer = OutputLayer(hidden, *rows, head(TEACHER, group, first), 4)
    return top_log_probs(layer, count=TOP, tokens=tokens)


def likeliest_on_a_rank() -> list[tuple[Tensor, Tensor]]:
    return [likeliest(tokens, dist.group.WORLD) for tokens in (9, 5)]


def test_the_likeliest_are_of_the_first_tokens_and_the_others_are_the_rest(
    ranks: RankPool,
) -> None:
    """The student has fewer tokens than the teacher, perhaps none of a rank's."""
    log_probs = logits(models()[1], TEACHER).detach().log_softmax(-1)
    on_ranks = ranks.run(likeliest_on_a_rank, 2)
    for number, tokens in enumerate((9, 5)):
        top = log_probs[:, :tokens].topk(TOP)
        # Otherwise the limit would change nothing.
        assert (log_probs[:, tokens:].max(-1).values > top.values[:, -1]).any()
        rest = log_probs.exp().scatter(-1, top.indices, 0.0).sum(-1).log()
        expected_log_probs = torch.cat([top.values, rest[:, None]], -1)
        for ids, values in (likeliest(tokens), *(part[number] for part in on_ranks)):
            assert torch.equal(ids, top.indices)
            torch.testing.assert_close(values, expected_log_probs, rtol=1e-11, atol=1e-12)


distributions = st.lists(st.floats(-8, 8), min_size=6, max_size=6).map(
    lambda each: torch.tensor(each, dtype=torch.float64).log_softmax(-1)
)


@given(distributions, distributions, st.sampled_from(KINDS))
def test_merged_events_never_diverge_more_and_equal_ones_not_at_all(
    log_p: Tensor, log_q: Tensor, kind: str
) -> None:
    def merged(values: Tensor) -> Tensor:
        return torch.cat([values[:TOP], values[TOP:].logsumexp(0)[None]])

    whole = terms(kind, log_p, log_q)[0].sum()
    coarse = terms(kind, merged(log_p), merged(log_q))[0].sum()
    assert -1e-12 <= coarse <= whole + 1e-12
    assert abs(terms(kind, log_q, log_q)[0].sum()) < 1e-15


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_that_round_to_zero_or_one_give_finite_gradients(kind: str) -> None:
    """float32, logits far apart: the likeliest tokens leave nothing for the rest."""
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [0.0], [-300.0], [-1.0]], requires_grad=True)
    ids, log_probs = (
        torch.tensor([[0, 1], [2, 1]]),
        torch.tensor([[-1e-7, -40.0, -60.0], [-20.0, -1e-6, -60.0]]),
    )
    layer = OutputLayer(hidden, weight, None, Head(1.0, None, 1.0, None, 0), 1)
    found = linear_divergence(layer, kind, ids=ids, log_probs=log_probs)
    found.sum().backward()
    assert all(bool(each.isfinite().all()) for each in (found, hidden.grad, weight.grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teachers_tensor_travels_as_numpy_and_comes_back(dtype: torch.dtype) -> None:
    """Also one that was never NumPy: of a rank that is its own teacher."""
    values = torch.tensor([1.5, -2.0], dtype=dtype)
    for travelled in (as_numpy(values), values):
        arrived = as_tensor(travelled, dtype)
        assert arrived.dtype == dtype and torch.equal(arrived, values)
