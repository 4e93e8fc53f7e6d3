"""Trees of agents in reports: read from saved rollouts, shown with indentation, hostile text."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparrow.files import add_line_digest
from sparrow.reporting.agents import agents_section, shown_trees
from sparrow.reporting.page import Table
from sparrow.schema.agents import AgentNode
from sparrow.schema.base import to_dict
from sparrow.schema.run_folder import Metrics, RunFolder, RunSettings, read_trees


def node(*place: int, acc: float = 0.0, **changes: Any) -> AgentNode:
    values: dict[str, Any] = {
        "node": place,
        "task": "find x1",
        "policy": "",
        "status": "done",
        "reason": "",
        "message": "yes",
        "steps": 2,
        "tokens": 9,
        "context": 20,
        "seconds": 0.5,
        "reward": acc,
        "acc": acc,
    }
    return AgentNode(**(values | changes))


def run(trees: list[tuple[AgentNode, ...]]) -> RunFolder:
    values = {"agents/count/mean": 2.0, "agents/spawned": 0.5, "agents/level_1/acc": 0.25}
    values |= {"agents/status/done": 0.75, "agents/status/failed": 0.25}
    settings = RunSettings.model_validate({})
    return RunFolder(
        name="run", steps=[Metrics(step=0, values=values)], settings=settings, trees=trees
    )


TREE = (node(0, acc=1.0), node(0, 0, task="\x1b[31m <b>", status="failed", reason="a\nb"))


def test_the_largest_right_and_wrong_trees_are_shown() -> None:
    chosen = shown_trees([(node(0),), TREE, (node(1, acc=1.0),), (node(2), node(2, 0))])
    assert [tree[0].node for tree in chosen.values()] == [(0,), (2,)]
    section = agents_section([run([TREE])])
    assert section is not None
    (table,) = [i for i in section.items if isinstance(i, Table) and "tree" in i.key]
    assert [row[0].count("\u2003") for row in table.rows] == [0, 1]
    assert "\x1b" not in table.rows[1][0]
    assert "\n" not in table.rows[1][-1]
    assert len(table.columns) == 6  # none for the policy of a run of one


def test_runs_without_agents_have_no_such_section() -> None:
    assert agents_section([RunFolder(name="run", settings=RunSettings.model_validate({}))]) is None


def test_trees_are_read_from_the_rollouts_that_were_saved_last(tmp_path: Path) -> None:
    place = tmp_path / "rollouts"
    place.mkdir()
    for step, tree in enumerate([(node(5),), TREE]):
        rows = [{"agents": [to_dict(one) for one in tree]}, {"agents": []}]
        lines = [add_line_digest(json.dumps(row, separators=(",", ":"))) + "\n" for row in rows]
        (place / f"step_{step:06d}.jsonl").write_text("".join(lines))
    assert read_trees(tmp_path) == [TREE]
    file = place / "step_000001.jsonl"
    file.write_text(file.read_text().replace('"seconds":0.5', '"seconds":0.1'))
    with pytest.raises(ValueError, match="line 1"):
        read_trees(tmp_path)
    assert read_trees(tmp_path / "none") == []
