"""Functions of the user in settings of a run: found in the current folder, as data.reward is."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow.dataflow.episodes import load_episode
from sparrow.functions import register
from sparrow.schema.train import AlgorithmConfig
from sparrow.sparse.flows.loading import load_flow
from sparrow.training.objectives.algorithms import make_algorithm

SOURCE = """
from sparrow.sparse.flows.library import quest as my_flow


async def episode(actor, example):
    return []


def advantage(groups):
    return [group.rewards - 1 for group in groups]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current folder, which the installed command does not have on its path."""
    (tmp_path / "module_of_the_user.py").write_text(SOURCE)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    return "module_of_the_user"


def test_settings_find_modules_and_files_of_the_current_folder(module: str) -> None:
    for place in (module, f"{module}.py"):
        assert load_episode(f"{place}:episode").__name__ == "episode"
        advantage = AlgorithmConfig(advantage=f"{place}:advantage")
        assert make_algorithm(advantage, max_tokens=8).advantage.__name__ == "advantage"
    assert load_flow(f"{module}:my_flow").name == "quest"


def test_settings_take_functions_of_a_notebook_cell() -> None:
    async def mine(actor: Any, example: Any) -> list[Any]:
        return []

    def sync(actor: Any, example: Any) -> list[Any]:
        return []

    def name(function: Callable[..., Any]) -> str:
        return register(function, "rollout.episode")

    assert load_episode(name(mine)) is mine
    with pytest.raises(ValueError, match=r"rollout\.episode"):
        load_episode(name(sync))
    with pytest.raises(ValueError, match=r"rollout\.episode"):
        load_episode("here:of_another_process")
