"""Supervised fine-tuning: the tokens of conversations, the loss by hand, resume, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import run
from support.training import model_folder

import sparrow
from sparrow import load
from sparrow.dataflow.language import PUZZLE_LANGUAGE, load_language
from sparrow.dataflow.sft import conversation_sample, read_conversations
from sparrow.models import fingerprint
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import EOS, IDS, encode

TASK = PUZZLES["countdown"]


def rows(count: int) -> list[dict[str, str]]:
    drawn = [TASK.row(seed, 100) for seed in range(count)]
    return [{"prompt": row.prompt, "completion": TASK.chain(row, 0)} for row in drawn]


def test_what_the_assistant_says_is_learnt_with_its_end() -> None:
    turns = [("user", "find x1"), ("assistant", "x1 = 2"), ("tool", "no"), ("assistant", "x1 = 3")]
    messages = [{"role": role, "content": text} for role, text in turns]
    sample = conversation_sample({"messages": messages}, PUZZLE_LANGUAGE)
    end = [IDS[EOS]]
    parts = [encode("find x1"), encode("x1 = 2") + end, encode("no"), encode("x1 = 3") + end]
    assert sample.ids.tolist() == [id for part in parts for id in part]
    learnt = [number % 2 == 1 for number, part in enumerate(parts) for _ in part]
    assert sample.loss_mask.tolist() == learnt


def test_a_chat_has_the_tokens_of_a_conversation(chat_model: Path) -> None:
    language = load_language(load(chat_model, device="cpu"))
    turns = [("user", "3 + 4"), ("assistant", "= 7"), ("user", "find"), ("assistant", "no")]
    messages = [{"role": role, "content": text} for role, text in turns]
    sample = conversation_sample({"messages": messages}, language)
    ids = language.encode(({"role": "user", "content": "3 + 4"},))
    end = [language.tokenizer.eos_token_id]
    ids = [*ids, *language.encode_text("= 7"), *end]
    ids += language.encode_turn([{"role": "user", "content": "find"}], after=ids)
    ids = [*ids, *language.encode_text("no"), *end]
    assert sample.ids.tolist() == ids


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "find x1"},
        {"prompt": "find x1", "completion": ""},
        {"prompt": "find x1", "completion": "word"},
        {"messages": "find x1"},
        {"messages": [{"role": "user", "content": "find x1"}]},
        {"messages": [{"role": "assistant", "content": "find x1"}]},
        {
            "messages": [
                {"role": role, "content": "find x1"} for role in ("user", "asistant", "assistant")
            ]
        },
        [],
        7,
    ],
)
def test_rows_that_cannot_be_used_are_left_out_with_a_reason(row: Any) -> None:
    samples, problems = read_conversations([row, *rows(1)], PUZZLE_LANGUAGE, 1000)
    assert len(samples) == 1
    assert problems[0].startswith("row 0: ")


def test_the_loss_is_the_mean_over_learnt_tokens(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    found = sparrow.sft(str(model), rows(4), batch=4, steps=1, out=tmp_path / "out")
    reference = load(model, device="cpu")
    total = count = 0.0
    for row in rows(4):
        sample = conversation_sample(row, load_language(reference, puzzles=True))
        scored = _logprobs(reference, sample.ids.copy())[sample.loss_mask[1:]]
        total, count = total - float(scored.sum()), count + len(scored)
    assert found.losses[0] == pytest.approx(total / count, rel=1e-4)
    assert found.tokens == count


def _logprobs(model: Any, ids: np.ndarray) -> torch.Tensor:
    from sparrow.schema.episode import Document
    from sparrow.training.packing import pack, packed_attention

    packed = pack([Document(ids=ids, prompt=1)])
    with torch.no_grad():
        attention = packed_attention(packed, torch.float32)
        hidden = model(packed.ids_T, packed.positions_T, attention)
        return model.logits(hidden[:-1]).log_softmax(-1).gather(1, packed.ids_T[1:, None])[:, 0]


def test_it_learns_resumes_with_the_same_bits_and_is_not_done_twice(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    settings: dict[str, Any] = {"batch": 4, "epochs": 4, "rate": 1e-3, "save_every": 2}
    whole = sparrow.sft(str(model), rows(8), **settings, out=tmp_path / "whole")
    assert len(whole.losses) == 8
    assert whole.losses[-1] < whole.losses[0]

    class Stop(Exception):
        pass

    def stop(done: int, total: int, text: str) -> None:
        if done == 5:
            raise Stop

    with pytest.raises(Stop):
        sparrow.sft(str(model), rows(8), **settings, out=tmp_path / "parts", progress=stop)
    again = sparrow.sft(str(model), rows(8), **settings, out=tmp_path / "parts")
    assert again.losses == whole.losses
    states = [fingerprint(load(done.model, device="cpu")) for done in (whole, again)]
    assert states[0] == states[1]
    assert sparrow.sft(str(model), rows(8), **settings, out=tmp_path / "parts") == again
    with pytest.raises(ValueError, match="out"):
        sparrow.sft(str(model), rows(9), **settings, out=tmp_path / "parts")
    (tmp_path / "parts" / "sft.json").unlink()
    with pytest.raises(ValueError, match="another model, rows or settings"):
        sparrow.sft(str(model), rows(9), **settings, out=tmp_path / "parts")


def test_a_model_of_others_is_not_replaced(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "out" / "model")
    with pytest.raises(ValueError, match="another out"):
        sparrow.sft(str(model), rows(4), steps=1, out=tmp_path / "out")
    assert fingerprint(load(model, device="cpu"))
    with pytest.raises(ValueError, match="none with steps"):
        sparrow.sft(str(model), rows(4), steps=1, epochs=2, out=tmp_path / "other")


def test_a_file_of_rows_from_the_command_line(tmp_path: Path) -> None:
    model, file = model_folder(tmp_path / "m"), tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows(3), {"prompt": "x1"}]))
    done = run("sft", model, file, "--steps", "2", "-o", tmp_path / "out", "--json")
    assert json.loads(done.stdout)["rows"] == 3
    assert json.loads(done.stdout)["left_out"]
