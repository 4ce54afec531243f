"""Planted defects of agents and of a package for verifiers are named as what they are."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from ballast.certify.environment.agent_checks import TriedAgent, check_agent
from tests.ballast.certify import planted_agents as planted
from tests.end_to_end.test_task_packages import SUMS
from workers.user_code.task_sources import find_verifiers_agent, task_records

RECORDS = [{"prompt": f"{a}+{a * 7}=", "answer": a * 8} for a in range(101, 160, 20)]
PACKAGE = "verifiers:sums?agent.runtime.type=subprocess&agent.harness.id=sums"
REWARD = "float(str(self.data.answer) in trace.last_reply)"
PAYS_ALWAYS = SUMS.replace(REWARD, "1.0").replace(
    "float(any(letter.isdigit() for letter in trace.last_reply))", "1.0"
)
RAISES = SUMS.replace(REWARD, "float(int(trace.last_reply) == self.data.answer)")


def findings_of(packed: bytes, records: list[dict[str, Any]]) -> list[str]:
    tried = TriedAgent(
        packed, "rollout.agent=mine.py:run", "prompt", "answer", 30.0, 4, 4.0, 64
    )
    report = asyncio.run(check_agent(tried, records))
    assert not report.other_routes
    return [finding.name for finding in report.findings]


@pytest.mark.parametrize("name", planted.DEFECTS)
def test_a_planted_defect_of_an_agent_is_named_alone(name: str) -> None:
    assert findings_of(cloudpickle.dumps(planted.DEFECTS[name]), RECORDS[:1]) == [name]


@pytest.mark.parametrize("agent", [planted.clean, planted.unpaid])
def test_a_clean_agent_has_no_finding(agent: Callable[..., Any]) -> None:
    assert findings_of(cloudpickle.dumps(agent), RECORDS[:1]) == []


@pytest.mark.slow  # a session of verifiers takes a second
@pytest.mark.parametrize(
    ("names", "code"),
    [([], SUMS), (["agent.pays_everything"], PAYS_ALWAYS), (["agent.fails"], RAISES)],
)
def test_a_package_for_verifiers_is_judged_as_an_agent(
    names: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    task_records.cache_clear()
    records = list(task_records("verifiers:sums?taskset.last=2"))
    assert (
        findings_of(find_verifiers_agent("rollout.environment", PACKAGE, 60.0), records)
        == names
    )
