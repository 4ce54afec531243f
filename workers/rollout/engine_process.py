"""Processes of an engine end with the actor that started them, however that ends.

    RolloutWorker --spawn--> VLLM::EngineCore --spawn--> VLLM::Worker, where several share a model
       SIGKILL -------------------> SIGKILL ------------------> SIGKILL

Left alone, vLLM's scheduler goes on after its actor was killed, and keeps its memory (on a GPU: nearly all of it) from
the engine that is started in its place.
"""

import os

from workers.isolation.process import end_with_parent

ACTOR = "BALLAST_ROLLOUT_ACTOR"


def mark_actor() -> None:
    """This process is the actor: those that inherit its environment are to end with it."""
    os.environ[ACTOR] = str(os.getpid())


def end_with_actor() -> None:
    """Below a marked actor: let the kernel kill this process when the one that started it ends."""
    if os.environ.get(ACTOR) not in (None, str(os.getpid())):
        end_with_parent()
