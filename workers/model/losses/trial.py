"""A policy loss of one's own, imported and bound in a process of its own before the workers of a run import it."""

from workers.config import LossConfig
from workers.errors import ConfigError
from workers.isolation import Answer, answering
from workers.model.losses.registry import make_policy_loss
from workers.user_code import load


def respond(question: Answer, payload: bytes) -> tuple[Answer, bytes]:
    """In the process: nothing, or the `failure`, of the loss `name` that setting `key` names."""
    del payload
    try:
        load(question["key"], question["name"])  # with an error of ours, whatever it raises
        make_policy_loss(LossConfig(name="custom", function=question["name"]))
    except ConfigError as error:
        return {"failure": str(error)}, b""
    return {}, b""


if __name__ == "__main__":
    answering(respond)
