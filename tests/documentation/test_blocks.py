"""Every command, setting and piece of code in the documentation works, or says what it would need."""

import doctest
from pathlib import Path

import pytest
import yaml

from controller.config import load
from controller.config.functions import requested_columns
from controller.preflight.checks import check
from tests.documentation.blocks import Block, blocks, commands
from tests.documentation.calls import stand_in
from tests.documentation.checks import CHECKS
from tests.documentation.workspace import RECORD
from workers.model.losses.registry import POLICY_LOSSES
from workers.user_code.functions import signature_of
from workers.user_code.rewards import MESSAGES


@pytest.mark.drawn(20)
@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.name)
def test_commands_run(
    documentation_workspace: Path, block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(block.body):
        if block.why and words[0] != "ray":
            continue
        assert words[0] in CHECKS, (
            f"{block.name}: nothing checks {words[0]!r}; say `<!-- not run: why -->` before it"
        )
        CHECKS[words[0]](words)


@pytest.mark.parametrize(
    "block", [b for b in blocks("yaml") if not b.why], ids=lambda block: block.name
)
def test_settings_are_accepted(documentation_workspace: Path, block: Block) -> None:
    base = yaml.safe_load((documentation_workspace / "config.yaml").read_text())
    given = yaml.safe_load(block.body)
    merged = base | {
        section: base.get(section, {}) | values for section, values in given.items()
    }
    (documentation_workspace / "merged.yaml").write_text(yaml.safe_dump(merged))
    check(load("merged.yaml"))


@pytest.mark.parametrize(
    "block", [b for b in blocks("python") if not b.why], ids=lambda block: block.name
)
def test_code_does_what_the_page_says(
    block: Block, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "import ballast" in block.body:
        request.getfixturevalue("documentation_workspace")
        stand_in(monkeypatch)
    if ">>>" in block.body:
        example = doctest.DocTestParser().get_doctest(
            block.body, {}, block.name, block.page, 0
        )
        report: list[str] = []
        failed, tried = doctest.DocTestRunner().run(example, out=report.append)
        assert tried >= 3
        assert failed == 0, "".join(report)
        return
    names: dict[str, object] = {}
    exec(compile(block.body, block.name, "exec"), names)
    POLICY_LOSSES.pop("mine", None)
    if "reward" in names:
        assert set(
            requested_columns(
                signature_of(names["reward"]), RECORD | {MESSAGES: []}, "reward"
            )
        ) <= {
            *RECORD,
            MESSAGES,
        }


def test_the_pages_have_blocks_of_each_kind() -> None:
    assert len(blocks("bash")) > 8
    assert len(blocks("yaml")) > 5
    assert len(blocks("python")) > 5
