"""Check reward.judge for contradictions."""

import re

from controller.config import Config
from controller.config.functions import check_function
from controller.config.model_files import read_model_files
from controller.config.sampler import SamplerConfig
from workers.errors import ConfigError
from workers.rollout.engine_options import check_engine_options


def check_judge(config: Config) -> None:
    """Raise ConfigError for a judge that cannot answer, or whose answers have no effect."""
    judge, samples = config.reward.judge, config.rollout.samples_per_prompt
    check_engine_options(judge.engine)
    text = read_model_files(config.judge_model.path, "reward.judge.model").text
    longest, scaled = text.get("max_position_embeddings"), text.get("rope_scaling") or text.get("rope_parameters") or {}
    if judge.function:
        check_function("reward.judge.parser", judge.function)
    alone = not (config.reward.weights or config.rollout.code or config.uses_reward_model)
    pairwise, greedy = judge.form == "pairwise", judge.sampling.temperature == 0
    problems = {
        f"weight={judge.weight}": (judge.weight == 0, "the judge has no effect. Remove it"),
        f"parser={judge.parser}": (not judge.function and not _has_group(judge.pattern), "give it one group"),
        f"samples={judge.samples}": (
            judge.samples > 1 and greedy,
            "answers at reward.judge.sampling.temperature=0 are equal. Ask for one, or set it above 0",
        ),
        f"min_grade={judge.min_grade:g}": (
            judge.min_grade >= judge.max_grade,
            f"set it below reward.judge.max_grade={judge.max_grade:g}",
        ),
        "form=pairwise": (
            pairwise and (isinstance(config, SamplerConfig) or config.algorithm.advantage == "remax"),
            "it compares whole groups, and controller.evaluate, controller.generate and algorithm.advantage=remax "
            "score single samples. Set score",
        ),
        f"max_prompt_tokens={judge.max_prompt_tokens}": (
            longest and judge.max_tokens > longest and "factor" not in scaled,
            f"with reward.judge.sampling.max_new_tokens it exceeds the {longest} tokens of the judge. Lower either",
        ),
        f"opponents={judge.opponents}": (
            pairwise and judge.opponents >= samples,
            f"a response has {samples - 1} others of its prompt. Lower it, or raise rollout.samples_per_prompt",
        ),
        "form": (
            pairwise and bool(config.data.validation) and alone,
            "responses of one policy win half of their comparisons, so data.validation always shows 0.5. Add a "
            "reward function, or remove data.validation",
        ),
    }
    for setting, (there, problem) in problems.items():
        if there:
            raise ConfigError(f"reward.judge.{setting}: {problem}.")


def _has_group(pattern: str) -> bool:
    try:
        return re.compile(pattern).groups == 1
    except re.error:
        return False
