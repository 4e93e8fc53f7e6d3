"""A flow with any kind of mistake is refused with its line and with words that help.

Every case is a file as an author would write it. The message must begin with the file and the line
that `at` is found on, and hold the decisive words.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.flows import mean_flow

from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.formats import D, bf16
from sparrow.sparse.flows.tensor import FlowError

FILE = """\
import math
import numpy as np
import torch
from sparrow.sparse.flows import *

def summarise(keys, values):
    {summarise}

def score(query, fields, position):
    {score}

flow = Flow(
    name="mine",
    fields={fields},
    summarise={summary_name},
    score={score_name},
    {more}
)
"""
RIGHT = {
    "summarise": "return {'mean': keys.mean(0)}",
    "score": "return query.mean(0) @ fields.mean",
    "fields": "{'mean': bf16(D)}",
    "more": "",
    "summary_name": "summarise",
    "score_name": "score",
}
STATE = "state={'r': 0.0},"
MADE, SCORED, SUMMARISED = "flow = Flow(", "def score(", "def summarise("


def run(path: Path, parts: dict[str, str]) -> dict[str, Any]:
    path.write_text(FILE.format(**{**RIGHT, **parts}))
    return runpy.run_path(str(path))


def refused(folder: Path, parts: dict[str, str], at: str, words: str) -> None:
    path = folder / f"mine{len(list(folder.iterdir()))}.py"  # lines are remembered by file
    with pytest.raises(FlowError) as caught:
        run(path, parts)
    message = str(caught.value)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if at in text)
    assert message.startswith(f"{path}:{line}: `"), message
    assert at in message.split("`")[1], message
    assert re.search(words, message), message


Case = tuple[str, str, str]  # what stands in place of a part of the file, the line, a word

SUMMARISE: list[Case] = [
    ("return {'mean': keys.mean(0), 'meen': keys.max(0)}", SUMMARISED, "mean 'mean'"),
    ("return {'mean': keys.mean(0), 'top': keys.max(0)}", SUMMARISED, "'top'"),
    ("return {'mean': keys.mean(1)}", "keys.mean(1)", r"\(16,\)"),
    ("return {'mean': 1.0}", SUMMARISED, "float"),
    ("return {'mean': keys.mean(0) > 0}", "keys.mean(0) > 0", "condition"),
    ("return keys.mean(0)", SUMMARISED, "Tensor"),
    ("keys.mean(0)", SUMMARISED, "None"),
    ("return {'mean': keys.mean(0) / sum_over_pages(keys.mean(0))}", "/ sum_over", "in score"),
]
FIELDS: list[Case] = [
    ("{'mean': bf16(D), 'top': bf16(D)}", SUMMARISED, "'top'"),  # declared, not written
    ("{'k': bf16(D)}", MADE, "keys and values"),
    ("{'1st': bf16(D)}", MADE, "letter"),
    ("{'_values': bf16(D)}", MADE, "letter"),
    ("{'mean': 'bf16'}", MADE, "'bf16'"),
    ("{'mean': bf16}", MADE, r"bf16\(D\)"),  # a format that was not called
    ("{'mean': int4(D, 15)}", MADE, "odd"),
    ("{'mean': bf16(P // 3, D)}", MADE, "P // 3"),
    ("{'mean': bf16(P // 2.5)}", "P // 2.5", "whole"),
    ("{'mean': bf16(0)}", "bf16(0)", "size"),
    ("{'mean': bf16('D')}", "bf16('D')", "size"),
    ("{'mean': int4()}", "int4()", "axis"),  # no vector to scale
]
SCORE: list[Case] = [
    ("return position.page", SCORED, "'mean'"),  # never read
    ("return query.mean(0) @ fields.meen", "fields.meen", "mean 'mean'"),
    ("return query.mean(0) @ fields['top']", "fields['top']", "declared: mean"),
    ("return query @ fields.mean", "query @ fields.mean", r"\(2,\)"),
    ("fields.mean; return query.mean()", "query.mean()", "every page"),
    ("fields.mean; return position.length", SCORED, "every page"),
    ("query.mean(0) @ fields.mean", SCORED, "return"),
    ("fields.mean; return 1.0", SCORED, "float"),
    ("return fields.mean.sum(), {}", SCORED, "state="),
    ("return fields.mean.sum() > 0", "fields.mean.sum() > 0", "where"),
]
OPERATIONS: list[tuple[str, str]] = [  # with a word of the remedy
    ("(fields.mean > 0) * 1.0", "where"),
    ("(fields.mean > 0) & (fields.mean < 1)", "where"),
    ("where(fields.mean, 1, 0)", "where"),
    ("1.0 if fields.mean.sum() > 0 else 0.0", "where"),
    ("where(position.page == 0, 1.0, 0.0)", "<="),
    ("fields.mean ** 2", r"x \* x"),
    ("max(fields.mean[0], fields.mean[1])", "maximum"),
    ("sum(fields.mean)", "iterated"),
    ("[x for x in fields.mean][0]", "iterated"),
    ("float(fields.mean.sum())", r"x\.exp\(\)"),
    ("torch.exp(fields.mean)", r"x\.exp\(\)"),
    ("np.exp(fields.mean)", r"x\.exp\(\)"),
    ("torch.topk(fields.mean, 3)", r"\.flows"),
    ("fields.mean * np.ones(128)", r"constant\("),
    ("np.ones(128) * fields.mean", r"constant\("),
    ("np.ones(128) @ fields.mean", r"constant\("),
    ("fields.mean * torch.ones(128)", r"constant\("),
    ("fields.mean * 'a'", r"constant\("),
    ("query @ query", r"\.T"),
    ("fields.mean.T", r"\.T"),
    ("fields.mean @ query", r"\(128,\) and \(2, 128\)"),
    ("fields.mean.sum() @ fields.mean", "matrices"),
    ("query.T * fields.mean", r"\(128, 2\) and \(128,\)"),
    ("fields.mean.sum(1)", "sum_over_pages"),
    ("position.page.sum(0)", "sum_over_pages"),
    ("fields.mean.summ()", r"\.sum\?"),
    ("fields.mean.unsqueeze(0)", "reshape"),
    ("fields.mean.reshape(3, 5)", "reshape"),
    ("position.lenght + fields.mean.sum()", r"\.pages"),
    ("softmax_over_pages(query.sum()) + fields.mean.sum()", r"position\.page"),
    ("sum_over_pages(fields.mean, among='all')", "finished"),
    ("convolve_over_pages(fields.mean, [1, 2])", "odd"),
    ("fields.mean[128]", "axis of 128"),
    ("fields.mean[5:5]", "axis of 128"),
    ("take(fields.mean, [0, 128])", "axis of 128"),
    ("query[0, 1]", "first axis"),
    ("kron(query, fields.mean)", "vectors"),
    ("union(fields.mean, fields.mean.sum())", "reduce"),
    ("union(query.sum(), fields.mean.sum())", r"position\.page"),
    ("two_stage(fields.mean.sum(), fields.mean.sum(), 17)", "16"),
    ("two_stage(fields.mean.sum(), fields.mean.sum(), True)", "16"),
    ("among_best(fields.mean.sum(), 0.5) * 1.0", "where"),
    ("fields.mean @ constant(['a'])", "numbers"),
    ("fields.mean * constant([np.inf])", "numbers"),
    ("fields.mean * weights([1.0])", "KV heads"),
    ("fields.mean.sum() / (1 // 0)", "ZeroDivisionError"),
    ("fields.mean.sum() / temperature", "'temperature'"),
]
STATES: list[Case] = [
    ("return fields.r + fields.mean.sum()", SCORED, "'r': new value"),
    ("return fields.r + fields.mean.sum(), {}", SCORED, "'r'"),
    ("return fields.r + fields.mean.sum(), {'r': fields.r, 'R': fields.r}", SCORED, "'R'"),
    ("return fields.r + fields.mean.sum(), {'r': fields.r, 'r_': fields.r}", SCORED, "mean 'r'"),
    (
        "return fields.r + fields.mean.sum(), {'r': fields.r * fields.mean}",
        "fields.r * fields.mean",
        r"\(128,\)",
    ),
    ("return fields.r + fields.mean.sum(), {'r': 1.0}", SCORED, "float"),
    ("return fields.mean.sum(), {'r': fields.mean.sum()}", SCORED, "'r'"),
]
FLOWS: list[Case] = [
    *((f"mass={mass},", MADE, "mass") for mass in ("1.5", "0", "'0.9'")),
    ("probe=(16, 64),", MADE, "probe"),
    ("state={'mean': 0.0},", MADE, "'mean'"),  # called as a field
    ("state={'v': 0.0},", MADE, "'v'"),
    ("layers=1.5,", MADE, "layers"),
]


CASES: dict[str, list[Case]] = {  # by the part of the file
    "summarise": SUMMARISE,
    "fields": FIELDS,
    "score": SCORE + [(f"return {text}", text, word) for text, word in OPERATIONS],
    "more": FLOWS,
    "summary_name": [("None", MADE, "summarise=")],
    "score_name": [("None", MADE, "no score"), ("lambda query: 1", "lambda query", "TypeError")],
}


def test_mistakes_are_refused_with_their_line(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path / "right.py", {})["flow"], Flow)
    for part, cases in CASES.items():
        for text, at, word in cases:
            refused(tmp_path, {part: text}, at, word)
    for text, at, word in STATES:
        refused(tmp_path, {"score": text, "more": STATE}, at, word)
    kept = "global kept; kept = keys; return {'mean': keys.mean(0)}"
    parts = {"summarise": kept, "score": "return fields.mean.sum() + kept.sum()"}
    refused(tmp_path, parts, MADE, "keys of another call")
    parts = {"score": "return union(fields.mean.sum(), position.page)", "more": "mass=0.5,"}
    refused(tmp_path, parts, "union(fields.mean.sum(), position.page)", "mass")
    with pytest.raises(FlowError, match=rf"^{re.escape(__file__)}:\d+: .*Flow.name"):
        Flow(name="", score=None)


def test_the_line_is_the_innermost_of_the_authors() -> None:
    """A helper of the author's is where the mistake is; ours, and torch's, are not."""

    def helper(x: Any) -> Any:
        return x.summ()

    line = helper.__code__.co_firstlineno + 1
    with pytest.raises(FlowError, match=rf"^{re.escape(__file__)}:{line}: `return x.summ\(\)`"):
        mean_flow("x", lambda query, fields, position: helper(fields.mean))


def test_a_flow_may_fit_some_sizes_only() -> None:
    """Of pages or of a kind of model: the flow is made for these, and others are told the line."""

    def fours(keys: Any, values: Any) -> Any:
        return {"mean": keys.reshape(keys.shape[0] // 4, 4, keys.shape[1]).mean(1).mean(0)}

    made = Flow(name="x", fields={"mean": bf16(D)}, summarise=fours, score=library.block_mean.score)
    line = fours.__code__.co_firstlineno + 1
    with pytest.raises(FlowError, match=rf":{line}: .*\(18, 128\)"):
        trace(made, 18, 128, 2)

    def score(query: Any, fields: Any, position: Any) -> Any:
        return (query[3] + query[0]) @ fields.mean

    with pytest.raises(FlowError, match="index 3"):
        mean_flow("x", score)
    made = mean_flow("x", score, probe=(16, 64, 4))
    assert trace(made, 16, 64, None).score is None  # what is kept does not depend on the group
    assert trace(made, 16, 64, None).fields == trace(made, 16, 64, 4).fields
