"""A flow with any kind of mistake is refused with its line and with words that help.

Every case is a file as an author would write it. The message must begin with the file and the line
that `at` is found on, and hold the decisive words.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.formats import D, bf16
from sparrow.sparse.flows.tensor import FlowError

FILE = """\
import math
import numpy as np
import torch
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.formats import *
from sparrow.sparse.flows.functions import *

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


def run(folder: Path, parts: dict[str, str]) -> dict[str, Any]:
    path = folder / "mine.py"
    path.write_text(FILE.format(**{**RIGHT, **parts}))
    return runpy.run_path(str(path))


def refused(folder: Path, parts: dict[str, str], at: str, words: str) -> None:
    with pytest.raises(FlowError) as caught:
        run(folder, parts)
    message, path = str(caught.value), folder / "mine.py"
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if at in text)
    assert message.startswith(f"{path}:{line}: `"), message
    assert at in message.split("`")[1], message
    assert re.search(words, message), message


def test_without_a_mistake_it_is_a_flow(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path, {})["flow"], Flow)


FIELDS = {
    "not declared": (
        {"summarise": "return {'mean': keys.mean(0), 'meen': keys.max(0)}"},
        SUMMARISED,
        r"returns 'meen', which is no declared field, did you mean 'mean'\?",
    ),
    "not declared, unlike any": (
        {"summarise": "return {'mean': keys.mean(0), 'top': keys.max(0)}"},
        SUMMARISED,
        r"'top', which is no declared field; declare it",
    ),
    "not written": (
        {"fields": "{'mean': bf16(D), 'top': bf16(D)}"},
        SUMMARISED,
        "field 'top' is declared, but summarise does not return it",
    ),
    "of a wrong shape": (
        {"summarise": "return {'mean': keys.mean(1)}"},
        "keys.mean(1)",
        r"field 'mean' is declared with shape \(128,\), got \(16,\)",
    ),
    "a number": (
        {"summarise": "return {'mean': 1.0}"},
        SUMMARISED,
        "field 'mean' is a tensor, got a float",
    ),
    "a condition": (
        {"summarise": "return {'mean': keys.mean(0) > 0}"},
        "keys.mean(0) > 0",
        r"field 'mean' is a condition: where\(condition, 1, 0\)",
    ),
    "no dictionary": (
        {"summarise": "return keys.mean(0)"},
        SUMMARISED,
        r"summarise returns \{field: tensor\}, got a Tensor",
    ),
    "nothing returned": ({"summarise": "keys.mean(0)"}, SUMMARISED, "got None"),
    "not read": (
        {"score": "return position.page"},
        SCORED,
        "score never reads 'mean': it would take memory for nothing",
    ),
    "not known": (
        {"score": "return query.mean(0) @ fields.meen"},
        "fields.meen",
        r"there is no field 'meen', did you mean 'mean'\? \(declared: mean\)",
    ),
    "not known as an item": (
        {"score": "return query.mean(0) @ fields['top']"},
        "fields['top']",
        r"there is no field 'top' \(declared: mean\)",
    ),
    "no summarise": ({"summary_name": "None"}, MADE, r"nothing writes its fields \(mean\); give"),
    "no score": ({"score_name": "None"}, MADE, "has fields or state, but no score that reads them"),
    "called k": ({"fields": "{'k': bf16(D)}"}, MADE, "a field called 'k', .*keys and values"),
    "called 1st": ({"fields": "{'1st': bf16(D)}"}, MADE, "a field called '1st', .*a letter"),
    "called _values": ({"fields": "{'_values': bf16(D)}"}, MADE, "'_values', .*a letter"),
    "no format": (
        {"fields": "{'mean': 'bf16'}"},
        MADE,
        r"field 'mean': got 'bf16', allowed: a format such as bf16\(D\)",
    ),
    "a format that was not called": ({"fields": "{'mean': bf16}"}, MADE, r"such as bf16\(D\)"),
    "pairs of an odd axis": (
        {"fields": "{'mean': int4(D, 15)}"},
        MADE,
        r"field 'mean': int4 keeps pairs, but its last axis is odd in \(128, 15\)",
    ),
    "a third of a page": (
        {"fields": "{'mean': bf16(P // 3, D)}"},
        MADE,
        "field 'mean': P // 3 is not whole where P is 16",
    ),
    "a half": ({"fields": "{'mean': bf16(P // 2.5)}"}, "P // 2.5", "P // 2.5: .*whole numbers"),
    "an empty shape": ({"fields": "{'mean': bf16(0)}"}, "bf16(0)", "0 is no size; .*D and P"),
    "a shape of text": ({"fields": "{'mean': bf16('D')}"}, "bf16('D')", "'D' is no size"),
    "no vector to scale": ({"fields": "{'mean': int4()}"}, "int4()", "needs at least one axis"),
}
SCORES = {
    "one per head": (
        {"score": "return query @ fields.mean"},
        "query @ fields.mean",
        r"score is one number per page, got shape \(2,\) for each: reduce it",
    ),
    "the same for every page": (
        {"score": "fields.mean; return query.mean()"},
        "query.mean()",
        r"score is the same for every page: use a field \(fields.name\) or position.page",
    ),
    "the length alone": ({"score": "fields.mean; return position.length"}, SCORED, "every page"),
    "nothing": (
        {"score": "query.mean(0) @ fields.mean"},
        SCORED,
        r"score is one number per page, got None; does it end with return\?",
    ),
    "a float": ({"score": "fields.mean; return 1.0"}, SCORED, "per page, got a float"),
    "a tuple": (
        {"score": "return fields.mean.sum(), {}"},
        SCORED,
        r"got a tuple; a tuple \(score, \{state: new value\}\) needs state= in the flow",
    ),
    "a condition": (
        {"score": "return fields.mean.sum() > 0"},
        "fields.mean.sum() > 0",
        r"score is a condition: .*where\(condition, a, b\)",
    ),
    "too few arguments": (
        {"score": "return fields.mean.sum()", "score_name": "lambda query: 1"},
        "lambda query",
        "TypeError: .*positional argument",
    ),
    "keys": (
        {
            "summarise": "global kept; kept = keys; return {'mean': keys.mean(0)}",
            "score": "return fields.mean.sum() + kept.sum()",
        },
        MADE,
        "score uses the keys of another call: fields carry what it needs",
    ),
}
OPERATIONS = {
    "a condition as a number": ("(fields.mean > 0) * 1.0", r"\* of a condition: .*where\("),
    "a condition reduced": ("(fields.mean > 0).sum()", r"sum of a condition: .*where\("),
    "conditions joined": (
        "(fields.mean > 0) & (fields.mean < 1)",
        r"nest where\(condition, a, b\)",
    ),
    "a number as a condition": ("where(fields.mean, 1, 0)", "where takes a condition first, such"),
    "equality": ("where(position.page == 0, 1.0, 0.0)", "no == and !=: compare with <, <=, >"),
    "a power": ("fields.mean ** 2", r"no \*\*: write x \* x"),
    "if": (
        "1.0 if fields.mean.sum() > 0 else 0.0",
        r"instead of if.* use where\(condition, a, b\)",
    ),
    "max of python": ("max(fields.mean[0], fields.mean[1])", r"maximum\(a, b\)"),
    "sum of python": ("sum(fields.mean)", r"not iterated: index one \(x\[0\]\) or reduce an axis"),
    "iteration": ("[x for x in fields.mean][0]", "not iterated"),
    "float": ("float(fields.mean.sum())", "no number while a flow is traced"),
    "math": ("math.exp(fields.mean.sum())", r"x\.exp\(\) instead of math\.exp\(x\)"),
    "torch": (
        "torch.exp(fields.mean)",
        r"torch\.exp does not know a flow's tensors: use x\.exp\(\)",
    ),
    "torch's own": ("torch.topk(fields.mean, 3)", r"torch\.topk does not .*\.flows,"),
    "numpy": ("np.exp(fields.mean)", r"numpy\.exp does not know a flow's tensors: use x\.exp\(\)"),
    "an array": ("fields.mean * np.ones(128)", r"got a numpy\.ndarray: .*constant\(array\)"),
    "an array first": ("np.ones(128) * fields.mean", r"got a numpy\.ndarray: .*constant\(array\)"),
    "a product with an array": ("fields.mean @ np.ones(128)", r"ndarray; wrap arrays in constant"),
    "a product of an array": ("np.ones(128) @ fields.mean", r"numpy\.matmul .*constant\(array\)"),
    "a torch tensor": (
        "fields.mean * torch.ones(128)",
        r"got a torch\.Tensor: .*constant\(array\)",
    ),
    "text": ("fields.mean * 'a'", r"got a builtins\.str"),
    "sizes of a product": (
        "query @ query",
        r"@: inner sizes of \(2, 128\) and \(2, 128\) differ; transpose the second with \.T",
    ),
    "sizes without a remedy": ("fields.mean @ query", r"@: inner sizes of \(128,\) and \(2, 128\)"),
    "a product of numbers": ("fields.mean.sum() @ fields.mean", r"@ takes vectors and matrices"),
    "shapes": (
        "query.T * fields.mean",
        r"\*: shapes \(128, 2\) and \(128,\) do not fit each other \(axes are aligned at",
    ),
    "an axis": (
        "fields.mean.sum(1)",
        r"axis 1 of a tensor of shape \(128,\), allowed: 0 to 0; pages are no axis: use sum_over",
    ),
    "an axis of a number": (
        "position.page.sum(0)",
        r"shape \(\), it has no axis; pages are no axis",
    ),
    "a method": ("fields.mean.summ()", r"no \.summ; did you mean \.sum\?"),
    "a method of torch": ("fields.mean.unsqueeze(0)", r"no \.unsqueeze; there are: .*reshape"),
    "where it stands": (
        "position.lenght + fields.mean.sum()",
        r"position has \.length, \.pages and",
    ),
    "over pages of the query": (
        "softmax_over_pages(query.sum()) + fields.mean.sum()",
        r"max_over_pages: this is no value of every page.*Fields, state and position\.page are",
    ),
    "among": (
        "sum_over_pages(fields.mean, among='all')",
        """among='all', allowed: "finished", "fr""",
    ),
    "even kernel": ("convolve_over_pages(fields.mean, [1, 2])", "an odd number of weights, got 2"),
    "transposed vector": ("fields.mean.T", r"\.T wants two inner axes, got shape \(128,\)"),
    "reshape": ("fields.mean.reshape(3, 5)", r"\(128,\) has 128 numbers, \(3, 5\) has 15"),
    "a guessed size": ("fields.mean.reshape(-1, 4)", r"whole numbers above 0, got \(-1, 4\)"),
    "an index": ("fields.mean[128]", "index 128 is outside an axis of 128"),
    "two indices": (
        "query[0, 1]",
        r"takes one number or range of the first axis, shape is \(2, 128\)",
    ),
    "an empty range": ("fields.mean[5:5]", r"take: indices \[\] of an axis of 128"),
    "an entry that is not there": ("take(fields.mean, [0, 128])", "indices .* of an axis of 128"),
    "kron of a matrix": ("kron(query, fields.mean)", r"two vectors, got shapes \(2, 128\) and"),
    "a constant of text": ("fields.mean @ constant(['a'])", "constants are arrays of numbers"),
    "an infinite constant": ("fields.mean * constant([np.inf])", "constants are finite numbers"),
    "weights without heads": ("fields.mean * weights([1.0])", r"\[layers, KV heads, \.\.\.\], got"),
    "its own": ("fields.mean.sum() / (1 // 0)", "ZeroDivisionError: "),
    "its own name": ("fields.mean.sum() / temperature", "NameError: name 'temperature'"),
}
STATES = {
    "not returned": (
        "return fields.r + fields.mean.sum()",
        SCORED,
        r"the flow has state: score returns \(score, \{'r': new value\}\), got a Tensor",
    ),
    "forgotten": (
        "return fields.r + fields.mean.sum(), {}",
        SCORED,
        "state 'r' is declared, but score does not return it",
    ),
    "not declared": (
        "return fields.r + fields.mean.sum(), {'r': fields.r, 'R': fields.r}",
        SCORED,
        r"score returns 'R', which is no declared state; declare",
    ),
    "misspelt": (
        "return fields.r + fields.mean.sum(), {'r': fields.r, 'r_': fields.r}",
        SCORED,
        r"score returns 'r_', which is no declared state, did you mean 'r'\?",
    ),
    "of a shape": (
        "return fields.r + fields.mean.sum(), {'r': fields.r * fields.mean}",
        "fields.r * fields.mean",
        r"state 'r' is one number per page, got shape \(128,\)",
    ),
    "a number": (
        "return fields.r + fields.mean.sum(), {'r': 1.0}",
        SCORED,
        "state 'r' is one number per page, got a float",
    ),
    "not read": ("return fields.mean.sum(), {'r': fields.mean.sum()}", SCORED, "never reads 'r'"),
}
FLOWS = {
    "no share": ("mass=1.5,", "mass 1.5, allowed: above 0, at most 1"),
    "mass of nothing": ("mass=0,", "mass 0, allowed: above 0"),
    "mass of text": ("mass='0.9',", "mass '0.9', allowed: above 0"),
    "a state called as a field": ("state={'mean': 0.0},", "a state called 'mean', .*no field has"),
    "a state called v": ("state={'v': 0.0},", "a state called 'v', .*keys and values"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(tmp_path: Path, name: str) -> None:
    refused(tmp_path, *FIELDS[name])


@pytest.mark.parametrize("name", SCORES)
def test_scores(tmp_path: Path, name: str) -> None:
    refused(tmp_path, *SCORES[name])


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(tmp_path: Path, name: str) -> None:
    expression, words = OPERATIONS[name]
    refused(tmp_path, {"score": f"return {expression}"}, expression, words)


@pytest.mark.parametrize("name", STATES)
def test_states(tmp_path: Path, name: str) -> None:
    score, at, words = STATES[name]
    refused(tmp_path, {"score": score, "more": STATE}, at, words)


@pytest.mark.parametrize("name", FLOWS)
def test_flows(tmp_path: Path, name: str) -> None:
    more, words = FLOWS[name]
    refused(tmp_path, {"more": more}, MADE, words)


def test_pages_in_a_summary(tmp_path: Path) -> None:
    line = "return {'mean': keys.mean(0) / sum_over_pages(keys.mean(0))}"
    words = "sum_over_pages: this is no value of every page.*in score; query, keys and values are"
    refused(tmp_path, {"summarise": line}, line, words)


def test_a_flow_without_a_name() -> None:
    with pytest.raises(FlowError, match=rf"^{re.escape(__file__)}:\d+: .*Flow.name: got '', allow"):
        Flow(name="", score=None)


def test_the_line_is_the_innermost_of_the_authors() -> None:
    """A helper of the author's is where the mistake is; ours, and torch's, are not."""

    def helper(x: Any) -> Any:
        return x.summ()

    def score(query: Any, fields: Any, position: Any) -> Any:
        return helper(fields.mean)

    line = helper.__code__.co_firstlineno + 1
    with pytest.raises(FlowError, match=rf"^{re.escape(__file__)}:{line}: `return x.summ\(\)`"):
        Flow(name="x", fields={"mean": bf16(D)}, summarise=_mean, score=score)


def test_other_sizes_are_told_with_the_line_that_made_the_flow() -> None:
    """It fits the pages that it was made with, but not those of 18 tokens."""
    made = Flow(name="x", fields={"mean": bf16(D)}, summarise=_fours, score=_score)
    line = _fours.__code__.co_firstlineno + 1
    with pytest.raises(FlowError, match=rf":{line}: .*\(18, 128\) has 2304 numbers, \(4, 4, 128\)"):
        trace(made, 18, 128, 2)


def test_a_flow_of_one_kind_of_model_says_so() -> None:
    """Constants of the sizes of a model: the flow is made for these."""

    def score(query: Any, fields: Any, position: Any) -> Any:
        return (query[3] + query[0]) @ fields.mean

    settings = {"name": "x", "fields": {"mean": bf16(D)}, "summarise": _mean, "score": score}
    with pytest.raises(FlowError, match="index 3 is outside an axis of 2"):
        Flow(**settings)
    made = Flow(**settings, probe=(16, 64, 4))
    assert trace(made, 16, 64, None).score is None  # what is kept does not depend on the group
    assert trace(made, 16, 64, None).fields == trace(made, 16, 64, 4).fields


def _mean(keys: Any, values: Any) -> Any:
    return {"mean": keys.mean(0)}


def _fours(keys: Any, values: Any) -> Any:
    return {"mean": keys.reshape(keys.shape[0] // 4, 4, keys.shape[1]).mean(1).mean(0)}


def _score(query: Any, fields: Any, position: Any) -> Any:
    return query.mean(0) @ fields.mean
