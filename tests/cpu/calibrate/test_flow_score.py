"""Scores of flows: acceptance, comparisons paired by text, resuming, and the leaderboard."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.engines import prompt, tiny
from support.replays import replay

from sparrow.calibration.flows import score as flow_score
from sparrow.calibration.flows.texts import Text
from sparrow.calibration.replay import read
from sparrow.calibration.store import Store
from sparrow.calibration.tables import flow_score_table
from sparrow.schema.flow import Configuration, FlowScore, FlowScores
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean, dense, fine_means, oracle, quest

ALL_SPARSE = Configuration(dense_layers=())


def sample(name: str, ids: list[int]) -> flow_score.TokenizedText:
    return flow_score.TokenizedText(name=name, kind="noise", sha256=name, note="", ids=tuple(ids))


TEXTS = [sample(f"t{n}", prompt(200, n)) for n in range(3)]


def run(model, folder: Path, flows=(quest,), budgets=(64,), texts=TEXTS, **settings) -> FlowScores:
    given = {"configuration": ALL_SPARSE, "store": Store(folder / flow_score.CELLS), **settings}
    return flow_score.score(model, texts, list(flows), list(budgets), **given)


def row_of(result: FlowScores, flow: Flow, budget: int = 64, **changes) -> FlowScore:
    wanted = {"flow": flow.name, "budget": budget, **changes}
    (row,) = [r for r in result.rows if all(getattr(r, key) == wanted[key] for key in wanted)]
    return row


def test_p05_is_that_of_a_replay_over_all_positions(model, tmp_path: Path) -> None:
    row = row_of(run(model, tmp_path), quest)
    schedule = Schedule.fixed(64, flow=quest.name, dense_layers=())
    wanted = [
        np.quantile(replay(model, t.ids[:1], t.ids[1:], schedule, quest).alpha, 0.05) for t in TEXTS
    ]
    np.testing.assert_allclose(row.p05_by_text, wanted, rtol=1e-6)
    assert row.p05 == pytest.approx(np.mean(wanted))
    assert row.submitted


def test_gains_are_paired_differences_to_the_block_mean(model, tmp_path: Path) -> None:
    result = run(model, tmp_path, [quest, block_mean], against=[oracle, dense])
    base, own = row_of(result, block_mean), row_of(result, quest)
    assert (base.submitted, base.gain, base.gain_low, base.gain_high) == (True, 0, 0, 0)
    apart = np.array(own.p05_by_text) - np.array(base.p05_by_text)
    assert own.gain == pytest.approx(apart.mean())
    assert own.gain_low < own.gain < own.gain_high
    assert flow_score.interval("x", np.array([2.0])) == {"x": 2.0, "x_low": None, "x_high": None}
    assert row_of(result, dense).p05 > 1 - 1e-5
    assert row_of(result, dense).recall is None
    best = row_of(result, oracle)
    assert best.p05 > base.p05
    assert best.recall > base.recall
    assert (set(best.layers), best.submitted) == ({"0", "1", "2"}, False)


def test_an_interrupted_run_goes_on(model, tmp_path: Path, monkeypatch) -> None:
    whole = run(model, tmp_path / "whole", [quest], (64, 96))
    inner, count, reads = flow_score.acceptances, [0], []

    def dies(*given):
        count[0] += 1
        if count[0] == 6:
            raise KeyboardInterrupt
        return inner(*given)

    monkeypatch.setattr(flow_score, "acceptances", dies)
    monkeypatch.setattr(flow_score, "read", lambda *given: reads.append(1) or read(*given))
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "cut", [quest], (64, 96))
    file = tmp_path / "cut" / "cells.jsonl"
    assert len(file.read_text().splitlines()) == 5
    with file.open("a") as out:
        out.write('{"key": {"half a li')
    reads.clear()
    result = run(model, tmp_path / "cut", [quest], (64, 96))
    assert (count[0], len(reads)) == (6 + 12 - 5, 2)  # the dense pass once a text
    assert plain(result) == plain(whole)
    run(model, tmp_path / "cut", [quest], (64, 96))
    assert count[0] == 6 + 12 - 5


def plain(result: FlowScores) -> FlowScores:
    """Without how long it took."""
    return result.replace(rows=tuple(row.replace(seconds=0.0) for row in result.rows))


def test_other_contents_are_measured_anew(model, tmp_path: Path, monkeypatch) -> None:
    made = []
    inner, one = flow_score.acceptances, TEXTS[:1]
    monkeypatch.setattr(flow_score, "acceptances", lambda *g: made.append(1) or inner(*g))

    def fresh(**settings) -> int:
        made.clear()
        run(settings.pop("model", model), tmp_path, texts=settings.pop("texts", one), **settings)
        return len(made)

    assert fresh() == 2
    assert fresh() == 0
    assert fresh(texts=TEXTS[1:2]) == 2
    assert fresh(configuration=flow_score.REFERENCE) == 2
    assert fresh(budgets=(64, 80)) == 2
    assert fresh(flows=[fine_means(4)]) == 1
    renamed = Flow(name="other", fields=quest.fields, summarise=quest.summarise, score=quest.score)
    assert fresh(flows=[renamed]) == 0  # what it is called does not matter
    assert fresh(model=tiny(seed=4)) == 2


def test_the_leaderboard_tells_formula_from_configuration(model, tmp_path: Path) -> None:
    result = run(model, tmp_path, [quest], (64, 96), reference=True)
    file = tmp_path / "boards" / "board.jsonl"
    assert (
        flow_score.append_leaderboard(file, result)
        == flow_score.append_leaderboard(file, result)
        == 2
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 4
    line = next(line for line in lines if line["configuration"]["budget"] == 64)
    here = row_of(result, block_mean, dense_layers=())
    reference = row_of(result, block_mean, dense_layers=(0, 1))
    assert (line["formula"]["flow"], line["formula"]["of_mean"]) == ("quest", 2)
    own = line["p05"]["mean"]
    assert line["gained_by_formula"]["mean"] == pytest.approx(own - here.p05)
    assert line["gained_by_configuration"]["mean"] == pytest.approx(here.p05 - reference.p05)
    assert line["gained_by_configuration"]["low"] <= line["gained_by_configuration"]["high"]
    assert line["texts"] == {text.name: text.sha256 for text in TEXTS}
    assert len(flow_score_table(result).rows) == 4  # two budgets, in this configuration alone
    # In the reference configuration it gains nothing.
    same = run(model, tmp_path, configuration=flow_score.REFERENCE, reference=True)
    assert len(same.rows) == 2
    assert [line["gained_by_configuration"]["mean"] for line in same.leaderboard("now")] == [0]


def test_what_cannot_be_measured_is_refused(model, tmp_path: Path) -> None:
    for settings, told in (
        ({"budgets": (200,)}, "200"),
        ({"budgets": (32,)}, "48"),
        ({"configuration": Configuration(dense_layers=(7,))}, "layers"),
        ({"texts": [sample("t", [1] * 5000)]}, "4096"),
    ):
        with pytest.raises(ValueError, match=told):
            run(model, tmp_path, **settings)


def test_texts_are_cut_to_equal_tokens() -> None:
    texts = [Text(name="a", kind="x", text="abcdef"), Text(name="b", kind="x", text="ghij")]

    def tokenizer(text: str, **_) -> dict:
        return {"input_ids": [ord(letter) for letter in text]}

    first, second = flow_score.samples(tokenizer, texts, 4)
    assert (len(first.ids), len(second.ids)) == (4, 4)
    assert first.sha256 != second.sha256
    assert first.sha256 == flow_score.samples(tokenizer, [texts[0]._replace(name="b")], 4)[0].sha256
    with pytest.raises(ValueError, match="'b'"):
        flow_score.samples(tokenizer, texts, 5)
