"""Peak memory of tensors on CPU, as `torch.cuda.max_memory_allocated` has it on a GPU."""

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """Bytes that `work` holds at most in tensors, beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return max(accumulate(event["args"]["Bytes"] for event in changes), default=0)
