"""How an evaluation attends, what it reads, and accuracy with its standard error over rows."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from sparrow import models
from sparrow.dataflow.evaluate import (
    accuracies,
    accuracy,
    attending,
    file_parts,
    puzzles,
    task_parts,
)
from sparrow.dataflow.evaluation import Answered
from sparrow.dataflow.language import PUZZLE_LANGUAGE, language_of, speaks_puzzles
from sparrow.schema.sampling import Completion
from sparrow.sparse import preset
from sparrow.tasks.base import Example, Verdict
from sparrow.tasks.words import VOCABULARY


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    sizes |= {"head_size": 16, "vocabulary": VOCABULARY, "max_positions": 512}
    return models.random("qwen3-0.6b", **sizes)


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
    example = Example(id=f"graph-100-{row}", source="graph", prompt="p", ground_truth=row)
    verdict = Verdict(acc, acc, reason)
    return Answered(example=example, prompt_ids=(1,), completion=completion, verdict=verdict)


class TestAccuracy:
    def test_and_its_error_over_rows(self) -> None:
        """Means of rows are 1, 0.5, 0: four answers to one row are one observation."""
        answers = [answered(0, 1)] * 2 + [answered(1, acc) for acc in (1, 0, 1, 0)]
        found = accuracy([*answers, answered(2, 0)])
        assert found.answers == 7
        assert found.accuracy == pytest.approx(0.5)
        assert found.error == pytest.approx(0.5 / 3**0.5)

    def test_the_error_of_one_row_is_unknown(self) -> None:
        found = accuracy([answered(0, 1), answered(0, 0)])
        assert found.accuracy == 0.5
        assert np.isnan(found.error)

    def test_the_error_is_that_of_independent_rows(self) -> None:
        """Of single answers, the binomial one but for n - 1."""
        accs = [1.0] * 6 + [0.0] * 14
        found = accuracy([answered(row, acc) for row, acc in enumerate(accs)])
        assert found.error == pytest.approx((0.3 * 0.7 / 19) ** 0.5)

    def test_what_else_it_counts(self) -> None:
        right = [answered(0, 1, 2, "right"), answered(2, 1, 4, "right")]
        found = accuracy([*right, answered(1, 0, 6), answered(3, 0, 4, "no")])
        assert found.tokens == 4
        assert found.entropy == pytest.approx((1 + 15 + 6 + 6) / 16)
        assert found.unfinished == 0.25
        assert found.reasons == {"right": 2, "length": 1, "no": 1}


def test_a_table_by_family_and_length(model: models.Decoder) -> None:
    done: list[int] = []
    found = accuracies(
        model, ["countdown", "graph"], [100, 120], rows=2, on_answer=lambda: done.append(1)
    )
    assert {family: list(by_length) for family, by_length in found.items()} == {
        "countdown": [100, 120],
        "graph": [100, 120],
    }
    assert all(cell.answers == 2 for by_length in found.values() for cell in by_length.values())
    assert len(done) == 8


def test_puzzles_may_be_answered_at_length() -> None:
    rows = puzzles("graph", 100, 3)
    assert [row.id for row in rows] == ["graph-100-0", "graph-100-1", "graph-100-2"]
    assert {row.max_tokens for row in rows} == {250}
    assert puzzles("graph", 100, 1, room=1.25)[0].max_tokens == 125


class TestAttending:
    def test_dense_without_anything(self, model: models.Decoder) -> None:
        engine, schedule = attending(model)
        assert schedule is None
        assert engine.rule is None

    def test_a_budget_and_a_window_have_no_dense_layer(self, model: models.Decoder) -> None:
        for settings in ({"budget": 64}, {"window": 64}):
            engine, schedule = attending(model, **settings)
            assert schedule is not None
            assert schedule.budget(500) == 64
            assert schedule.dense_layers == ()
            assert engine.rule is not None
            assert engine.rule.dense_layers == frozenset()
        assert (schedule.first, schedule.last) == (0, 4)

    def test_a_flow_under_a_budget(self, model: models.Decoder) -> None:
        engine, schedule = attending(model, budget=64, flow="quest")
        assert schedule is not None
        assert schedule.flow == "quest"
        assert engine.rule is not None
        assert engine.rule.name == "quest"

    def test_a_published_schedule(self, model: models.Decoder) -> None:
        _, schedule = attending(model, schedule="qwen3-1.7b-0.86")
        assert schedule == preset("qwen3-1.7b-0.86")

    def test_a_schedule_of_another_family_is_refused_unless_forced(self) -> None:
        sizes = {"layers": 3, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
        other = models.random("smollm2-135m", **sizes, head_size=16, max_positions=256)
        with pytest.raises(ValueError, match="was not made for this: family 'qwen3'"):
            attending(other, schedule="qwen3-1.7b-0.86")
        _, schedule = attending(other, schedule="qwen3-1.7b-0.86", force=True)
        assert schedule is not None
        assert "FORCED" in schedule.describe()

    def test_a_schedule_under_another_flow_is_refused_unless_forced(
        self, model: models.Decoder
    ) -> None:
        with pytest.raises(ValueError, match="flow 'block-mean' \\(the engine runs 'quest'"):
            attending(model, schedule="qwen3-1.7b-0.86", flow="quest")
        engine, _ = attending(model, schedule="qwen3-1.7b-0.86", flow="quest", force=True)
        assert engine.rule is not None
        assert engine.rule.name == "quest"

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"budget": 64, "window": 64}, "give one of a budget"),
            ({"budget": 64, "schedule": "qwen3-1.7b-0.86"}, "give one of a budget"),
            ({"window": 40}, "multiple of 16"),
            ({"flow": "quest"}, "goes with a budget or a schedule"),
            ({"flow": "quest", "window": 64}, "goes with a budget or a schedule"),
            ({"force": True}, "force goes with a schedule"),
            ({"schedule": "nowhere.json"}, "nowhere.json"),
        ],
    )
    def test_refuses(self, model: models.Decoder, settings: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            attending(model, **settings)


class TestParts:
    def test_of_a_task(self) -> None:
        with ExitStack() as judges:
            parts = task_parts("graph", [100, 200], rows=2, first=7, open_judges=judges)
        assert [(part.source, part.length) for part in parts] == [("graph", 100), ("graph", 200)]
        assert [one.id for one in parts[0].examples] == ["graph-100-7", "graph-100-8"]
        assert [one.max_tokens for part in parts for one in part.examples] == [250, 250, 500, 500]

    def test_the_longest_answer_is_as_asked(self) -> None:
        with ExitStack() as judges:
            (part,) = task_parts("graph", [100], rows=1, max_tokens=999, open_judges=judges)
        assert part.examples[0].max_tokens == 999

    def test_an_unknown_task_and_a_length_it_does_not_have(self) -> None:
        with ExitStack() as judges:
            with pytest.raises(ValueError, match="no task 'sudoku'"):
                task_parts("sudoku", [100], rows=1, open_judges=judges)
            with pytest.raises(ValueError, match="100 to 8000"):
                task_parts("graph", [50], rows=1, open_judges=judges)

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
            parts, left_out = file_parts(str(file), open_judges=judges)
            assert [part.source for part in parts] == ["a", "b", str(file)]
            assert [one.prompt for one in parts[0].examples] == ["p0", "p2"]
            assert len(left_out) == 1
            assert left_out[0].startswith("row 1: no reward_model.ground_truth")
            parts, _ = file_parts(str(file), first=1, rows=2, open_judges=judges)
            assert [one.prompt for part in parts for one in part.examples] == ["p1", "p2"]
            with pytest.raises(ValueError, match="has 4 rows that can be used: none from 4 on"):
                file_parts(str(file), first=4, open_judges=judges)


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
        with pytest.raises(ValueError, match="has no chat template"):
            language_of(tiny).encode(chat)
        with pytest.raises(ValueError, match="puzzles are texts"):
            PUZZLE_LANGUAGE.encode(chat)

    def test_texts_and_chats_by_a_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models.locate("tiny"))
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['content'] }} ; {% endfor %}"
            "{% if add_generation_prompt %}<think>{% endif %}"
        )
        language = language_of(models.load("tiny", device="cpu")).of(tokenizer, "mine")
        said = [{"role": "user", "content": "x1"}, {"role": "assistant", "content": "x2"}]
        assert language.decode(language.encode(tuple(said))) == "x1 ; x2 ; <think>"
        assert language.decode(language.encode("x1")) == "x1 ; <think>"
