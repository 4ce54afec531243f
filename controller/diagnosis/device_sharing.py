"""Checks that a process can open memory of another, as colocated engines open the policy's GPU memory.

tensor --CUDA handle (host memory: a file descriptor)--> a new process --its sum--> back
"""

from multiprocessing.connection import Connection
from typing import Any

SECONDS = 60.0
COUNT = 1024


def sharing_problem(device: str) -> str:
    """The reason why another process cannot open memory of this one, or "".

    device: `cuda`, or `cpu` for shared host memory.
    """
    import torch
    from torch import multiprocessing

    context = multiprocessing.get_context("spawn")
    tensor = torch.ones(COUNT, device=device)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer_sum, args=(tensor, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return f"another process did not open the memory within {SECONDS:g} s"
        total = ours.recv()
    except EOFError:
        process.join(SECONDS)
        return f"another process that opened the memory ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join(SECONDS)
    return "" if total == COUNT else f"another process got {total} from it, and not the sum {COUNT}"


def _answer_sum(tensor: Any, connection: Connection) -> None:
    """In the other process: the sum, or what went wrong."""
    try:
        connection.send(float(tensor.sum()))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
