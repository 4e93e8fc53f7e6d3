"""Training runs that take a second: a small random model in a folder, noisy rewards, few tokens."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparrow import models
from sparrow.dataflow.backend import EngineBackend
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.messages import Callbacks, NoCallbacks
from sparrow.dataflow.local.rollout import RolloutSide
from sparrow.dataflow.local.run import Run, open_run
from sparrow.engine.engine import Engine
from sparrow.files import read_lines as lines
from sparrow.models.lora import Adapter
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import WORDS, Example, Verdict, puzzle_tokenizer

CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}<think>"
SPARSE = {"budget": 48}
FIRST = 5000  # seed of the first row
Json = dict[str, Any]


def model_folder(
    folder: Path, *, size: float = 6.0, chat: bool | str = False, layers: int = 3
) -> Path:
    """A model of the puzzles' words, whose third layer is sparse under a budget.

    size: by which its weights are multiplied; the larger, the further sparse strays from dense.
    """
    made = models.random(
        "qwen3-0.6b",
        layers=layers,
        hidden=32,
        intermediate=48,
        heads=4,
        kv_heads=2,
        head_size=16,
        vocabulary=len(WORDS),
        max_positions=256,
        eos_ids=(1,),
        seed=3,
    )
    with torch.no_grad():
        for name, view in models.hf_views(made).items():
            if "norm" not in name:
                view.mul_(size)
    tokenizer = puzzle_tokenizer()
    if chat:
        tokenizer.chat_template = chat if isinstance(chat, str) else CHAT
    return models.save(made, folder, tokenizer=tokenizer)


def far_adapter(model: Path, folder: Path, seed: int = 1) -> Path:
    """An adapter that changes what a model says."""
    place: Json = {"b_std": 0.5, "dtype": torch.float32, "device": "cpu"}
    Adapter.random(models.load(model, device="cpu").spec, 4, seed=seed, **place).save(folder)
    return folder


def settings(model: Path, folder: Path, /, **changes: Mapping[str, Any]) -> Json:
    """A configuration as plain data: a few steps of 2 x 4 answers; `changes` by section."""
    base: dict[str, Json] = {
        "model": {"name": str(model), "device": "cpu"},
        "data": {"task": "assignments", "length": 100, "first": FIRST},
        "rollout": {"prompts": 2, "samples": 4, "max_tokens": 40, "max_prompt": 40, "kv_gib": 0.01},
        "algorithm": {},
        "batch": {"tokens": 256},
        "optimiser": {"rate": 1e-3},
        "gate": {"mode": "warn", "sample": 4, "least": 20, "prompts": 2},
        "run": {"out": str(folder), "steps": 4, "save_every": 2, "tensorboard": False},
    }
    return {key: {**base.get(key, {}), **changes.get(key, {})} for key in {*base, *changes}}


def config(model: Path, folder: Path, /, **changes: Mapping[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate_json(json.dumps(settings(model, folder, **changes)))


def row_config(
    model: Path, folder: Path, rows: Path, loop: str, **changes: Mapping[str, Any]
) -> TrainConfig:
    """A sparse run of four steps on rows of a file, whose reward a worker process can import."""
    base: dict[str, Json] = {
        "data": {"rows": str(rows), "reward": "support.rewards:odd", "workers": 1},
        "rollout": {"attention": SPARSE},
        "run": {"loop": loop, "steps": 4},
    }
    merged = {key: {**base.get(key, {}), **changes.get(key, {})} for key in {*base, *changes}}
    plain = {**settings(model, folder, **merged), "data": merged["data"]}
    return TrainConfig.model_validate_json(json.dumps(plain))


class Hears(NoCallbacks):
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def event(self, text: str, style: str = "") -> None:
        self.told.append(text)


async def noisy(example: Example, text: str) -> Verdict:
    """A reward from 0 to 1 that nobody can foretell, but always the same; half are right."""
    number = zlib.crc32(f"{example.id} {text}".encode())
    return Verdict(score=number % 7 / 6, acc=float(number % 2), reason="noise")


def trained(chosen: TrainConfig, *, watch: Callbacks | None = None, **parts: Any) -> Run:
    """A run after its last step, closed."""
    with open_run(chosen, **{"judge": noisy, **parts}, callbacks=watch) as run:
        train(run)
    return run


def metrics(folder: Path) -> list[Json]:
    """What a run wrote of its steps, without what depends on the machine's speed."""
    return [
        {k: v for k, v in line.items() if not k.startswith("timing_s/") and k != "perf/throughput"}
        for line in lines(folder / "metrics.jsonl")
    ]


def rollout_side(run: Run) -> RolloutSide:
    assert isinstance(run.rollout, RolloutSide)
    return run.rollout


def learner_side(run: Run) -> LearnerSide:
    assert isinstance(run.learner, LearnerSide)
    return run.learner


def engine_of(run: Run) -> Engine:
    backend = rollout_side(run).backend
    assert isinstance(backend, EngineBackend)
    return backend.engine


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in run.learner.weights().items()}
