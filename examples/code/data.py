"""The problems of the tools example, for a policy that writes programs.

user 73+95    > <think>...</think> python(code="print(73+95)")    tool 168    > <think>...</think> 168
"""

from examples.tools import data
from examples.tools.data import Messages, result

question, guessed, problem, write = data.question, data.guessed, data.problem, data.write


def called(a: int, sign: str, b: int) -> Messages:
    """The turns in which the policy writes a program."""
    return data.call("python", {"code": f"print({a}{sign}{b})"}, result(a, sign, b))
