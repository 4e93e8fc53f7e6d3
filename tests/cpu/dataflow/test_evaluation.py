"""Answers through the engine: their order, samples, limits, verdicts; and what they come to."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from sparrow import models
from sparrow.dataflow.evaluation import Answered, Part, answer, cell_of, evaluate
from sparrow.dataflow.language import PUZZLE_LANGUAGE
from sparrow.engine import Engine
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule
from sparrow.tasks.base import Example, Verdict
from sparrow.tasks.words import EOS, VOCABULARY, WORDS, decode, encode

CONTEXT = 256


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    sizes |= {"head_size": 16, "vocabulary": VOCABULARY, "max_positions": CONTEXT}
    return models.random("qwen3-0.6b", **sizes, eos_ids=(WORDS.index(EOS),))


def engine_of(model: models.Decoder) -> Engine:
    return Engine(model, rule=Rule(dense_layers=frozenset()), max_running=8)


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
        await asyncio.sleep(0.001 * (10 - example.ground_truth))
        self.asked.append((example.id, text))
        return Verdict(0.5, float(example.ground_truth % 2), f"judged {example.id}")


def answers(model: models.Decoder, rows: Any, judge: Any = None, **settings: Any) -> list[Answered]:
    chosen = settings.pop("params", params())
    judge = judge or Recorder()
    return answer(engine_of(model), rows, judge, PUZZLE_LANGUAGE, chosen, **settings)


class TestAnswer:
    def test_in_the_order_of_rows(self, model: models.Decoder) -> None:
        """However long each takes: limits differ, so the engine ends them in another order."""
        done: list[int] = []
        found = answers(model, ROWS, on_answer=lambda: done.append(1))
        assert [one.example for one in found] == ROWS
        for one in found:
            assert isinstance(one.example.prompt, str)
            assert list(one.prompt_ids) == encode(one.example.prompt)
            assert one.prompt_ids == tuple(one.completion.prompt_ids.tolist())
            assert one.verdict.reason == f"judged {one.example.id}"
        assert [len(one.completion.token_ids) for one in found] == [12, 20, 5, 20]
        assert len(done) == 4

    def test_samples_of_a_row_lie_together(self, model: models.Decoder) -> None:
        found = answers(model, ROWS, params=params(n=3))
        assert [one.example.id for one in found] == [row.id for row in ROWS for _ in range(3)]
        assert len({one.completion.token_ids.tobytes() for one in found}) == 12  # all differ

    def test_the_context_ends_an_answer(self, model: models.Decoder) -> None:
        found = answers(model, [example(0, 200)], params=params(max_tokens=1000))
        assert len(found[0].completion.token_ids) == CONTEXT - 200
        assert found[0].completion.finish_reason == "length"

    def test_each_row_has_a_seed_of_its_own_and_that_again(self, model: models.Decoder) -> None:
        twice = [ROWS[1], ROWS[1]]
        first, again = answers(model, twice), answers(model, twice)
        ids = [[one.completion.token_ids.tolist() for one in found] for found in (first, again)]
        assert ids[0] == ids[1]
        assert ids[0][0] != ids[0][1]
        other = answers(model, twice, params=params(seed=None))
        assert other[0].completion.token_ids.tolist() != other[1].completion.token_ids.tolist()

    def test_verdicts_are_on_the_text_without_end(self, model: models.Decoder) -> None:
        judge = Recorder()
        found = answers(model, ROWS, judge, params=params(ignore_eos=False))
        asked = dict(judge.asked)
        for one in found:
            assert asked[one.example.id] == decode(one.completion.token_ids.tolist())
            assert one.completion.text == asked[one.example.id]
            assert EOS not in asked[one.example.id]

    def test_no_rows(self, model: models.Decoder) -> None:
        assert answers(model, []) == []

    def test_prompts_beyond_the_context_are_told_or_refused(self, model: models.Decoder) -> None:
        """A prompt of the whole context leaves nothing for an answer."""
        rows = [ROWS[0], example(1, CONTEXT, id="long one")]
        told: list[str] = []
        found = answers(model, rows, on_skip=told.append)
        assert [one.example.id for one in found] == ["row 0"]
        assert told == ["the prompt of long one has 256 tokens, the context 256"]
        with pytest.raises(ValueError, match="1 of 2 prompts do not fit: the prompt of long one"):
            answers(model, rows)
        with pytest.raises(ValueError, match="1 of 1 prompts do not fit"):
            answers(model, rows[1:], on_skip=told.append)

    def test_an_engine_that_failed_is_not_judged(self, model: models.Decoder) -> None:
        broken = models.random(model.spec)
        broken.head.data[:] = float("nan")
        judge = Recorder()
        found = answers(broken, ROWS[:1], judge)
        assert found[0].verdict == Verdict(0.0, 0.0, "the model gave NaN or infinite logits")
        assert judge.asked == []

    def test_a_line_for_readers_is_json(self, model: models.Decoder) -> None:
        (one,) = answers(model, ROWS[:1])
        line = json.loads(json.dumps(one.plain()))
        assert line["id"] == "row 0"
        assert line["text"] == one.completion.text
        assert (line["score"], line["acc"], line["reason"]) == (0.5, 0.0, "judged row 0")
        assert line["tokens"] == 12


class Rows:
    """Five rows of two sources, without end."""

    name, digest = "five rows", "5"

    def at(self, position: int) -> Example:
        return example(position, source="odd" if position % 2 else "", max_tokens=None)


class TestParts:
    def test_rows_by_source(self) -> None:
        judge = Recorder()
        parts = Part.of(Rows(), judge, first=1, count=4, length=7, max_tokens=9)
        assert [(part.source, part.length) for part in parts] == [("odd", 7), ("five rows", 7)]
        assert [[one.id for one in part.examples] for part in parts] == [
            ["row 1", "row 3"],
            ["row 2", "row 4"],
        ]
        assert {one.max_tokens for part in parts for one in part.examples} == {9}


class TestEvaluate:
    def test_a_cell_for_every_part_by_its_own_judge(self, model: models.Decoder) -> None:
        judges = Recorder(), Recorder()
        parts = [
            Part(source="a", length=3, examples=tuple(ROWS[:2]), judge=judges[0]),
            Part(source="b", length=None, examples=tuple(ROWS[2:]), judge=judges[1]),
        ]
        found = evaluate(
            engine_of(model), parts, PUZZLE_LANGUAGE, params(n=2), model="m", left_out=["row 8: no"]
        )
        a, b = found.evaluation.cells
        assert (a.source, a.length, a.rows, a.samples) == ("a", 3, 2, 2)
        assert (b.source, b.length) == ("b", None)
        assert (a.mean.value, b.mean.value) == (0.5, 0.5)  # rows 5 and 9 are right
        assert [one.k for one in a.passes] == [1, 2]
        assert [len(judge.asked) for judge in judges] == [4, 4]
        assert [[one.example.id for one in own] for own in found.answers] == [
            ["row 0", "row 0", "row 5", "row 5"],
            ["row 9", "row 9", "row 2", "row 2"],
        ]
        assert found.evaluation.attention == "dense"
        assert found.evaluation.left_out == ("row 8: no",)

    def test_goes_to_json_and_back(self, model: models.Decoder) -> None:
        parts = [Part(source="a", length=3, examples=(ROWS[0],), judge=Recorder())]
        found = evaluate(engine_of(model), parts, PUZZLE_LANGUAGE, params(), model="m").evaluation
        assert found.cells[0].mean.low is None  # of one row
        assert from_dict(Evaluation, json.loads(json.dumps(to_dict(found)))) == found

    def test_a_schedule_is_what_ran(self, model: models.Decoder) -> None:
        schedule = Schedule.fixed(64, dense_layers=())
        parts = [Part(source="a", length=3, examples=tuple(ROWS[:2]), judge=Recorder())]
        engine, language = engine_of(model), PUZZLE_LANGUAGE
        found = evaluate(engine, parts, language, params(), model="m", schedule=schedule)
        assert found.evaluation.attention == schedule.describe()
        assert found.answers[0][0].completion.attention == schedule.describe()

    def test_skipped_rows_are_named_and_a_part_of_none_is_refused(
        self, model: models.Decoder
    ) -> None:
        long = example(1, CONTEXT)
        some = Part(source="a", length=None, examples=(ROWS[0], long), judge=Recorder())
        none = Part(source="b", length=9, examples=(long,), judge=Recorder())
        found = evaluate(engine_of(model), [some], PUZZLE_LANGUAGE, params(), model="m")
        (cell,) = found.evaluation.cells
        assert cell.rows == 1
        assert cell.skipped == ("the prompt of row 1 has 256 tokens, the context 256",)
        with pytest.raises(ValueError, match="no prompt of b of length 9 leaves room"):
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
    own = example(row)
    return Answered(example=own, prompt_ids=(1,), completion=completion, verdict=verdict)


class TestCell:
    def test_by_hand(self) -> None:
        """Row means 1, 0.5 and 0.25: pass@1 wants whole rights, so the half ones do not count."""
        accs = {0: (1, 1), 1: (1, 0), 2: (0.5, 0)}
        found = cell_of(
            "s", 100, [answered(row, acc) for row, both in accs.items() for acc in both]
        )
        assert (found.rows, found.samples) == (3, 2)
        assert found.mean.value == pytest.approx(1.75 / 3)
        assert [one.estimate.value for one in found.passes] == pytest.approx([1.5 / 3, 2 / 3])

    def test_what_else_it_counts(self) -> None:
        right = [answered(0, 1, 2, "right"), answered(2, 1, 4, "right")]
        found = cell_of("s", None, [*right, answered(1, 0, 6), answered(3, 0, 4, "no")], ["row 9"])
        assert found.tokens == 4
        assert found.entropy == pytest.approx((1 + 15 + 6 + 6) / 16)
        assert found.cut_off == 0.25
        assert [(one.text, one.count) for one in found.reasons] == [
            ("right", 2),
            ("length", 1),
            ("no", 1),
        ]
        assert found.skipped == ("row 9",)

    def test_the_median_length_knows_nothing_of_one_long_answer(self) -> None:
        found = cell_of("s", None, [answered(row, 0, n) for row, n in enumerate((3, 2, 100))])
        assert (found.median, found.tokens) == (3, 35)
        even = cell_of("s", None, [answered(row, 0, n) for row, n in enumerate((2, 3, 6, 100))])
        assert even.median == 4.5

    def test_nothing_sampled_has_no_entropy(self) -> None:
        assert cell_of("s", None, [answered(0, 0, 0), answered(1, 0, 0)]).entropy is None
