"""Results of `sparrow flow check` and `score` for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

Row = dict[str, Any]


def checked(result: Mapping[str, Any]) -> list[Table | str]:
    """A program, and how its test went."""
    return [_fields(result), _lines(result), *([_tests(result)] if result["tests"] else [])]


def _fields(result: Mapping[str, Any]) -> Table:
    sizes = f"page {result['page']}, head size {result['head_size']}, group {result['group']}"
    name = f"{result['flow']} ({result['digest']})"
    out = Table("field", "kept as", "shape", title=f"{name}: {sizes}")
    for heading in ("bytes a page", "of one 16-bit mean", "of K and V"):
        out.add_column(heading, justify="right")
    per_byte = {key: result[key] / max(1, result["bytes"]) for key in ("of_mean", "of_kv")}
    for field in result["fields"]:
        shape = " x ".join(map(str, field["shape"])) or "one number"
        shares = (field["bytes"] * share for share in per_byte.values())
        out.add_row(field["name"], field["kind"], shape, *_bytes(field["bytes"], *shares))
    whole = _bytes(result["bytes"], result["of_mean"], result["of_kv"])
    out.add_section()
    out.add_row("all", "", "", *whole)
    return out


def _bytes(count: int, of_mean: float, of_kv: float) -> tuple[str, str, str]:
    return str(count), f"{of_mean:.2f}x", f"{of_kv:.2%}"


def _lines(result: Mapping[str, Any]) -> str:
    state = ", ".join(f"{name} (starts at {at:g})" for name, at in result["state"].items())
    over = ", ".join(f"{op} x {count}" for op, count in result["over_pages"].items())
    lines = [
        f"state of a request: {state or 'none'}",
        f"operations of the score: {result['operations']}, over pages: {over or 'none'}",
    ]
    if result["mass"] is not None:
        lines.append(f"keeps the best pages up to a mass of {result['mass']:g}")
    compiled = "; ".join(f"{key}: {value}" for key, value in result["kernels"].items())
    lines.append(f"kernels generated for a GPU (compiled when they run) - {compiled}")
    if not result["tests"]:
        lines.append("it has no score and keeps every page: nothing to compare")
    if result.get("unordered"):
        lines.append(f"{result['unordered']} scores on random pages are no numbers: kept last")
    return "\n".join(lines)


def _tests(result: Mapping[str, Any]) -> Table:
    """A row for each sequence, a column for each comparison, the first difference at the end."""
    verdict = ("same pages", "") if result["passed"] else ("other pages", "bold red")
    title = Text.assemble(f"On random pages ({result['device']}): ", verdict)
    out = Table("sequence", title=title)
    kinds = list(dict.fromkeys(test["compared"] for test in result["tests"]))
    for heading in ("choices", *kinds):
        out.add_column(heading, justify="right")
    for name in dict.fromkeys(test["sequence"] for test in result["tests"]):
        tests = [test for test in result["tests"] if test["sequence"] == name]
        out.add_row(name, str(tests[0]["choices"]), *map(_verdict, tests))
    wrong = [test for test in result["tests"] if test["first"]]
    if wrong:
        out.caption = f"{wrong[0]['sequence']}, {wrong[0]['first']}"
    return out


def _verdict(test: Row) -> str:
    parts = [f"{test['different']} differ"] if test["different"] else []
    parts += [f"{test['near_ties']} near ties"] if test["near_ties"] else []
    return ", ".join(parts) or "same"


# Scores.


def scored(result: Mapping[str, Any]) -> Table:
    """The result for a terminal, by budget; the best flow first."""
    texts, tokens = len(result["texts"]), result["tokens"]
    where = f"{result['model']} ({result['dtype']}), {texts} texts of {tokens} tokens"
    own = result["configuration"]
    out = Table("flow", title=f"Flows on {where}")
    headings = ("page", "bytes", "budget", "p05", "above block-mean", "recall", "mass", "error")
    for heading in headings:
        out.add_column(heading, justify="right")
    shown = [row for row in result["rows"] if all(row[key] == own[key] for key in own)]
    for budget in sorted({row["budget"] for row in shown}):
        rows = [row for row in shown if row["budget"] == budget]
        for row in sorted(rows, key=lambda row: -row["p05"]):
            out.add_row(*_cells_of(row))
        out.add_section()
    dense = ", ".join(map(str, own["dense_layers"])) or "none"
    out.caption = (
        f"first {own['first']} and last {own['last']} pages kept, dense layers: {dense}; bytes of "
        "landmarks against one 16-bit mean; recall, mass, error on the dense stream"
    )
    return out


def _cells_of(row: Row) -> tuple[str | Text, ...]:
    name = Text(row["flow"], style="bold" if row["submitted"] else "")
    low, high = row["gain_low"], row["gain_high"]
    gain = f"{row['gain']:+.4f}" + ("" if low is None else f" [{low:+.4f}, {high:+.4f}]")
    others = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("recall", "mass", "error"))
    sizes = (str(row["page"]), f"{row['of_mean']:.2f}x", str(row["budget"]))
    return (name, *sizes, f"{row['p05']:.4f}", gain, *others)
