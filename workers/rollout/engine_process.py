"""Processes of an engine end with the actor that started them, however that ends.

    RolloutWorker --spawn--> VLLM::EngineCore --spawn--> VLLM::Worker, where several share a model
       SIGKILL -------------------> SIGKILL ------------------> SIGKILL

Left alone, vLLM's scheduler goes on after its actor was killed, and keeps its memory (on a GPU: nearly all of it) from
the engine that is started in its place.
"""

import ctypes
import os
import signal

ACTOR = "BALLAST_ROLLOUT_ACTOR"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def mark_actor() -> None:
    """This process is the actor: those that inherit its environment are to end with it."""
    os.environ[ACTOR] = str(os.getpid())


def end_with_parent() -> None:
    """Below a marked actor: have the kernel kill this process when the one that started it ends."""
    if os.environ.get(ACTOR) in (None, str(os.getpid())):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
