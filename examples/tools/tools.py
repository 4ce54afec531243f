"""The tools: plain functions. Their type hints and docstrings become the JSON schemas that the template
shows.
"""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract two numbers.

    Args:
        a: The first number.
        b: The number to subtract.
    """
    return a - b
