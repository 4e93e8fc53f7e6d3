"""Prompts from files: what is damaged is refused, with the file and the line."""

import json
import os
from pathlib import Path

import pytest
from support.damage import damaged

from sparrow.dataflow import prompts
from sparrow.models import Decoder, load

IDS = {"ids": [1, 2, 3, 4, 5], "start": 2}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load("tiny")


def test_damaged_token_ids(model: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    whole = "\n".join(json.dumps(IDS) for _ in range(3)).encode()
    file.write_bytes(whole)
    assert len(prompts.of_ids(model, file).prompts) == 3
    for seed in range(100):
        file.write_bytes(damaged(whole, seed))
        message = str(file)
        try:
            prompts.of_ids(model, file)
        except ValueError as error:
            message = str(error)
        assert str(file) in message


def test_a_start_or_an_id_outside_names_its_line(model: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    changes = [{"start": start} for start in (-1, 0, 4, 10**30, True, 1.5, None)]
    for change in (*changes, {"ids": [1, 2, 10**30]}, {"ids": [1] * 10**6}, {"ids": "abc"}):
        file.write_text(json.dumps(IDS) + "\n" + json.dumps(IDS | change), encoding="utf-8")
        with pytest.raises(ValueError, match="line 2"):
            prompts.of_ids(model, file)


def test_rows_that_no_tokenizer_reads(model: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for prompt in ("\ud800", [{"role": "user", "content": "\udfff"}], 3, [], {"a": 1}):
        file.write_text(json.dumps({"prompt": prompt}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"rows\.jsonl, row 0"):
            prompts.of_rows(model, file)


def test_a_pipe_among_texts_is_refused(tmp_path: Path) -> None:
    from sparrow.calibration.flows.texts import from_folder

    os.mkfifo(tmp_path / "pipe.txt")  # reading it would wait for ever
    with pytest.raises(ValueError, match=r"pipe\.txt"):
        from_folder(tmp_path)
