"""Evaluation: answers, their order, limits and verdicts; figures; rows, attention, language."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow import models
from sparrow.dataflow.backend import EngineBackend, open_backend
from sparrow.dataflow.evaluation import (
    Answered,
    Part,
    evaluate,
    open_engine,
    open_parts,
    summarise,
)
from sparrow.dataflow.language import PUZZLE_LANGUAGE, load_language, speaks_puzzles
from sparrow.engine.answer import ResolvedDecoding
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.evaluation import EvalConfig, Evaluation
from sparrow.schema.sampling import Completion, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse import preset
from sparrow.sparse.rule import Rule
from sparrow.tasks.base import EOS, VOCABULARY, WORDS, Example, Verdict, decode, encode
from sparrow.tasks.judging import InProcess, Unjudged

CONTEXT = 256


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    sizes |= {"head_size": 16, "vocabulary": VOCABULARY, "max_positions": CONTEXT}
    return models.random("qwen3-0.6b", **sizes, eos_ids=(WORDS.index(EOS),))


def engine_of(model: models.Decoder) -> EngineBackend:
    return open_backend(model, Rule(dense_layers=frozenset()), max_running=8)


def asked(**settings: Any) -> EvalConfig:
    return EvalConfig(model="m", **settings)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 4, "ignore_eos": True, "max_tokens": 20, **changes})


def example(number: int, words: int = 3, **changes: Any) -> Example:
    prompt = " ".join(f"x{number + i}" for i in range(words))
    given = {"id": f"row {number}", "source": "s", "prompt": prompt, "ground_truth": number}
    return Example(**(given | changes))


ROWS = [example(0, max_tokens=12), example(5, 40), example(9, max_tokens=5), example(2, 7)]


class Recorder:
    """Calls every second row right, and remembers what it was asked. Later ones are faster."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, example: Example, text: str) -> Verdict:
        for _ in range(10 - example.ground_truth):
            await asyncio.sleep(0)
        self.asked.append((example.id, text))
        return Verdict(0.5, float(example.ground_truth % 2), f"judged {example.id}")


def part_of(rows: Sequence[Example], judge: Any = None, **changes: Any) -> Part:
    given: dict[str, Any] = {"source": "a", "length": 3, "examples": tuple(rows)}
    return Part(**(given | {"judge": judge or Recorder()} | changes))


def answers(model: models.Decoder, rows: Any, judge: Any = None, **settings: Any) -> list[Answered]:
    chosen, parts = settings.pop("params", params()), [part_of(rows, judge)]
    result = evaluate(engine_of(model), parts, PUZZLE_LANGUAGE, chosen, model="m", **settings)
    return result.answers[0]


