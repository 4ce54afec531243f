"""Report on a chat template: what it does to an assistant's turn when another message follows, and how turns
end.

template --another process--> TemplateFindings, with the model's tokens --> Examined
--table_lines--> the dry run      --page--> `ballast template`      --warnings--> the start of a run
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.config.model_files import ModelFiles, special_tokens
from workers.chat_templates import Template
from workers.episodes.template_findings import TURNS, TemplateFindings
from workers.json_file import read_json
from workers.rendering import Messages, Options, render_isolated

WIDTH = 80
TITLES = {
    "plain": "plain",
    "reasoning": "reasoning",
    "calls": "calls",
    "both": "reasoning + calls",
}
ROLES = {"user": "user", "tool": "tool", "tools": "two tools"}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Examined:
    """A template and its model. name: of the template. tokens: ids of special tokens. stops: ids at which
    engines stop.

    The last ones are empty for a file without a model. sampling: defaults of generation_config.json.
    adds_bos: whether the tokenizer puts one before a text.
    """

    name: str
    findings: TemplateFindings
    tokens: Mapping[str, int] = field(default_factory=dict)
    stops: Sequence[int] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    adds_bos: bool = False

    def warnings(self, *, tools: bool, stops: Sequence[int] = ()) -> list[str]:
        """Warn of tokens that end a turn, and at which engines do not stop.

        tools: whether prompts have some. stops: of the run, beside the model's.
        """
        stop_ids, wanted = (
            {*self.stops, *stops},
            {turn for turn in TITLES if tools or turn in ("plain", "reasoning")},
        )
        ends = (end for end, turns in self.findings.ends.items() if wanted & set(turns))
        return [
            f"{self.name} ends a turn with {end!r}, and engines do not stop there. Add its id, "
            f"{self.tokens[end]}, to eos_token_id of generation_config.json."
            for end in ends
            if self.tokens.get(end) not in {None, *stop_ids}
        ]


def examine(
    template: Template,
    prompts: Sequence[tuple[Messages, Options]],
    options: Options,
    name: str,
    timeout_s: float,
    model: ModelFiles | None = None,
    *,
    answered: bool = False,
) -> Examined | None:
    """Examine a template as `render_isolated` does."""
    tokens = special_tokens(model.folder) if model else {}
    mapping = render_isolated(
        template,
        prompts,
        options,
        list(tokens),
        name,
        answered=answered,
        timeout_s=timeout_s,
    )
    if mapping is None:
        return None
    findings = TemplateFindings.of_json(mapping)
    if model is None:
        return Examined(name, findings)
    eos_id = tokens.get(template.special_tokens.get("eos_token", ""))
    stops = [
        *([] if eos_id is None else [eos_id]),
        *(end for end in model.ends if isinstance(end, int) and end != eos_id),
    ]
    file = model.folder / "generation_config.json"
    bos = tokens.get(template.special_tokens.get("bos_token", ""))
    settings = read_json(file, "model.path") if file.is_file() else {}
    sampling = {
        key: settings[key]
        for key in SAMPLING
        if isinstance(settings.get(key), (int, float))
    }
    return Examined(
        name,
        findings,
        tokens,
        stops,
        sampling,
        bos is not None and _first_id(model.folder) == bos,
    )


def _first_id(folder: Path) -> int | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    return next(
        iter(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("x").ids), None
    )


def table_lines(findings: TemplateFindings) -> list[str]:
    """Return the outcomes by role and kind of turn, with a letter for each change."""
    letters = _letters(findings)
    lines = [["followed by", *TITLES.values()]]
    for role in TURNS:
        of_role = {case.turn: case for case in findings.cases if case.role == role}
        cases = [of_role.get(turn) for turn in TITLES]
        lines.append(
            [
                ROLES[role],
                *(
                    f"{case.outcome} {letters.get(case.change, '')}" if case else ""
                    for case in cases
                ),
            ]
        )
    return list(map(_join_cells, lines))


def _join_cells(line: Sequence[str]) -> str:
    return "".join(f"{cell:14}" for cell in line).rstrip()


def _letters(findings: TemplateFindings) -> dict[str, str]:
    changes = dict.fromkeys(case.change for case in findings.cases if case.change)
    return dict(zip(changes, "abcdefgh", strict=False))


def short_lines(report: Examined, *, turns_follow: bool) -> list[str]:
    """Return the lines of a dry run. turns_follow: whether messages follow the policy's turns."""
    ends = ", ".join(report.findings.ends) or "nothing"
    reads = ", ".join(report.findings.arguments) or "no arguments, no tools"
    table = [f"    {line}" for line in table_lines(report.findings)] if turns_follow else []
    lines = [
        f"{report.name} reads {reads}. A turn ends with {ends}. More: `ballast template`",
        *table,
    ]
    system = report.findings.system
    if turns_follow and report.findings.system_matters:
        lines.append(f"    after a system message: {system.outcome}: {system.change}")
    return lines


def page(report: Examined) -> list[str]:
    """Return the page of `ballast template`, at most 80 columns wide."""
    findings = report.findings
    facts = {
        "reads": ", ".join(findings.arguments) or "no arguments, no tools",
        "a turn begins with": repr(findings.begin),
        "a turn ends with": ", ".join(
            _end(report, end, turns) for end, turns in findings.ends.items()
        )
        or "nothing",
        "bos_token": _bos(report),
    }
    if findings.system_matters:
        facts["after a system message"] = (
            f"{findings.system.outcome}: {findings.system.change}"
        )
    if report.stops:
        facts["engines stop at"] = ", ".join(_token(report, stop) for stop in report.stops)
    if report.sampling:
        facts["generation_config.json"] = ", ".join(
            f"{key} {value:g}" for key, value in report.sampling.items()
        ) + (" (the run's rollout.sampling decides)")
    lines = [f"{name}: {value}" for name, value in facts.items()]
    changes = [f"{letter}: {change}" for change, letter in _letters(findings).items()]
    wrapped = [
        textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        for line in (*lines, *changes)
    ]
    return [
        report.name,
        *(line for paragraph in wrapped[: len(lines)] for line in paragraph),
        "",
        *table_lines(findings),
        *(line for paragraph in wrapped[len(lines) :] for line in paragraph),
    ]


def _end(report: Examined, end: str, turns: Sequence[str]) -> str:
    kinds = (
        ""
        if len(report.findings.ends) == 1
        else f" ({', '.join(TITLES[turn] for turn in turns)})"
    )
    stops = not report.stops or report.tokens.get(end) in report.stops
    return f"{end}{kinds}{'' if stops else ', where engines do not stop'}"


def _token(report: Examined, number: int) -> str:
    text = next(
        (text for text, token_id in report.tokens.items() if token_id == number), ""
    )
    return f"{text} ({number})" if text else f"{number}"


def _bos(report: Examined) -> str:
    written = (
        ("not written by the template", "written once")[report.findings.bos]
        if report.findings.bos < 2
        else "doubled"
    )
    if report.findings.bos and report.adds_bos:
        return f"{written}. The tokenizer adds another, but not to messages that are rendered here"
    return written
