"""Check reward.judge for contradictions."""

import re

from controller.config import Config
from controller.config.functions import check_function
from controller.config.model_files import positions, read_model_files
from controller.config.sampler import SamplerConfig
from workers.engine.engine_options import check_engine_options
from workers.errors import ConfigError, raise_all


def check_judge(config: Config) -> None:
    """Raise ConfigError for a judge that cannot answer, or whose answers have no effect."""
    judge = config.reward.judge
    other_samples = config.rollout.samples_per_prompt - 1
    check_engine_options(judge.engine)
    longest = positions(
        read_model_files(config.judge_model.path, "reward.judge.model").text
    )
    if judge.function:
        check_function("reward.judge.parser", judge.function)
    pairwise = judge.form == "pairwise"
    single = isinstance(config, SamplerConfig)
    alone = not (config.reward.weights or config.rollout.code or config.uses_reward_model)
    problems = {
        f"weight={judge.weight}": judge.weight == 0
        and "the judge has no effect. Remove it",
        f"parser={judge.parser}": not (judge.function or _has_group(judge.pattern))
        and "give it one group",
        f"samples={judge.samples}": judge.samples > 1
        and judge.sampling.temperature == 0
        and "answers are equal. Ask for one, or raise reward.judge.sampling.temperature",
        f"min_grade={judge.min_grade:g}": judge.min_grade >= judge.max_grade
        and "set it below reward.judge.max_grade",
        "form=pairwise": pairwise
        and (single or config.algorithm.advantage == "remax")
        and (
            "`ballast evaluate`, `ballast generate` and algorithm.advantage=remax score single samples. "
            "Set score"
        ),
        f"opponents={judge.opponents}": pairwise
        and judge.opponents > other_samples
        and (
            f"a response has {other_samples} others of its prompt. Lower it, or raise "
            "rollout.samples_per_prompt"
        ),
        "form": pairwise
        and config.data.validation
        and alone
        and "data.validation would always show 0.5. Add a reward function, or remove data.validation",
        f"max_prompt_tokens={judge.max_prompt_tokens}": longest
        and judge.max_tokens > longest
        and (
            f"with reward.judge.sampling.max_new_tokens it exceeds the judge's {longest} tokens. Lower either"
        ),
    }
    raise_all(
        [
            ConfigError(f"reward.judge.{setting}: {problem}.")
            for setting, problem in problems.items()
            if problem
        ]
    )


def _has_group(pattern: str) -> bool:
    try:
        return re.compile(pattern).groups == 1
    except re.error:
        return False
