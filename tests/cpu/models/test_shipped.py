"""The models that are part of the package: there without a network, as promised, and able."""

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sparrow import models
from sparrow.engine import Engine
from sparrow.models.attention import Packed
from sparrow.models.sources import SHIPPED
from sparrow.schema.sampling import SamplingParams
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import VOCABULARY, WORDS, decode, encode

NAMES = ("small", "tiny")
MOST = {"tiny": 4_000_000, "small": 5_000_000}
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


def config_of(name: str) -> dict[str, Any]:
    return json.loads((SHIPPED / name / "config.json").read_text(encoding="utf-8"))


def weights_of(name: str) -> dict[str, torch.Tensor]:
    return load_file(SHIPPED / name / "model.safetensors")


def test_what_is_shipped_is_what_was_promised(name: str) -> None:
    """Sizes (a tied head is counted once), shape, end of answers, and the card of these weights."""
    folder, config, weights = SHIPPED / name, config_of(name), weights_of(name)
    model = models.load(name, device="cpu")
    parameters = sum(weight.numel() for weight in model.parameters())
    assert 2_000_000 <= parameters <= MOST[name]
    assert parameters == sum(weight.numel() for weight in weights.values())
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16 * 2**20
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == VOCABULARY
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] >= 64
    assert config["max_position_embeddings"] >= 8192
    assert model.spec.eos_ids == (WORDS.index("<eos>"),)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in weights.values())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in card
    for promised in ("**Data**", "**Recipe**", "**Loss**", "## Accuracy", "entropy"):
        assert promised in card


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
    models.save(other, tmp_path / "tiny")
    model = models.load("./tiny", device="cpu")
    assert (model.spec.hidden, model.source) == (16, (tmp_path / "tiny").resolve())
    assert models.load("tiny", device="cpu").source == SHIPPED / "tiny"


def test_what_is_saved_of_it_has_its_tokenizer(name: str, tmp_path: Path) -> None:
    place = models.save(models.load(name, dtype="bfloat16", device="cpu"), tmp_path / "again")
    stored = load_file(place / "model.safetensors")
    for key, weight in weights_of(name).items():
        assert torch.equal(stored[key], weight), key
    assert models.load_tokenizer(place)(TEXT)["input_ids"] == encode(TEXT)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Steps are small: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
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
