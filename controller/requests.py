"""What a step asks of the engines.

prompts x samples --> SampleRequest each, with a seed of its own and, for an environment, the record
"""

from collections.abc import Sequence

from controller.config import Config
from controller.data import Prompt, with_system_prompt
from workers.rollout.requests import EpisodeStart, SampleRequest, sample_seed


def sample_requests(config: Config, prompts: Sequence[Prompt], samples: int, step: int) -> list[SampleRequest]:
    """`samples` requests for every prompt; those of a group follow each other and share their arrays."""
    starts = [_start(config, prompt) for prompt in prompts]
    return [
        SampleRequest(prompt.uid, i, prompt.ids, sample_seed(config.run.seed, step, prompt.uid, i), start)
        for prompt, start in zip(prompts, starts, strict=True)
        for i in range(samples)
    ]


def _start(config: Config, prompt: Prompt) -> EpisodeStart | None:
    if not config.rollout.environment:
        return None
    text = prompt.columns[config.data.prompt_key]
    if config.data.system_prompt:
        text = with_system_prompt(text, config.data.system_prompt, prompt.uid)
    return EpisodeStart(prompt.columns, text)
