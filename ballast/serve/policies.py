"""Policies of the server's run: which model each serves, and which weights the trainer and the engines have.

Each model has a policy until another model takes it. Weights are named by the call that made them: a step or
a load, 0 for the base model.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

from ballast.loop.open_run import OpenRun

# in place of a call's number: of a sampler that follows the weights, and of no weights
NEWEST = -1
NOWHERE = -2


@dataclass
class Policy:
    """adapter: its name in the run, empty for the only one. model, owner: whom it serves, and its session.
    weights, published: of trainer and engines. since: call that changed the weights last, or began with them.
    sent: what engines have, by model and weights, as versions of the run.
    """

    adapter: str
    model: str = ""
    owner: str = ""
    weights: int = 0
    published: int = 0
    since: int = 0
    sent: dict[tuple[str, int], Future[int]] = field(default_factory=dict)


class Policies:
    """by_adapter: all of them. base: serves the base model, which engines with adapters always have.
    of_model: by a model's name, also of replaced models.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        lora = run.config.model.lora
        self._versions = lora.versions
        if lora.policies > 1:
            names = [f"policy-{number}" for number in range(1, lora.policies + 1)]
            self.by_adapter = {name: Policy(name, published=NOWHERE) for name in names}
            self.base = Policy("")
        else:
            self.base = Policy("")
            self.by_adapter = {"": self.base}
        self.of_model = dict[str, Policy]()

    def send_weights(self, policy: Policy) -> Future[int]:
        """Send the policy's weights to the engines, and remember their version."""
        key = (policy.model, policy.weights)
        policy.sent.pop(key, None)
        sent = self._run.publish(adapter=policy.adapter)
        policy.sent[key] = sent
        while len(policy.sent) > self._versions:
            del policy.sent[next(iter(policy.sent))]
        return sent
