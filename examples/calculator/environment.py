"""An environment with a calculator that the policy may ask. It also grades the answer."""

import re
from typing import Any

from workers.environment import Observation


class Calculator:
    """Answers `[a+b]` with `<sum>`. Any other turn is the final answer, worth 1 if it is right."""

    def reset(self, record: dict[str, Any]) -> None:
        self.prompt, self.answer = record["prompt"], record["answer"]
        self.asked = 0.0

    def step(self, response: str) -> Observation:
        call = re.fullmatch(r"\[(\d+)\+(\d+)\]", response)
        if call is None:
            right = float(response == str(self.answer))
            return Observation(
                reward=right,
                done=True,
                parts={"exact_match": right, "asked_rightly": self.asked},
            )
        a, b = call.groups()
        if f"{a}+{b}=" == self.prompt:
            self.asked = 1.0
        return Observation(
            f"<{int(a) + int(b)}>", parts={"exact_match": 0.0, "asked_rightly": self.asked}
        )
