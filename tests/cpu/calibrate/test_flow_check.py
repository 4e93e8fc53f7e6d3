"""`flow check`: what it says of a program, and that its comparison notices what is wrong."""

import json
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from sparrow import ops
from sparrow.calibration.flows.check import check
from sparrow.calibration.tables import flow_check_tables
from sparrow.schema.base import to_dict
from sparrow.schema.flow import FlowCheck, FlowField
from sparrow.sparse.flows import interpret
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.formats import D, as_keys
from sparrow.sparse.flows.library import dense, fine_means, quest, softmax_sum
from sparrow.sparse.flows.loading import built_in, load_flow
from sparrow.sparse.flows.tensor import softmax_over_pages, weights

SMALL = {"page": 8, "head_size": 16, "group": 3}


def failed(result: FlowCheck) -> set[tuple[str, str]]:
    return {(t.compared, t.sequence) for t in result.tests if not t.passed}


@pytest.mark.parametrize("name", built_in())
def test_every_built_in_flow_passes(name: str) -> None:
    page = {"sub_quest": 16}.get(name, 8)
    result = check(load_flow(name), **{**SMALL, "page": page})
    assert result.passed, failed(result)
    json.dumps(to_dict(result))


def test_what_is_said_of_a_program() -> None:
    result = check(fine_means(4), page=16, head_size=128, group=2)
    (field,) = result.fields
    wanted = FlowField(name="means", kind="int4", shape=(4, 128), bytes=4 * 64 + 4 * 2)
    assert field == wanted
    assert result.of_mean == 264 / 256
    assert result.of_kv == 264 / (2 * 16 * 256)
    assert result.over_pages == {"pages_max": 1, "pages_sum": 1}
    assert {"odd length", "ties", "one page", "one below it"} <= {t.sequence for t in result.tests}
    assert check(dense).tests == ()
    screen = StringIO()
    console = Console(width=80, file=screen)  # every figure is there in a narrow terminal
    console.print(*flow_check_tables(result))
    for figure in ("1.03x", "3.22%", "pages_max 1", "finishes scores"):
        assert figure in screen.getvalue()


def test_wrong_scores_and_fields_while_decoding_are_noticed(monkeypatch) -> None:
    scores, summaries = interpret.score_cache, interpret.summarise

    def reversed_(*given, **named) -> Tensor:
        score = scores(*given, **named)
        return torch.where(score.isfinite(), -score, score)

    def of_other_pages(*given, **named) -> dict[str, Tensor]:
        return {name: block.roll(1, 0) for name, block in summaries(*given, **named).items()}

    for name, wrong in {"score_cache": reversed_, "summarise": of_other_pages}.items():
        with monkeypatch.context() as patch:
            patch.setattr(interpret, name, wrong)
            result = check(quest, **SMALL)
        assert ("decode and one pass", "odd length") in failed(result)
        assert "length" in next(t.first for t in result.tests if t.first)


def test_a_version_that_breaks_ties_otherwise_is_not_held_against_it(monkeypatch) -> None:
    """Either page of equal score is right; only the scores must be."""
    inner = ops.select_pages

    def last_first(score_BGM: Tensor, lengths_B: Tensor, *given, **named) -> ops.PageLists:
        tilt = torch.arange(score_BGM.shape[2]) * 1e-6
        return inner(
            score_BGM + tilt if len(lengths_B) == 9 else score_BGM, lengths_B, *given, **named
        )

    monkeypatch.setattr(ops, "select_pages", last_first)
    result = check(softmax_sum, **SMALL)
    assert result.passed, failed(result)
    ties = [t for t in result.tests if t.sequence == "ties"]
    assert ties[0].near_ties > 0


def by_mean(name: str, score: Any, mass: float | None = None) -> Flow:
    summarise: Any = lambda keys, values: {"mean": keys.mean(0)}  # noqa: E731
    fields = {"mean": as_keys(D)}
    return Flow(name=name, fields=fields, summarise=summarise, score=score, mass=mass)


def test_weights_by_head_mass_and_scores_that_are_no_numbers() -> None:
    own = torch.randn(1, 5, 128).numpy()
    learned = by_mean(
        "learned", lambda q, f, p: softmax_over_pages((q.mean(0) * weights(own)) @ f.mean), 0.6
    )
    result = check(learned, page=8)
    assert result.passed, failed(result)
    assert (result.mass, result.unordered) == (0.6, 0)
    logs = by_mean("logs", lambda q, f, p: (q.mean(0) @ f.mean).log())
    assert check(logs, **SMALL).unordered > 0
