"""On CPUs, vLLM looks at a model's class in the process that asks, not in a new one.

    class of a model --in a new interpreter of ten CPU seconds--> has it states, images, adapters?
                     --here, where the engine imports it anyway-->

The new process keeps CUDA from starting in the one that asks, and on CPUs there is none to start. vLLM keeps
the answer on disk, so this is about the first engine of each class of models.
"""

from collections.abc import Callable
from typing import TypeVar

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

Answer = TypeVar("Answer")


def look_here(look: Callable[[], Answer]) -> Answer:
    return look()


if current_platform.is_cpu():
    registry._run_in_subprocess = look_here
