"""What a process keeps from its collection of tests, and what it puts back after it."""

import os
import sys
from pathlib import Path


def test_collection_keeps_bytecode_and_tests_write_it_as_the_environment_says() -> None:
    assert list(
        (Path(__file__).parent / "__pycache__").glob("test_collection.*-pytest-*.pyc")
    )
    assert sys.dont_write_bytecode == bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
