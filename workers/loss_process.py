"""The process of `workers.user_code.check_loss`: a policy loss of one's own, imported and bound as workers do it."""

from workers.config import LossConfig
from workers.errors import ConfigError
from workers.isolation import Answer, answering
from workers.user_code import load


def respond(question: Answer, payload: bytes) -> tuple[Answer, bytes]:
    """Nothing, or the `failure`, of the loss `name` that setting `key` names."""
    del payload
    try:
        load(question["key"], question["name"])  # with an error of ours, whatever it raises
        from workers.model.losses import (
            make_policy_loss,
        )  # torch, which a module that cannot be imported need not wait for

        make_policy_loss(LossConfig(name="custom", function=question["name"]))
    except ConfigError as error:
        return {"failure": str(error)}, b""
    return {}, b""


if __name__ == "__main__":
    answering(respond)
