"""The models that are part of the package: there without a network, as promised, and able."""

import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sparrow import models
from sparrow.engine import Engine
from sparrow.files import file_digest
from sparrow.models.attention import Packed
from sparrow.models.sources import SHIPPED
from sparrow.schema.sampling import SamplingParams
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import EOS, IDS, VOCABULARY, decode, encode

NAMES = ("small", "small-rl", "tiny")
MOST = {"tiny": 4_000_000, "small": 5_000_000, "small-rl": 5_000_000}
TEXT = PUZZLES["countdown"].row(3, 200).prompt


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a shipped model asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_is_shipped_is_what_was_promised(name: str, tmp_path: Path) -> None:
    """Sizes (a tied head is counted once), end of answers, the card; it is saved with all of it."""
    folder, model = SHIPPED / name, models.load(name, dtype="bfloat16", device="cpu")
    weights = load_file(folder / "model.safetensors")
    parameters = sum(weight.numel() for weight in model.parameters())
    assert 2_000_000 <= parameters <= MOST[name]
    assert parameters == sum(weight.numel() for weight in weights.values())
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16 * 2**20
    spec = model.spec
    assert (spec.family, spec.vocabulary, spec.eos_ids) == ("qwen3", VOCABULARY, (IDS[EOS],))
    assert spec.kv_heads < spec.heads
    assert spec.head_size >= 64
    assert spec.max_positions >= 8192
    assert all(w.dtype == torch.bfloat16 and w.isfinite().all() for w in weights.values())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert file_digest(folder / "model.safetensors") in card
    place = models.save(model, tmp_path / "again")
    stored = load_file(place / "model.safetensors")
    assert all(torch.equal(stored[key], weight) for key, weight in weights.items())
    assert models.load_tokenizer(place)(TEXT)["input_ids"] == encode(TEXT)


@torch.no_grad()
def test_logits_are_those_of_transformers(name: str) -> None:
    """Both in float32 from the stored bfloat16, near the context's end too."""
    model = models.load(name, dtype="float32", device="cpu")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(SHIPPED / name, dtype=torch.float32)
    puzzle = PUZZLES["countdown"]
    row = puzzle.row(1, 200)
    ids = torch.tensor(encode(f"{row.prompt} {puzzle.chain(row, 1)}"))
    for start in (0, 8192 - len(ids)):
        positions = torch.arange(start, start + len(ids))
        hidden = model(ids, positions, Packed(bounds=torch.tensor([0, len(ids)])))
        expected = theirs(ids[None], position_ids=positions[None]).logits[0]
        assert expected.abs().max() > 1
        assert (model.logits(hidden) - expected).abs().max() < 1e-3


def test_a_folder_of_that_name_is_taken_by_its_path_alone(tmp_path: Path) -> None:
    """tmp_path is the working directory."""
    sizes = {"layers": 1, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1}
    other = models.random("qwen3-0.6b", **sizes, head_size=8, vocabulary=32, max_positions=64)
    for name in NAMES:
        models.save(other, tmp_path / name)
        model = models.load(f"./{name}", device="cpu")
        assert (model.spec.hidden, model.source) == (16, (tmp_path / name).resolve())
        assert models.load(name, device="cpu").source == SHIPPED / name


def test_tiny_solves_short_puzzles_more_often_than_not() -> None:
    """At temperature 1, by seeds that training never draws; about 85 % are right."""
    puzzle = PUZZLES["countdown"]
    rows = [puzzle.row(seed, 100) for seed in range(8)]
    model = models.load("tiny", device="cpu")
    engine = Engine(model, rule=None, max_context=1024, exact_batches=False)
    own = SamplingParams(max_tokens=200, seed=0)
    completions = engine.generate([encode(row.prompt) for row in rows], own)
    texts = [decode(completion.token_ids.tolist()) for completion in completions]
    right = sum(puzzle.reward(row, text).acc for row, text in zip(rows, texts, strict=True))
    assert right > 4
