"""1 for the exact answer, otherwise half the share of correct working."""


def reward(response: str, solution: str) -> dict[str, float]:
    """Score `response` against `solution`, both `working#sum`.

    Returns `reward`, and `exact_match`: whether the sum is right, whatever the working.
    """
    _, _, answer = response.partition("#")
    working, _, expected = solution.partition("#")
    exact = float(answer == expected)
    written = response.partition("#")[0]
    correct = sum(a == b for a, b in zip(written, working, strict=False)) / max(
        len(written), len(working)
    )
    return {"reward": exact or 0.5 * correct, "exact_match": exact}
