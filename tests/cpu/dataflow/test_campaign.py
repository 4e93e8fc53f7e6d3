"""Campaigns of flows on tiny: the built-in proposer, agents, splits, resume, faults."""

import json
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow.calibration.flows.score import TokenizedText
from sparrow.calibration.flows.texts import SPLITS
from sparrow.dataflow.campaign.splits import apart, texts_of
from sparrow.schema.campaign import (
    BASELINES,
    CAMPAIGN,
    FRONT,
    OBJECTIVES,
    Campaign,
    Candidate,
    FlowLoopConfig,
)

SMALL: Any = {
    "model": "tiny",
    "task": "assignments",
    "length": 200,
    "count": 2,
    "tokens": 150,
    "budget": (64,),
}
GOOD = """
from sparrow.sparse.flows import D, Flow, bf16

def summarise(keys, values):
    return {"mean": keys.mean(0)}

def score(query, fields, position):
    return (query @ fields.mean).max() + position.page * 0.01

flow = Flow(name="agent", fields={"mean": bf16(D)}, summarise=summarise, score=score)
"""
BAD = GOOD.replace("keys.mean(0)", "keys.average(0)")
ALL = 'from sparrow.sparse.flows import Flow\n\nflow = Flow(name="all", score=None)\n'
OTHER = GOOD.replace("0.01", "0.02")
MEDDLES = "import sparrow.calibration.flows.score as s\ns.TAIL = 0.5\n" + GOOD.replace(
    "0.01", "0.03"
)
SLOW_LATER = """
import os, pathlib, time
seen = pathlib.Path(os.environ["SEEN"])
if seen.exists():
    time.sleep(100)
seen.touch()
""" + GOOD.replace("0.01", "10.0")
LATE = "import time\ntime.sleep(60)\n" + GOOD


def candidate(out: Path, number: int) -> Candidate:
    return Candidate.load(out / "candidates" / f"{number:04d}.json")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign of five by the built-in proposer."""
    out = tmp_path_factory.mktemp("campaign") / "out"
    sparrow.flow_loop(out, candidates=5, promote=2, **SMALL)
    return out


@pytest.fixture
def begun(done: Path, tmp_path: Path) -> Path:
    """A campaign that has measured the baselines."""
    out = tmp_path / "out"
    (out / "candidates").mkdir(parents=True)
    for name in (CAMPAIGN, "cells.jsonl", *(f"candidates/{n:04d}.json" for n in range(3))):
        shutil.copy(done / name, out / name)
    return out


def test_a_campaign_is_recorded_and_its_best_are_validated(done: Path) -> None:
    found = Campaign.load(done / CAMPAIGN)
    assert found.tried == 5 == sum(found.statuses.values())
    assert found.published == 0
    own = [candidate(done, number) for number in range(len(BASELINES), len(BASELINES) + 5)]
    assert sum(bool(one.validation) for one in own) == 2
    assert not any(one.held_out for one in own)
    shipped = [candidate(done, number) for number in range(len(BASELINES))]
    assert all(one.validation for one in shipped)
    assert not any(one.held_out for one in shipped)
    scored = [one for one in own if one.status == "scored"]
    best = max(scored, key=lambda one: one.worth("p05"))
    assert best.validation
    assert [score.budget for score in best.search] == [64, None]
    for score in best.search:
        assert {*score.above} == {*BASELINES}
        for name, number in zip(BASELINES, range(3), strict=True):
            other = candidate(done, number).search[0]
            for objective in OBJECTIVES:
                apart = getattr(score, objective).value - getattr(other, objective).value
                assert score.above[name][objective].value == pytest.approx(apart, abs=1e-9)
    assert all(one.search[0].hard_misses.value >= 0 for one in scored)
    assert (done / FRONT).read_text().startswith("<svg")
    worth = [row.search.p05.value for row in found.rows]
    assert worth == sorted(worth, reverse=True)
    assert not [*(done / "candidates").glob("*.proposal")]


def test_the_front_has_what_nothing_beats(done: Path) -> None:
    rows = Campaign.load(done / CAMPAIGN).rows
    for row in rows:
        beaten = any(
            other.search.p05.value >= row.search.p05.value
            and (other.bytes or 0) <= (row.bytes or 0)
            and (other.search.p05.value, other.bytes) != (row.search.p05.value, row.bytes)
            for other in rows
        )
        assert row.front != beaten


def test_a_longer_campaign_goes_on_and_a_repeated_one_is_the_same(
    done: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sparrow.flow_loop(out, candidates=2, promote=1, **SMALL)
    sparrow.flow_loop(out, candidates=5, promote=2, **SMALL)
    for number in range(len(BASELINES), len(BASELINES) + 5):
        one, same = candidate(done, number), candidate(out, number)
        assert (one.genes, one.search, one.program) == (same.genes, same.search, same.program)
    with pytest.raises(ValueError, match="another folder"):
        sparrow.flow_loop(out, **SMALL | {"tokens": 160})


def test_an_entry_is_published_once(done: Path) -> None:
    rows = Campaign.load(done / CAMPAIGN).rows
    own = [row for row in rows if row.number >= len(BASELINES)]
    chosen = next(row.number for row in own if row.validation is not None)
    other = next(row.number for row in own if row.validation is None)
    first = sparrow.flow_publish(done, chosen)
    assert [score.budget for score in first.held_out] == [64, None]
    notes = list[str]()
    assert sparrow.flow_publish(done, chosen, report=notes.append) == first
    assert any("before" in note for note in notes)
    assert Campaign.load(done / CAMPAIGN).published == 1
    assert all(candidate(done, number).held_out for number in range(len(BASELINES)))
    with pytest.raises(ValueError, match="not validated"):
        sparrow.flow_publish(done, other)


def test_an_agent_proposes_by_a_command_and_sees_the_search_texts_alone(
    begun: Path, tmp_path: Path
) -> None:
    """It writes what it got to a file, and proposes by number: good, broken, late, the same."""
    agent, out = tmp_path / "agent.py", begun
    agent.write_text(f"""
