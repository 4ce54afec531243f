"""run.push_to_hub: refused before the run where it cannot work, and what goes where at its end."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from controller.config import Config, load
from controller.lifecycle.session import push_to_hub
from controller.preflight.checks import check
from tests.controller.config_workspace import refusal
from workers.errors import OutputError

NAME = "run.push_to_hub=somebody/sums"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    return "hf_of_a_test"


@pytest.fixture
def finished(workspace: Path) -> Config:
    """The configuration of a run with adapters that has ended."""
    config = load("config.yaml", [NAME])
    for name in ("model", "adapters"):
        (config.run_folder / name).mkdir(parents=True)
    return config


def test_without_a_token_or_a_network_it_is_refused_in_one_sentence(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "needs a token of the hub: `hf auth login`, or HF_TOKEN in the environment." in refusal(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids to ask it" in refusal(NAME)


def test_a_name_that_the_hub_cannot_have_is_refused(workspace: Path, token: str) -> None:
    assert "run.push_to_hub=a/b/c: expected owner/name" in refusal("run.push_to_hub=a/b/c")
    check(load("config.yaml", [NAME]))


def test_model_and_adapters_are_uploaded_to_a_private_repository(
    finished: Config, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Any, ...]] = []

    def create(self: HfApi, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        done.append(("create", repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload(
        self: HfApi, *, repo_id: str, folder_path: Path, commit_message: str, path_in_repo: str | None = None
    ) -> None:
        done.append((folder_path.name, path_in_repo))

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    said: list[str] = []
    push_to_hub(finished, said.append)
    assert done == [("create", "somebody/sums", True, True), ("model", None), ("adapters", "adapters")]
    assert said == ["pushed to https://huggingface.co/somebody/sums"]


def test_a_hub_that_refuses_ends_with_what_uploads_the_model_later(
    finished: Config, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: HfApi, repo_id: str, **options: object) -> str:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(HfApi, "create_repo", create)
    with pytest.raises(OutputError, match=r"`hf upload somebody/sums runs/test/model \.` uploads it"):
        push_to_hub(finished, print)


def test_without_the_setting_nothing_is_asked_of_the_hub(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: pytest.fail("the hub was asked"))
    push_to_hub(load("config.yaml"), print)
