"""Processes of an engine end with the actor that started them, however that ends.

    RolloutWorker --spawn--> VLLM::EngineCore --spawn--> VLLM::Worker, where several share a model
       SIGKILL -------------------> SIGKILL ------------------> SIGKILL

Otherwise vLLM's scheduler outlives a killed actor and keeps its memory (on a GPU: nearly all of it), which the engine
started in its place then lacks.
"""

import os

from workers.user_code.process import end_with_parent

ACTOR = "BALLAST_ROLLOUT_ACTOR"


def mark_actor() -> None:
    """Mark this process as the actor; processes that inherit its environment end with it."""
    os.environ[ACTOR] = str(os.getpid())


def end_with_actor() -> None:
    """Below a marked actor: let the kernel kill this process when the one that started it ends."""
    if os.environ.get(ACTOR) not in (None, str(os.getpid())):
        end_with_parent()
