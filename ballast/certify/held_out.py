"""The oracle of a held-out score: does a response give the record's answer, whatever the reward says?"""

import re

LAST_FORMS = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"####(.*)"),
    re.compile(r"answer is:?(.*)", re.IGNORECASE),
    re.compile(r"#([^#]*)\Z"),
)


def certified_answer(response: str, certify_answer: str) -> float:
    """Return 1 if the response is the answer, or ends a form of an answer with it, else 0.

    certify_answer: the record's answer. An answer may show its working before a `#`, as the response may.
    """
    expected = (
        {_plain(text) for text in _readings(certify_answer)} if certify_answer else set()
    )
    return float(any(_plain(text) in expected for text in _readings(response)))


def _readings(text: str) -> list[str]:
    """Return the whole text, or what its last form of an answer holds."""
    for form in LAST_FORMS:
        if matches := form.findall(text):
            return [matches[-1]]
    return [text]


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()
