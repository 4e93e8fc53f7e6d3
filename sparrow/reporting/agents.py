"""Trees of agents in a report: how large they are and what they reach, and two of them."""

from collections.abc import Sequence

from sparrow.files import printable
from sparrow.reporting import page
from sparrow.reporting.calibration import run_role
from sparrow.reporting.training import STEP
from sparrow.schema.agents import AgentNode
from sparrow.schema.run_folder import RunFolder

CHARTS = {  # metric: its axis and form; of several metrics a line each, for one run
    "agents/count/mean": ("agents of a play", ".1f"),
    "agents/spawned": ("share of plays that spawn", ".2f"),
    "agents/acc/mean": ("accuracy of plays", ".2f"),
    "agents/tokens/mean": ("tokens of a play", ".3g"),
    "agents/context/mean": ("tokens of the longest context", ".3g"),
}
MOST_ROWS, MOST_TEXT = 60, 60  # of a tree that is shown
Tree = Sequence[AgentNode]


def agents_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Curves of runs whose agents spawn agents; of one run also two trees."""
    runs = [run for run in runs if run.values("agents/count/mean")]
    if not runs:
        return None
    items: list[page.Item] = [_chart(runs, metric) for metric in CHARTS]
    if len(runs) == 1:
        items += [_levels(runs[0])]
        items += [_tree(name, tree) for name, tree in shown_trees(runs[0].trees).items()]
    return page.Section.named("agents", items)


def shown_trees(trees: Sequence[Tree]) -> dict[str, Tree]:
    """The largest tree whose root is right, and the largest whose root is not."""
    chosen = {}
    for name, right in (("right", True), ("wrong", False)):
        found = [tree for tree in trees if ((tree[0].acc or 0.0) >= 1) == right]
        if found:
            chosen[name] = max(found, key=len)
    return chosen


def _chart(runs: Sequence[RunFolder], metric: str) -> page.Chart:
    name, form = CHARTS[metric]
    lines = [
        page.Line(
            name=run.name,
            points=[(step + 1.0, value) for step, value in run.values(metric)],
            role=run_role(run),
        )
        for run in runs
    ]
    key = metric.replace("/", "-")
    title, say = page.TEXTS["agents"][key.removeprefix("agents-").replace("-", "_")]
    y = page.Axis(name=name, low=0, form=form)
    return page.thin_points(page.Chart(key=key, title=title, x=STEP, y=y, lines=lines, say=say))


def _levels(run: RunFolder) -> page.Table:
    """The last step by level, with how agents ended."""
    last = run.steps[-1].values
    levels = sorted(key.split("/")[1] for key in last if key.endswith("/acc") and "level_" in key)
    rows = [
        [
            level.replace("_", " "),
            *(f"{last.get(f'agents/{level}/{x}') or 0:.3g}" for x in ("acc", "tokens")),
        ]
        for level in levels
    ]
    ends = {key.rpartition("/")[2]: value for key, value in last.items() if "agents/status/" in key}
    shares = ", ".join(f"{name} {value:.2f}" for name, value in ends.items() if value)
    say = page.TEXTS["agents"]["levels"].format(shares=shares)
    columns = ["level", "accuracy", "tokens of an agent"]
    return page.Table(key="agents-levels", columns=columns, rows=rows, say=say)


def _tree(name: str, tree: Tree) -> page.Table:
    """A tree: a row for each agent, indented by its level."""
    title, say = page.TEXTS["agents"][f"tree_{name}"]
    rows = [
        [
            "\u2003" * (node.depth - 1) + _short(node.task),
            *(node.policy, node.status, str(node.tokens), f"{node.reward:.2f}"),
            *(f"{node.seconds:.2f}", _short(node.message or node.reason)),
        ]
        for node in tree[:MOST_ROWS]
    ]
    if len(tree) > MOST_ROWS:
        rows.append([f"... and {len(tree) - MOST_ROWS} more", *[""] * 6])
    columns = ["task", "policy", "end", "tokens", "reward", "seconds", "message"]
    if not any(row[1] for row in rows):
        columns, rows = columns[:1] + columns[2:], [row[:1] + row[2:] for row in rows]
    return page.Table(key=f"agents-tree-{name}", columns=columns, rows=rows, title=title, say=say)


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 3]}..."
