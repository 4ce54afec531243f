"""Checks of a step without a model. Each is a pure function of a bundle that returns a Finding.

layout: ids, masks, ends and weight versions fit together.
log_probs: finite, not positive, not constant, in one scale, at their own tokens.
ratios: 1 at equal weights, moving once weights have moved.
advantages: they follow from rewards by the named estimator.
loss: it follows from ratios, advantages, bounds, masks and denominators.
metrics: those that the step reported follow from its columns.
selection: groups are whole, and nothing vanishes.
"""

from collections.abc import Callable

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.checks import (
    advantages,
    layout,
    log_probs,
    loss,
    metrics,
    ratios,
    selection,
)
from ballast.audit.finding import Finding, unknown

CHECKS: dict[str, Callable[[Bundle], Finding]] = {
    **layout.CHECKS,
    **log_probs.CHECKS,
    **ratios.CHECKS,
    **advantages.CHECKS,
    **loss.CHECKS,
    **metrics.CHECKS,
    **selection.CHECKS,
}


def check_step(bundle: Bundle) -> list[Finding]:
    """Make all checks. One that lacks a column or a fact is unknown, and names it."""
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(check(bundle))
        except MissingError as missing:
            findings.append(unknown(name, _describe(check), missing.name))
    return findings


def _describe(check: Callable[[Bundle], Finding]) -> str:
    """Return what a check looks at, from its docstring."""
    function = getattr(check, "func", check)
    first_line = (function.__doc__ or "").split("\n")[0]
    return first_line.removeprefix("Check that ").rstrip(".")
