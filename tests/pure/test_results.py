"""Results in a notebook: one-line repr, an escaped table, a data frame."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support import surfaces

from sparrow.schema.base import from_dict
from sparrow.schema.bench import Machine, TrainBenchmark, TrainRow
from sparrow.schema.evaluation import Estimate, Evaluation, EvaluationCell, PassAt
from sparrow.schema.run_folder import TrainResult
from sparrow.schema.sampling import Completion, Completions
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface

SURFACE = from_dict(Surface, Surface.upgrade(surfaces.surface()))
HOSTILE = "<script>alert(1)</script>\x1b[2J"


def cell(mean: float) -> EvaluationCell:
    return EvaluationCell(
        source=HOSTILE,
        length=100,
        rows=4,
        samples=2,
        mean=Estimate(value=mean, low=0.1, high=0.9),
        passes=(PassAt(k=2, estimate=Estimate(value=0.75, low=None, high=None)),),
        tokens=10.0,
        median=9.0,
        entropy=None,
        cut_off=0.0,
        reasons=(),
        skipped=(),
    )


def evaluation(cells: int = 2) -> Evaluation:
    return Evaluation(
        model="tiny",
        attention="dense",
        temperature=1.0,
        samples=2,
        seed=0,
        left_out=(),
        cells=tuple(cell(0.5) for _ in range(cells)),
    )


def completion(text: str) -> Completion:
    arrays = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0], "weight_versions": [0, 0]}
    about = {"finish_reason": "stop", "attention": "dense", "text": text}
    return Completion(prompt_ids=[1], **arrays, **about)


def test_repr_is_one_short_line() -> None:
    for result in (evaluation(), SURFACE, Schedule.fixed(96), completion("a\nb" * 100)):
        assert repr(result).startswith(type(result).__name__)
        assert repr(result).isprintable()
        assert len(repr(result)) < 300
    assert str(evaluation()) == repr(evaluation())


def test_html_is_escaped_and_cut() -> None:
    html = evaluation(200)._repr_html_()
    assert "<script>" not in html
    assert "\x1b" not in html
    assert html.count("<tr>") == 51
    assert "200" in html


def test_rows_become_a_data_frame() -> None:
    frame = evaluation().to_pandas()
    assert frame["mean"].tolist() == [0.5, 0.5]
    assert frame["mean_low"].tolist() == [0.1, 0.1]
    assert frame["pass@2"].tolist() == [0.75, 0.75]
    assert len(SURFACE.to_pandas()) == len(SURFACE.cells)
    assert Schedule.fixed(96).to_pandas().budget.tolist() == [96]


def test_completions_are_a_list_and_print_their_text() -> None:
    completions = Completions([completion("first"), completion("second")])
    assert completions.to_pandas().text.tolist() == ["first", "second"]
    assert str(completions) == "first\n\nsecond"
    assert completions[0].text == "first"
    assert "second" in completions._repr_html_()


def test_a_benchmark_of_another_field() -> None:
    row = {"sequences": 1, "length": 2, "recompute": False, "seconds": (1.0,)}
    row |= {"tokens_per_second": 1.0, "teraflops": 1.0, "utilisation": None}
    benchmark = TrainBenchmark(
        machine=Machine(device="cpu", cpus=2, torch="2"),
        model="tiny",
        changes={},
        cases=(TrainRow(**row, memory_gib=None, predicted_gib=1.0),),
    )
    assert benchmark.to_pandas().length.tolist() == [2]


def test_a_training_run(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "critic/score/mean": {step / 4}}}\n' for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "validation.jsonl").write_text('{"step": 0, "val-core/graph/mean@1": 0.5}\n')
    result = TrainResult.read(tmp_path)
    assert result.model == tmp_path / "model"
    assert result.to_pandas()["critic/score/mean"].tolist() == [0, 0.25, 0.5]
    assert result.to_pandas("validation")["val-core/graph/mean@1"].tolist() == [0.5]
    assert "0.500" in repr(result)
    assert np.isclose(result.metrics[-1].values["critic/score/mean"] or 0, 0.5)


def test_without_pandas_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="install pandas"):
        evaluation().to_pandas()
