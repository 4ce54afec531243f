"""Weights of one family to a real vLLM engine on a CPU: log-probs before an update of all weights and after
it.
"""

from pathlib import Path

from torch import nn
from transformers import AutoConfig

from controller.algorithm.logprob_check import AtEqualWeights, beyond
from tests.benchmarks.families.measuring import Outcome
from tests.workers.rollout.test_transfers import LOG_PROB_TOLERANCE, transfer
from workers.config.roles import PolicyConfig
from workers.errors import BallastError

PLACEMENT = "colocated"


def send(folder: Path) -> Outcome:
    """What became of the model in `folder` in an engine, after an update."""
    if not is_known(folder):
        return Outcome("not there", reason="vLLM has no such architecture")
    # Where vLLM runs transformers' classes, it changes how they are called, those of the trainer in this
    # process too.
    nn.Module.do_not_compile = True  # type: ignore[assignment]
    try:
        outcome = transfer(str(folder), PLACEMENT, 0)
    except BallastError as error:
        return Outcome("refused", reason=str(error))
    except Exception as error:
        lines = [
            line
            for line in str(error).strip().splitlines()
            if "errors.pydantic.dev" not in line
        ] or [""]
        return Outcome("crash", reason=f"{type(error).__name__}: {lines[-1].strip()}")
    difference = max(outcome["before"], outcome["sent"])
    if difference < LOG_PROB_TOLERANCE:
        return Outcome("exact", difference)
    for equal_weights, mean in (
        (AtEqualWeights.FIRST, outcome["before_mean"]),
        (AtEqualWeights.CHANGED, outcome["sent_mean"]),
    ):
        if problem := beyond(
            mean, difference, PolicyConfig.max_mismatch, "float32", equal_weights
        ):
            return Outcome("refused", difference, problem)  # by the first step of a run
    # Before any transfer: what a run shows as its mismatch, and goes on with.
    return Outcome(
        "close" if outcome["before"] > LOG_PROB_TOLERANCE else "wrong",
        difference,
        "the engine's own",
    )


def is_known(folder: Path) -> bool:
    """Return whether vLLM has a class of its own for the model."""
    from vllm import ModelRegistry

    architectures = AutoConfig.from_pretrained(folder).architectures or []
    return bool(set(architectures) & set(ModelRegistry.get_supported_archs()))