class TestAnswer:
    def test_in_the_order_of_rows(self, model: models.Decoder) -> None:
        """However long each takes: limits differ, so the engine ends them in another order."""
        done: list[int] = []
        result = answers(model, ROWS, on_answer=lambda: done.append(1))
        assert [one.example for one in result] == ROWS
        for one in result:
            assert isinstance(one.example.prompt, str)
            assert one.completion.prompt_ids.tolist() == encode(one.example.prompt)
            assert one.verdict.reason == f"judged {one.example.id}"
        assert [len(one.completion.token_ids) for one in result] == [12, 20, 5, 20]
        assert len(done) == 4
        line = json.loads(json.dumps(result[0].plain()))
        assert (line["id"], line["tokens"], line["acc"]) == ("row 0", 12, 0.0)
        (long,) = answers(model, [example(0, 200)], params=params(max_tokens=1000))
        assert len(long.completion.token_ids) == CONTEXT - 200, "the context ends it"
        result = answers(model, ROWS, params=params(n=3))
        assert [one.example.id for one in result] == [row.id for row in ROWS for _ in range(3)]
        assert len({one.completion.token_ids.tobytes() for one in result}) == 12, "all differ"
        judge = Recorder()
        for one in answers(model, ROWS, judge, params=params(ignore_eos=False)):
            text = dict(judge.asked)[one.example.id]
            assert text == decode(one.completion.token_ids.tolist()) == one.completion.text
            assert EOS not in text

    def test_each_row_has_a_seed_of_its_own_and_that_again(self, model: models.Decoder) -> None:
        twice = [ROWS[1], ROWS[1]]
        first, again = answers(model, twice), answers(model, twice)
        ids = [[one.completion.token_ids.tolist() for one in result] for result in (first, again)]
        assert ids[0] == ids[1]
        assert ids[0][0] != ids[0][1]
        other = answers(model, twice, params=params(seed=None))
        assert other[0].completion.token_ids.tolist() != other[1].completion.token_ids.tolist()

    def test_an_engine_that_failed_is_not_judged(self, model: models.Decoder) -> None:
        broken = models.random(model.spec)
        broken.head.data[:] = float("nan")
        judge = Recorder()
        with pytest.raises(Unjudged, match="NaN"):
            answers(broken, ROWS[:1], judge)
        assert judge.asked == []

    def test_verdicts_that_failed_are_counted_and_not_all_may_fail(
        self, model: models.Decoder
    ) -> None:
        def reward(text: str, answer: int) -> float:
            if answer in failing:
                raise KeyError("no idea")
            return 1.0

        failing = set[int]()
        for failed in (0, 1):
            failing |= {5} if failed else set()
            parts = [part_of(ROWS, InProcess.of_function(reward))]
            result = evaluate(engine_of(model), parts, PUZZLE_LANGUAGE, params(), model="m")
            (cell,) = result.evaluation.cells
            assert (cell.failed, cell.mean.value) == (failed, 1 - failed / 4)
            assert ("no idea" in cell.fault) == bool(failed)
            assert len(result.evaluation.problems) == failed
        failing |= {0, 9, 2}
        with pytest.raises(Unjudged, match="no idea"):
            answers(model, ROWS, InProcess.of_function(reward))


class TestParts:
    def test_of_a_task(self) -> None:
        with ExitStack() as judges:
            settings = {"task": ("graph",), "length": (100, 200)}
            parts, _ = open_parts(asked(**settings, prompts=2, skip=7), judges)
            assert [(one.source, one.length) for one in parts] == [("graph", 100), ("graph", 200)]
            assert [one.id for one in parts[0].examples] == ["graph-100-7", "graph-100-8"]
            most = [one.max_tokens for part in parts for one in part.examples]
            assert most == [250, 250, 500, 500]
            (part, _), _ = open_parts(asked(**settings, prompts=1, max_tokens=999), judges)
            assert part.examples[0].max_tokens == 999
            with pytest.raises(ValueError, match="sudoku"):
                open_parts(asked(task=("sudoku",)), judges)
            with pytest.raises(ValueError, match="8000"):
                open_parts(asked(task=("graph",), length=(50,)), judges)

    def test_of_a_file(self, tmp_path: Path) -> None:
        """Rows are taken in order, by data_source; those without ground truth are told."""
        truth = {"family": "graph", "seed": 0, "length": 100}
        rows: list[dict[str, Any]] = [
            {"prompt": f"p{i}", "data_source": source, "reward_model": {"ground_truth": truth}}
            for i, source in enumerate(["a", "b", "a", ""])
        ]
        rows.insert(1, {"prompt": "no truth", "data_source": "a"})
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        with ExitStack() as judges:
            parts, left_out = open_parts(asked(rows=str(file)), judges)
            assert [part.source for part in parts] == ["a", "b", file.name]
            assert [one.prompt for one in parts[0].examples] == ["p0", "p2"]
            assert len(left_out) == 1
            assert left_out[0].startswith("row 1: no reward_model.ground_truth")
            parts, _ = open_parts(asked(rows=str(file), skip=1, prompts=2), judges)
            assert [one.prompt for part in parts for one in part.examples] == ["p1", "p2"]
            with pytest.raises(ValueError, match=r"rows\.jsonl.* 4\b"):
                open_parts(asked(rows=str(file), skip=4), judges)


