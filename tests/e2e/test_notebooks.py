"""Every notebook of notebooks/ runs from start to end in an empty folder, as a user's does."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_notebooks_are_saved_without_outputs() -> None:
    names = {"first_steps", "own_reward", "multi_turn_tool", "own_flow"}
    assert {notebook.stem for notebook in NOTEBOOKS} == names
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells), notebook
        assert not any(cell.get("execution_count") for cell in cells), notebook


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path / "cache"))
    empty = tmp_path / "work"
    empty.mkdir()
    content = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": os.fspath(empty)}}
    NotebookClient(content, timeout=300, resources=resources).execute()
    errors = [
        output.get("ename") or output.get("text")
        for cell in content.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error" or "Traceback" in output.get("text", "")
    ]
    assert not errors
