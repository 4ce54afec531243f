"""Each cause of a failure has one line a step, with its count and the place of the first."""

from controller.observability.failures import MOST_CAUSES, FailureCounts

KIND = "samples dropped"


def test_failures_that_differ_in_numbers_and_quotes_have_one_cause() -> None:
    counts = FailureCounts()
    counts.add(
        KIND,
        [
            f"prompt {n}, sample 0: took more than rollout.agent_timeout_s=6 s"
            for n in range(4)
        ],
    )
    counts.add(
        KIND,
        [
            f"prompt {n}, sample 1: the prompt '{n} words' has {n} tokens"
            for n in range(5, 8)
        ],
    )
    counts.add(
        "samples retried",
        ["prompt 0, sample 1: took more than rollout.agent_timeout_s=6 s"],
    )
    assert list(map(str, counts.take())) == [
        f"{KIND}: 4, the first: prompt 0, sample 0: took more than rollout.agent_timeout_s=6 s",
        f"{KIND}: 3, the first: prompt 5, sample 1: the prompt '5 words' has 5 tokens",
        "samples retried: 1, the first: prompt 0, sample 1: took more than rollout.agent_timeout_s=6 s",
    ]
    assert counts.take() == []


def test_many_causes_share_a_line_and_all_are_counted() -> None:
    counts = FailureCounts()
    counts.add(KIND, ["prompt 0, sample 0: " + "x" * (n + 1) for n in range(20)])
    lines = counts.take()
    assert len(lines) == MOST_CAUSES + 1
    assert sum(failures.count for failures in lines) == 20
    assert (lines[-1].kind, lines[-1].count) == (
        f"{KIND}, further causes",
        20 - MOST_CAUSES,
    )