class TestAttending:
    def test_what_is_asked_for(self, model: models.Decoder) -> None:
        """A budget and a window have no dense layer; a budget may have another flow."""
        for settings in ({"budget": 64}, {"window": 64}):
            backend, (schedule, *_) = open_engine(model, asked(**settings))
            assert schedule is not None
            assert (schedule.budget(500), schedule.dense_layers) == (64, ())
            assert backend.engine.rule is not None
            assert backend.engine.rule.dense_layers == frozenset()
        assert (schedule.first, schedule.last) == (0, 4)
        backend, decoding = open_engine(model, asked())
        assert decoding.schedule is backend.engine.rule is None
        assert open_engine(model, asked(budget=64, decoding="dense"))[1] == decoding
        _, decoding = open_engine(model, asked(budget=64, decoding="exact", draft_tokens=3))
        assert decoding.speculative == SpeculativeParams(draft_tokens=3)
        backend, (schedule, *_) = open_engine(model, asked(budget=64, flow="quest"))
        assert schedule is not None
        assert backend.engine.rule is not None
        assert (schedule.flow, backend.engine.rule.name) == ("quest", "quest")
        named = asked(schedule="qwen3-1.7b-0.86")
        with pytest.raises(ValueError, match="layers"):  # it names two, the model has one
            open_engine(model, named)
        deeper = models.random(model.spec, layers=3)
        assert open_engine(deeper, named)[1].schedule == preset("qwen3-1.7b-0.86")

    def test_refuses(self, model: models.Decoder) -> None:
        name = "qwen3-1.7b-0.86"
        refused: list[tuple[dict[str, Any], str]] = [
            ({"budget": 64, "window": 64}, "window"),
            ({"decoding": "exact"}, "decoding"),
            ({"window": 64, "decoding": "dense"}, "window"),
            ({"budget": 64, "draft_tokens": 4}, "draft_tokens"),
            ({"budget": 64, "decoding": "exact", "draft_tokens": 17}, "draft_tokens"),
            ({"budget": 64, "schedule": name}, "schedule"),
            ({"window": 40}, "40"),
            ({"flow": "quest"}, "flow"),
            ({"flow": "quest", "window": 64}, "flow"),
            ({"force": True}, "force"),
            ({"schedule": "nowhere.json"}, r"nowhere\.json"),
        ]
        for settings, message in refused:
            with pytest.raises(ValueError, match=message):
                open_engine(model, asked(**settings))


class TestEvaluate:
    def test_a_cell_for_every_part_by_its_own_judge(self, model: models.Decoder) -> None:
        judges = Recorder(), Recorder()
        parts = [
            part_of(ROWS[:2], judges[0]),
            part_of(ROWS[2:], judges[1], source="b", length=None),
        ]
        result = evaluate(
            engine_of(model), parts, PUZZLE_LANGUAGE, params(n=2), model="m", left_out=["row 8: no"]
        )
        a, b = result.evaluation.cells
        assert (a.source, a.length, a.rows, a.samples) == ("a", 3, 2, 2)
        assert (b.source, b.length) == ("b", None)
        assert (a.mean.value, b.mean.value) == (0.5, 0.5)  # rows 5 and 9 are right
        assert [one.k for one in a.passes] == [1, 2]
        assert [len(judge.asked) for judge in judges] == [4, 4]
        assert [[one.example.id for one in own] for own in result.answers] == [
            ["row 0", "row 0", "row 5", "row 5"],
            ["row 9", "row 9", "row 2", "row 2"],
        ]
        assert result.evaluation.attention == "dense"
        assert result.evaluation.left_out == ("row 8: no",)
        assert from_dict(Evaluation, json.loads(json.dumps(to_dict(result.evaluation)))) == (
            result.evaluation
        )

    def test_skipped_rows_are_named_and_a_part_of_none_is_refused(
        self, model: models.Decoder
    ) -> None:
        long = example(1, CONTEXT)
        some, none = part_of([ROWS[0], long]), part_of([long], source="b", length=9)
        result = evaluate(engine_of(model), [some], PUZZLE_LANGUAGE, params(), model="m")
        (cell,) = result.evaluation.cells
        assert cell.rows == 1
        schedule = Schedule.fixed(64, dense_layers=())
        sparse = answers(model, ROWS[:1], decoding=ResolvedDecoding(schedule))
        assert sparse[0].completion.attention == schedule.describe()
        assert cell.skipped == ("the prompt of row 1 has 256 tokens, the context 256",)
        with pytest.raises(ValueError, match=r"\bb\b.*\b9\b"):
            evaluate(engine_of(model), [some, none], PUZZLE_LANGUAGE, params(), model="m")


