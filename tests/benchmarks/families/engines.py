"""Weights of one family to a real vLLM engine on a CPU: log-probs before an update of all weights and after it."""

from pathlib import Path

from transformers import AutoConfig

from tests.benchmarks.families.measuring import Outcome
from tests.workers.rollout.test_transfers import LOG_PROB_TOLERANCE, transfer
from workers.errors import BallastError

PLACEMENT = "colocated"


def send(folder: Path) -> Outcome:
    """What became of the model in `folder` in an engine, after an update."""
    if not _is_known(folder):
        return Outcome("not there", reason="vLLM has no such architecture")
    try:
        found = transfer(str(folder), PLACEMENT, 0)
    except BallastError as error:
        return Outcome("refused", reason=str(error))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Outcome("crash", reason=f"{type(error).__name__}: {lines[-1]}")
    difference = max(found["before"], found["sent"])
    when = "before" if found["before"] > LOG_PROB_TOLERANCE else "after"
    exact = difference < LOG_PROB_TOLERANCE
    return Outcome("exact" if exact else "wrong", difference, "" if exact else f"{when} the update")


def _is_known(folder: Path) -> bool:
    from vllm import ModelRegistry

    architectures = AutoConfig.from_pretrained(folder).architectures or []
    return bool(set(architectures) & set(ModelRegistry.get_supported_archs()))