import json, pathlib, sys
state = json.load(sys.stdin)
pathlib.Path({str(tmp_path)!r}, f"{{state['number']}}.json").write_text(json.dumps(state))
sources = [{GOOD!r}, {BAD!r}, {LATE!r}, {GOOD!r}, {ALL!r}, {MEDDLES!r}, {OTHER!r}]
source = sources[state["number"] - {len(BASELINES)}]
print(json.dumps({{"source": source, "name": "mine", "parents": [0], "made": "by hand"}}))
""")
    command = f"{sys.executable} {agent}"
    sparrow.flow_loop(out, candidates=7, seconds=30, promote=1, command=command, **SMALL)
    tried = [candidate(out, number) for number in range(3, 10)]
    found = ["scored", "invalid", "late", "duplicate", "invalid", "scored", "scored"]
    assert [one.status for one in tried] == found
    assert "whatever the budget" in tried[4].error
    assert tried[6].worth("p05") < 0.99, "the median of a process that was meddled with"
    assert "0004.py:5" in tried[1].error
    assert "average" in tried[1].error
    assert (tried[0].name, tried[0].parents, tried[0].made) == ("mine", (0,), "by hand")
    assert sum(bool(one.validation) for one in tried) == 1
    seen = json.loads((tmp_path / "6.json").read_text())
    assert [one["status"] for one in seen["candidates"][3:]] == ["scored", "invalid", "late"]
    assert seen["candidates"][3]["source"] == GOOD
    assert not {"validation", "held_out"} & seen["candidates"][0].keys()
    assert seen["language"]["functions"]
    assert "def spread_means" in seen["language"]["library"]
    assert seen["settings"]["sizes"]["head_size"] > 0


def gives_two(state: Any) -> str:
    return OTHER if state["number"] == len(BASELINES) + 2 else GOOD


def test_candidates_of_a_round_are_measured_at_once(done: Path, tmp_path: Path) -> None:
    """They use one file of figures, in which the baselines are; equal ones are measured once."""
    out, proposer = tmp_path / "out", f"{__name__}:gives_two"
    sparrow.flow_loop(out, candidates=3, promote=1, at_once=2, proposer=proposer, **SMALL)
    tried = [candidate(out, number) for number in range(3, 6)]
    assert [one.status for one in tried] == ["scored", "duplicate", "scored"]
    for number in range(len(BASELINES)):
        assert candidate(out, number).search == candidate(done, number).search


def test_other_objectives_and_times(done: Path, tmp_path: Path) -> None:
    """What was measured is ordered anew; times are another campaign's."""
    out = Path(shutil.copytree(done, tmp_path / "out"))
    found = sparrow.flow_loop(out, candidates=5, promote=2, objective="hard_misses", **SMALL)
    misses = [row.search.hard_misses.value for row in found.rows]
    assert misses == sorted(misses)
    with pytest.raises(ValueError, match="times"):
        sparrow.flow_loop(out, times=True, device="cpu", **SMALL)
    with pytest.raises(ValueError, match="no GPU"):
        sparrow.flow_loop(tmp_path / "timed", times=True, device="auto", **SMALL)
    timed = sparrow.flow_loop(
        tmp_path / "timed", candidates=1, promote=1, times=True, device="cpu", **SMALL
    )
    assert all(row.microseconds and row.microseconds > 0 for row in timed.rows)
    assert len(ElementTree.parse(tmp_path / "timed" / FRONT).findall(".//{*}svg")) in (0, 6)


def gives_nothing(state: Any) -> str:
    return ""


def fails(state: Any) -> str:
    raise KeyError("mine")


def hangs(state: Any) -> str:
    time.sleep(100)
    return GOOD


def exits(state: Any) -> str:
    sys.exit(0)


