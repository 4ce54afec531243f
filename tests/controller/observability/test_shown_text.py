import pytest

from controller.observability.shown_text import MASK, redact, shorten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key: swordfish-123", f"key: {MASK}"),
        ("http://user:pw@host/x", f"http://user:{MASK}@host/x"),
        ("hf_abcdefghijklmnopqrst", MASK),
        ("sk-abcdefghijklmnopqrst", MASK),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
        ("max_tokens: 1024", "max_tokens: 1024"),
        ("http://host:8265/a@b", "http://host:8265/a@b"),
        ("the task-force of 1999", "the task-force of 1999"),
    ],
)
def test_secrets_are_masked_and_nothing_else(text: str, expected: str) -> None:
    environment = {"SERVICE_TOKEN": "swordfish-123", "PATH": "max_tokens", "USE_TOKEN": "1"}
    assert redact({"a": [text, 3]}, environment) == {"a": [expected, 3]}


def test_a_long_text_says_how_much_is_missing() -> None:
    assert shorten("x" * 10, 10) == "x" * 10
    assert shorten("x" * 1_500, 100) == "x" * 100 + " ... (1,400 more characters)"
