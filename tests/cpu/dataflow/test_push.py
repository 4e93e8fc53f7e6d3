"""Pushing to a hub: what is uploaded, to whom it is visible, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from support import cli

from sparrow import api
from sparrow.dataflow.checkpoints import read_state
from sparrow.dataflow.push import checkpoint_model
from sparrow.schema.common import PushConfig


class Hub:
    """In place of HfApi: repositories in memory, whether they are private, and their files."""

    private: dict[str, bool]
    files: dict[str, bytes]

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        self.private.setdefault(name, private)
        return f"https://hub/{name}"

    def model_info(self, name: str) -> Any:
        return SimpleNamespace(private=self.private[name])

    def create_commit(self, name: str, *, operations: list[Any], commit_message: str) -> None:
        for operation in operations:
            content = operation.path_or_fileobj
            is_file = isinstance(content, str | Path)
            self.files[operation.path_in_repo] = Path(content).read_bytes() if is_file else content


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.private, Hub.files = {}, {}
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    return Hub


def pushed(run: Path, **options: Any) -> str:
    return api.push(PushConfig(run=run, repository="me/mine", **options))


def test_the_model_of_a_run_with_a_card_and_private(done: Path, hub: type[Hub]) -> None:
    assert pushed(done) == "https://hub/me/mine"
    assert hub.private == {"me/mine": True}
    for file in (done / "model").iterdir():
        assert hub.files[file.name] == file.read_bytes(), file.name
    card = hub.files["README.md"].decode()
    front, text = card.removeprefix("---\n").split("\n---\n")
    assert "library_name: transformers" in front.splitlines()
    assert "base_model" not in front  # a folder of this machine is no name on a hub
    assert "3 steps" in text
    assert "| algorithm | grpo |" in text
    assert text.count("\n| 2 | ") == 1  # the accuracy after two steps
    assert str(done.parent) not in card


def test_a_checkpoint_and_a_plain_model_folder(done: Path, hub: type[Hub], tmp_path: Path) -> None:
    pushed(done, step=2, public=True)
    assert hub.private == {"me/mine": False}
    (tmp_path / "model.safetensors").write_bytes(hub.files["model.safetensors"])
    state = read_state(done / "checkpoints" / "step_000002")["learner"]["weights"]
    assert "2 steps" in hub.files["README.md"].decode()
    stored = load_file(tmp_path / "model.safetensors")
    embed = stored["model.embed_tokens.weight"]
    assert torch.equal(embed, state["embed.weight"])
    assert not torch.equal(embed, checkpoint_model(done, 3).embed.weight)
    hub.files.clear()
    pushed(done / "model", public=True)
    assert {"model.safetensors", "config.json", "README.md"} <= hub.files.keys()


def test_what_is_refused(
    done: Path, hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private["me/mine"] = False
    with pytest.raises(ValueError, match="public"):
        pushed(done)
    with pytest.raises(ValueError, match="step 9"):
        pushed(done, step=9, public=True)
    with pytest.raises(ValueError, match="no model"):
        pushed(tmp_path, public=True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="HF_TOKEN"):
        pushed(done)
    assert not hub.files


def test_the_command(done: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cli.run("push", done, "me/mine")
    assert (ended.code, ended.stdout.split()) == (0, ["https://hub/me/mine"])
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "HF_TOKEN" in cli.refused("push", done, "me/mine")
