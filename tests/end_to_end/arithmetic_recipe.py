"""`tinker_cookbook.recipes.math_rl.train` as it is, with the quickstart's model: URL MODEL FOLDER
[NAME=NUMBER ...].

The model writes numbers ones first, with its working. A renderer asks the recipe's questions so, and reads
answers.
"""

import asyncio
import re
import sys
from typing import Any

import chz
from tinker import types
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.train import CLIConfig, cli_main

from examples.addition.data import ones_first


class OnesFirst(renderers.Renderer):
    """What is 58 + 7?  ->  85+70=  ->  875^501.#56  ->  65"""

    @property
    def has_extension_property(self) -> bool:
        return False

    def render_message(self, message: Any, ctx: Any) -> Any:
        raise NotImplementedError

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.eos_token_id]

    def build_generation_prompt(
        self, messages: Any, role: str = "assistant", prefill: str | None = None
    ) -> Any:
        a, b = re.findall(r"\d+", messages[-1]["content"])
        width = max(len(a), len(b))
        text = "+".join(ones_first(number).ljust(width, "0") for number in (a, b)) + "="
        return types.ModelInput.from_ints(
            self.tokenizer.encode(text, add_special_tokens=False)
        )

    def parse_response(self, response: list[int]) -> Any:
        ended = bool(response) and response[-1] == self.tokenizer.eos_token_id
        answer = self.tokenizer.decode(response[: len(response) - ended]).partition("#")[2]
        ending = (
            renderers.ParseTermination.STOP_SEQUENCE
            if ended
            else renderers.ParseTermination.MALFORMED
        )
        return {"role": "assistant", "content": ones_first(answer)}, ending


def main(url: str, model: str, folder: str, *settings: str) -> None:
    renderers.register_renderer(
        "ballast/ones_first", lambda tokenizer, image_processor=None: OnesFirst(tokenizer)
    )
    usual = CLIConfig(
        model_name=model,
        renderer_name="ballast/ones_first",
        base_url=url,
        log_path=f"{folder}/recipe-log",
        group_size=8,
        groups_per_batch=32,
        learning_rate=3e-4,
        max_tokens=24,
        loss_fn="importance_sampling",
        eval_every=0,
        save_every=0,
        behavior_if_log_dir_exists="delete",
    )
    numbers = {
        name: float(number)
        for name, _, number in (each.partition("=") for each in settings)
    }
    whole = {name: int(number) for name, number in numbers.items() if number.is_integer()}
    asyncio.run(cli_main(chz.replace(usual, **numbers | whole)))


if __name__ == "__main__":
    main(*sys.argv[1:])
