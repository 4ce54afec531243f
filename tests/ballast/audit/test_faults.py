"""Each planted fault is named as what it is."""

import pytest

from ballast.audit.checks import check_step
from ballast.audit.finding import Finding, Verdict
from tests.ballast.audit.faults import FAULTS
from tests.ballast.audit.steps import clean_step


def failures(name: str) -> dict[str, Finding]:
    fault = FAULTS[name]
    findings = check_step(fault.plant(clean_step(**fault.recipe)))
    return {
        finding.name: finding for finding in findings if finding.verdict is Verdict.FAILED
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    fault = FAULTS[name]
    failed = failures(name)
    causes = {check: finding.cause for check, finding in failed.items()}
    assert causes.get(fault.check) == fault.cause, causes
    assert failed[fault.check].text
    assert failed[fault.check].advice


def test_a_column_that_is_not_finite_fails_alone() -> None:
    """Checks that compare it are unknown, and do not guess."""
    assert list(failures("one NaN")) == ["log_probs.new"]
