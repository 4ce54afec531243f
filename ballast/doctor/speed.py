"""Measure what `--cluster` takes as figures of a machine: products, memory and calls of one GPU or CPU
thread.
"""

import time
from collections.abc import Callable

import torch

from ballast.doctor.report import Finding, ok

REPEATS = 5


def speed(*, cuda: bool) -> Finding:
    """Return TFLOP/s of a square product, GB/s of a copy (read and written) and microseconds of a
    small call.
    """
    device, size = ("cuda", 8192) if cuda else ("cpu", 768)
    threads = torch.get_num_threads()
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.set_num_threads(1)
    try:
        # Not ones: with less to switch, an H200 reaches 830 instead of 738 TFLOP/s.
        a = torch.randn(size, size, device=device, dtype=dtype)
        small = torch.ones(1, device=device)
        many = torch.ones(2**28 if cuda else 2**25, device=device, dtype=dtype)
        target = torch.empty_like(many)
        tflops = 2 * size**3 / _seconds(lambda: torch.mm(a, a), cuda) / 1e12
        copied = 2 * many.nbytes / _seconds(lambda: target.copy_(many), cuda) / 1e9
        call = _seconds(lambda: [small.add_(1) for _ in range(100)], cuda) / 100
    finally:
        torch.set_num_threads(threads)
    return ok(
        "speed",
        f"{tflops:.2g} TFLOP/s in products, {copied:.2g} GB/s of memory, {1e6 * call:.2g} us a call",
    )


def _seconds(call: Callable[[], object], cuda: bool) -> float:
    """Return the least seconds of a call. The first warms up."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
