"""Judging: the order of rows, n samples, room; accuracy with its standard error over rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from sparrow import models
from sparrow.dataflow.evaluate import Judged, accuracy, judge, read_puzzles
from sparrow.engine import Engine
from sparrow.records import Completion, SamplingParams
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Row, Source, Verdict
from sparrow.tasks.words import EOS, VOCABULARY, WORDS, decode, encode

CONTEXT = 256
ROWS = [
    PUZZLES[family].row(seed, length)
    for family, seed, length in [
        ("countdown", 3, 120),
        ("graph", 1, 100),
        ("countdown", 0, 100),
        ("assignments", 2, 100),
    ]
]


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    sizes |= {"head_size": 16, "vocabulary": VOCABULARY, "max_positions": CONTEXT}
    return models.random("qwen3-0.6b", **sizes, eos_ids=(WORDS.index(EOS),))


def engine_of(model: models.Decoder) -> Engine:
    return Engine(model, rule=None, max_running=8)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 4, "ignore_eos": True, **changes})


class Recorder:
    """Judges nothing, remembers what it was asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def row(self, seed: int, length: int) -> Row:
        raise NotImplementedError

    def reward(self, row: Row, text: str) -> Verdict:
        self.asked.append((row.id, text))
        return Verdict(0.5, float(row.family == "graph"), row.id)


def recorders() -> tuple[Recorder, Mapping[str, Source]]:
    one = Recorder()
    return one, dict.fromkeys(PUZZLES, one)


def test_answers_come_in_the_order_of_rows(model) -> None:
    """However long each takes: rooms differ, so the engine ends them in another order."""
    judged = judge(engine_of(model), ROWS, params(), room=0.2)
    assert [one.row for one in judged] == ROWS
    for one in judged:
        assert list(one.prompt) == encode(one.row.prompt) == one.completion.prompt_ids.tolist()
    assert [len(one.completion.token_ids) for one in judged] == [24, 20, 20, 20]


def test_n_samples_of_each_row_lie_together(model) -> None:
    judged = judge(engine_of(model), ROWS[:3], params(n=3), room=0.1)
    assert [one.row.id for one in judged] == [row.id for row in ROWS[:3] for _ in range(3)]
    assert len({one.completion.token_ids.tobytes() for one in judged}) == 9  # all differ


def test_room_is_by_the_row_and_ends_with_the_context(model) -> None:
    short = PUZZLES["countdown"].row(0, 100)
    left = CONTEXT - len(encode(short.prompt))
    (one,) = judge(engine_of(model), [short], params(max_tokens=1), room=2.5)
    assert len(one.completion.token_ids) == min(250, left)
    assert one.completion.finish_reason == "length"
    (one,) = judge(engine_of(model), [short], params(), room=0.5)
    assert len(one.completion.token_ids) == 50
    (one,) = judge(engine_of(model), [short], params(), room=100)
    assert len(one.completion.token_ids) == left


def test_each_row_has_a_seed_of_its_own_and_that_again(model) -> None:
    twice = [ROWS[1], ROWS[1]]
    first = judge(engine_of(model), twice, params(), room=0.2)
    again = judge(engine_of(model), twice, params(), room=0.2)
    ids = [[one.completion.token_ids.tolist() for one in judged] for judged in (first, again)]
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[0][1]
    other = judge(engine_of(model), twice, params(seed=None), room=0.2)
    assert other[0].completion.token_ids.tolist() != other[1].completion.token_ids.tolist()


def test_verdicts_are_on_the_text_without_end(model) -> None:
    recorder, sources = recorders()
    judged = judge(engine_of(model), ROWS, params(ignore_eos=False), room=0.2, sources=sources)
    asked = dict(recorder.asked)
    assert len(asked) == len(ROWS)
    for one in judged:
        text = asked[one.row.id]
        assert text == decode(one.completion.token_ids.tolist())
        assert EOS not in text
        assert one.verdict.reason == one.row.id
    assert [one.verdict.acc for one in judged] == [0, 1, 0, 0]


def test_no_rows(model) -> None:
    assert judge(engine_of(model), [], params()) == []


def judged(row: int, acc: float, tokens: int = 4, reason: str = "length") -> Judged:
    completion = Completion(
        prompt_ids=[1],
        token_ids=[5] * tokens,
        logprobs=[-1.0] * tokens,
        weight_versions=[0] * tokens,
        entropies=np.arange(tokens),
        finish_reason="length" if reason == "length" else "stop",
        attention="dense",
    )
    task = Row(family="graph", seed=row, length=100, prompt="p", data={})
    return Judged(row=task, prompt=(1,), completion=completion, verdict=Verdict(acc, acc, reason))


def test_accuracy_and_its_error_over_rows() -> None:
    """Means of rows are 1, 0.5, 0: four answers to one row are one observation."""
    answers = [judged(0, 1)] * 2 + [judged(1, acc) for acc in (1, 0, 1, 0)] + [judged(2, 0)]
    found = accuracy(answers)
    assert found.answers == 7
    assert found.accuracy == pytest.approx(0.5)
    assert found.error == pytest.approx(0.5 / 3**0.5)


def test_the_error_of_one_row_is_unknown() -> None:
    found = accuracy([judged(0, 1), judged(0, 0)])
    assert found.accuracy == 0.5
    assert np.isnan(found.error)


def test_the_error_is_that_of_independent_rows() -> None:
    """Of single answers, the binomial one but for n - 1."""
    accs = [1.0] * 6 + [0.0] * 14
    found = accuracy([judged(row, acc) for row, acc in enumerate(accs)])
    assert found.error == pytest.approx((0.3 * 0.7 / 19) ** 0.5)


def test_what_else_it_counts() -> None:
    found = accuracy(
        [judged(0, 1, 2, "right"), judged(1, 0, 6), judged(2, 1, 4, "right"), judged(3, 0, 4, "no")]
    )
    assert found.tokens == 4
    assert found.entropy == pytest.approx((1 + 15 + 6 + 6) / 16)
    assert found.unfinished == 0.25
    assert found.reasons == {"right": 2, "length": 1, "no": 1}


def test_rows_of_one_seed_and_two_lengths_are_two() -> None:
    one, other = judged(0, 1), judged(0, 0)
    longer = Row(family="graph", seed=0, length=200, prompt="p", data={})
    other = Judged(row=longer, prompt=(1,), completion=other.completion, verdict=other.verdict)
    assert accuracy([one, other]).error == pytest.approx(0.5)


def test_shipped_models_speak_the_language_and_others_are_refused(model, tmp_path) -> None:
    read_puzzles(models.load("tiny", device="cpu"))
    with pytest.raises(ValueError, match="the model does not speak the language"):
        read_puzzles(model)  # as many words, but no tokenizer says which
    folder = models.save(model, tmp_path / "other", tokenizer=models.locate("tiny"))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"yes":', '"sure":'))
    with pytest.raises(ValueError, match="other does not speak the language"):
        read_puzzles(models.load(folder, device="cpu"))


def test_a_prompt_beyond_the_context_is_named(model) -> None:
    row = PUZZLES["graph"].row(0, 2000)
    with pytest.raises(ValueError, match=r"the prompt of graph-2000-0 has .* context 256"):
        judge(engine_of(model), [row], params())