def answered(row: int, acc: float, tokens: int = 4, reason: str = "length") -> Answered:
    completion = Completion(
        prompt_ids=[1],
        token_ids=[5] * tokens,
        logprobs=[-1.0] * tokens,
        weight_versions=[0] * tokens,
        entropies=np.arange(tokens),
        finish_reason="length" if reason == "length" else "stop",
        attention="dense",
    )
    verdict = Verdict(acc, acc, reason)
    return Answered(example=example(row), completion=completion, verdict=verdict)


class TestCell:
    def test_by_hand(self) -> None:
        """Row means 1, 0.5 and 0.25: pass@1 wants whole rights, so the half ones do not count."""
        accs = {0: (1, 1), 1: (1, 0), 2: (0.5, 0)}
        result = summarise(
            "s", 100, [answered(row, acc) for row, both in accs.items() for acc in both]
        )
        assert (result.rows, result.samples) == (3, 2)
        assert result.mean.value == pytest.approx(1.75 / 3)
        assert [one.estimate.value for one in result.passes] == pytest.approx([1.5 / 3, 2 / 3])

    def test_what_else_it_counts(self) -> None:
        right = [answered(0, 1, 2, "right"), answered(2, 1, 4, "right")]
        result = summarise(
            "s", None, [*right, answered(1, 0, 6), answered(3, 0, 4, "no")], ["row 9"]
        )
        assert (result.tokens, result.median) == (4, 4)
        assert result.entropy == pytest.approx((1 + 15 + 6 + 6) / 16)
        assert (result.right, result.cut_off, result.wrong) == (0.5, 0.25, 0.25)
        late = summarise("s", None, [answered(0, 1), answered(1, 0), answered(2, 0.5, 4, "no")])
        assert (late.right, late.cut_off, late.wrong) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
        counts = [(one.text, one.count) for one in result.reasons]
        assert counts == [("right", 2), ("length", 1), ("no", 1)]
        assert result.skipped == ("row 9",)
        assert summarise("s", None, [answered(0, 0, 0), answered(1, 0, 0)]).entropy is None


class TestLanguage:
    def test_shipped_models_speak_it_and_others_do_not(
        self, model: models.Decoder, tmp_path: Path
    ) -> None:
        assert speaks_puzzles(models.load("tiny", device="cpu"))
        assert not speaks_puzzles(model)  # as many words, but no tokenizer says which
        folder = models.save(model, tmp_path / "other", tokenizer=models.locate("tiny"))
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace('"yes":', '"sure":'))
        (folder / "SHA256SUMS").unlink()
        assert not speaks_puzzles(models.load(folder, device="cpu"))

    def test_chats_need_a_template(self) -> None:
        tiny = models.load("tiny", device="cpu")
        chat = ({"role": "user", "content": "x1 + x2"},)
        with pytest.raises(ValueError, match="template"):
            load_language(tiny).encode(chat)
        with pytest.raises(ValueError, match="puzzles"):
            PUZZLE_LANGUAGE.encode(chat)