def fails_sometimes(state: Any) -> Any:
    """Good; nothing; parents that are none; a surrogate; another one."""
    wrong = [{"name": "x"}, {"source": GOOD, "parents": 5}]
    given: list[Any] = [GOOD, *wrong, OTHER, "# \ud800", None, 5]
    return given[state["number"] - len(BASELINES)]


def test_a_proposal_that_fails_is_recorded_and_three_in_a_row_end_the_loop(begun: Path) -> None:
    proposer = f"{__name__}:fails_sometimes"
    with pytest.raises(ValueError, match="3 proposals in a row"):
        sparrow.flow_loop(begun, candidates=7, promote=1, proposer=proposer, **SMALL)
    tried = [candidate(begun, number) for number in range(3, 9)]
    status = ["scored", "invalid", "invalid", "scored", "invalid", "invalid"]
    assert [one.status for one in tried] == status
    assert "parents" in tried[2].error
    assert "UTF-8" in tried[4].error


def slow_later(state: Any) -> str:
    return GOOD if state["number"] > len(BASELINES) else SLOW_LATER


def test_a_flow_that_is_late_while_it_is_validated_does_not_stop_the_others(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    proposer, notes = f"{__name__}:slow_later", list[str]()
    settings: Any = {"candidates": 2, "promote": 2, "proposer": proposer, "seconds": 30}
    sparrow.flow_loop(begun, report=notes.append, **settings, **SMALL)
    late, good = candidate(begun, 3), candidate(begun, 4)
    assert late.status == "late"
    assert "validation" in late.error
    assert good.validation
    assert any("candidate 3" in note for note in notes)


def test_what_was_scored_is_what_is_published(done: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    rows = Campaign.load(out / CAMPAIGN).rows
    own = [row.number for row in rows if row.validation and row.number >= len(BASELINES)]
    number = next(n for n in own if not candidate(out, n).held_out)
    (out / "candidates" / f"{number:04d}.py").write_text(GOOD)
    with pytest.raises(ValueError, match="no longer what was scored"):
        sparrow.flow_publish(out, number)
    assert not candidate(out, number).held_out


def test_a_campaign_that_was_stopped_early_has_its_settings(done: Path, begun: Path) -> None:
    """Before the baselines are complete; and after a kill in the middle of a proposal."""
    out = begun
    for number in range(1, 3):
        (out / "candidates" / f"{number:04d}.json").unlink()
    (out / "candidates" / "0003.proposal").write_text("{")
    with pytest.raises(ValueError, match="tokens"):
        sparrow.flow_loop(out, candidates=1, **SMALL | {"tokens": 140})
    sparrow.flow_loop(out, candidates=1, promote=1, **SMALL)
    assert candidate(out, 3).search == candidate(done, 3).search
    (out / CAMPAIGN).unlink()
    with pytest.raises(ValueError, match=CAMPAIGN):
        sparrow.flow_loop(out, candidates=1, **SMALL)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"command": "exit 3"}, "candidate 3.*ended with 3"),
        ({"command": "sleep 60", "seconds": 5}, "candidate 3.*took longer"),
        ({"command": "printf '\\377'"}, "candidate 3.*UTF-8"),
        ({"proposer": f"{__name__}:gives_nothing"}, "source of a flow"),
        ({"proposer": f"{__name__}:fails"}, "candidate 3: KeyError"),
        ({"proposer": f"{__name__}:hangs", "seconds": 5}, "candidate 3.*took longer"),
        ({"proposer": f"{__name__}:exits"}, "candidate 3.*process ended"),
        ({"proposer": f"{__name__}:no_such"}, "has no 'no_such'"),
        ({"proposer": f"{__name__}:gives_nothing", "command": "true"}, "none with proposer"),
        ({"tokens": 100_000}, "tokens"),
        ({"model": "no-such-model"}, "no-such-model"),
    ],
    ids=[
        *("command", "late", "bytes", "function", "error", "late function", "exit", "no function"),
        *("both", "long texts", "model"),
    ],
)
def test_what_cannot_run_is_said(changes: Any, match: str, begun: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" if {"tokens", "model"} & changes.keys() else begun
    with pytest.raises(ValueError, match=match):
        sparrow.flow_loop(out, candidates=1, **SMALL | changes)


def test_splits_share_no_text(tmp_path: Path) -> None:
    puzzles = FlowLoopConfig.model_validate({"out": tmp_path, **SMALL})
    installed = FlowLoopConfig.model_validate({"out": tmp_path})
    for config in (puzzles, installed):
        texts = [t.text for split in SPLITS for t in texts_of(config, split, lambda note: None)]
        assert len(texts) == len({*texts})
    sparrow.flow_texts(tmp_path / "texts", all=True)
    own = FlowLoopConfig.model_validate({"out": tmp_path, "texts": tmp_path / "texts"})
    assert len(texts_of(own, "held-out", lambda note: None)) == 8
    one = TokenizedText(name="a", kind="", sha256="0", note="", ids=(1,))
    with pytest.raises(ValueError, match="must not share"):
        apart({"search": [one], "validation": [], "held-out": [one.replace(name="b")]})
