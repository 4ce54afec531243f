"""Settings of a judge, a generative model that scores responses. See `workers.config.roles` and
docs/judges.md.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from workers.config.roles import SamplingConfig
from workers.config.setting import setting

POLICY = "policy"
"""Value of `reward.judge.model` for the policy's engines."""
GRADE = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
VERDICT = r"\[\[\s*([ABC])\s*\]\]"


@dataclass
class JudgeConfig:
    """A generative model that reads each response, and whose answer is a part of the reward (see
    docs/judges.md).
    """

    only_with = (
        (".form=pairwise", "opponents"),
        (".form=score", "min_grade, max_grade"),
        (".model other than policy", "replicas, tensor_parallel, engine"),
    )

    model: str = setting(
        "",
        "Judge: a folder or a name of the hub, as model.path. It stays as it is, on vLLM engines of its "
        "own. `policy` asks the policy's engines, with their current weights. Empty disables it.",
    )
    weight: float = setting(1.0, "Weight of the judgement, from 0 to 1, in the reward.")
    form: str = setting(
        "score",
        "`score` grades each response. `pairwise` compares responses to the same prompt: the judgement is "
        "the share of comparisons that a response wins.",
        choices=("score", "pairwise"),
    )
    prompt: str = setting(
        "",
        "Jinja file with the judge's prompt, a text or `path/file.jinja`. It may read `prompt`, `response` "
        "(pairwise: `response_a` and `response_b`), and the record's columns. Empty is a general one, with "
        "the columns `rubric` and `answer` of records that have them.",
    )
    parser: str = setting(
        "",
        "How to read the judge's answer: a regular expression with one group, whose last match counts, or "
        "a function, `module:function` or `path/file.py:function`, as in reward.function. Empty reads "
        "`[[7]]`, or for pairwise `[[A]]`, `[[B]]` and, for a tie, `[[C]]`.",
    )
    min_grade: float = setting(
        1.0, "Lowest grade, which becomes 0. An answer with a lower one counts as unparsed."
    )
    max_grade: float = setting(
        10.0,
        "Highest grade, which becomes 1. An answer with a higher one counts as unparsed.",
    )
    opponents: int = setting(
        2,
        "Comparisons of each response as A, with the next responses of its group. It is B in as many.",
        minimum=1,
    )
    samples: int = setting(
        1,
        "Answers to each question. Their mean counts, without those that cannot be parsed.",
        minimum=1,
        maximum=1000,
    )
    chat_template_arguments: dict[str, Any] = setting(
        {}, "As data.chat_template_arguments, for the judge."
    )
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(temperature=0.0)
    )
    max_prompt_tokens: int = setting(
        4096, "Longest question, in tokens. A longer one has no answer.", minimum=1
    )
    timeout_s: float = setting(
        300.0,
        "Time limit in seconds for an answer. A late one is asked for again.",
        above=0,
    )
    replicas: int = setting(
        1, "Engines of the judge, with their own GPUs.", minimum=1, maximum=100_000
    )
    tensor_parallel: int = setting(
        1, "As rollout.tensor_parallel, for the judge.", minimum=1, maximum=10_000
    )
    engine: dict[str, Any] = setting({}, "As rollout.engine, for the judge.")

    @property
    def has_engines(self) -> bool:
        """Whether it has engines of its own."""
        return self.model not in ("", POLICY)

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def grades(self) -> tuple[float, float]:
        """Lowest and highest number that an answer may be read as."""
        return (self.min_grade, self.max_grade) if self.form == "score" else (0.0, 1.0)

    @property
    def function(self) -> str:
        """The function of `parser`, or empty for a regular expression."""
        return (
            self.parser if re.fullmatch(r"[^()\[\]\\]+:[A-Za-z_]\w*", self.parser) else ""
        )

    @property
    def pattern(self) -> str:
        """The regular expression of `parser`."""
        return self.parser or (GRADE if self.form == "score" else VERDICT)
