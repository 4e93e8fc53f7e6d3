"""The demo's settings: small enough for two cores and five minutes, real in every part.

Chosen after looking: at this length and with these few tokens to answer, `tiny` solves about six
puzzles of ten at first, so there is something to learn in a dozen steps. Layer 3 stays dense, as
the calibration of `tiny` in docs/calibrate.md found best.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow import __version__
from sparrow.schema.common import AttentionConfig
from sparrow.schema.train import (
    BatchConfig,
    GateConfig,
    RateConfig,
    RolloutConfig,
    RowsConfig,
    TrainConfig,
    TrainModelConfig,
    TrainRunConfig,
    ValidationConfig,
)

MODEL, TASK = "tiny", "assignments"
TARGET = 0.86
LENGTH, MAX_TOKENS, MAX_PROMPT = 150, 192, 64
BUDGETS = (64, 80, 96, 112, 128, 160)
DENSE_LAYERS = (3,)
BIN = 48  # width of a bin of lengths, in tokens
PROMPTS = 48  # that every budget answers
STEPS = 12
GROUPS, SAMPLES = 4, 8  # prompts of a step, answers to each
HELD_OUT = 48  # puzzles that are answered before and after, twice each
LONG, LONG_BUDGET, LONG_ROWS = 8192, 1024, 16  # decode steps that are timed

CALIBRATION, TRAIN, SPEED, PAGE = "calibration", "train", "speed.json", "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the demo leaves what."""

    folder: Path

    @property
    def calibration(self) -> Path:
        return self.folder / CALIBRATION

    @property
    def surface(self) -> Path:
        return self.calibration / "surface.json"

    @property
    def schedule(self) -> Path:
        return self.calibration / "schedule.json"

    @property
    def plan(self) -> Path:
        return self.calibration / "plan.json"

    @property
    def train(self) -> Path:
        return self.folder / TRAIN

    @property
    def model(self) -> Path:
        return self.train / "model"

    @property
    def speed(self) -> Path:
        return self.folder / SPEED

    @property
    def about(self) -> Path:
        return self.folder / "demo.json"

    @property
    def page(self) -> Path:
        return self.folder / PAGE


def training(place: Place) -> TrainConfig:
    """RL on the planned schedule, under the gate; a checkpoint every step, to go on anywhere."""
    return TrainConfig(
        model=TrainModelConfig(name=MODEL, device="cpu"),
        data=RowsConfig(task=TASK, length=LENGTH, first=10_000),
        rollout=RolloutConfig(
            prompts=GROUPS,
            samples=SAMPLES,
            max_tokens=MAX_TOKENS,
            max_prompt=MAX_PROMPT,
            attention=AttentionConfig(schedule=str(place.schedule)),
        ),
        batch=BatchConfig(recompute=False),
        optimiser=RateConfig(rate=3e-4),
        gate=GateConfig(target=TARGET),
        validation=ValidationConfig(every=STEPS, rows=HELD_OUT, samples=2, first=1000),
        run=TrainRunConfig(
            name="demo", dir=place.train, steps=STEPS, save_every=1, keep=1, tensorboard=False
        ),
    )


def describe() -> dict[str, Any]:
    """Everything that the demo's results depend on, as plain data."""
    place = Place(folder=Path("."))
    calibration = [TASK, LENGTH, MAX_TOKENS, list(BUDGETS), list(DENSE_LAYERS), BIN, PROMPTS]
    return {
        "sparrow": __version__,
        "calibration": calibration,
        "long": [LONG, LONG_BUDGET, LONG_ROWS],
        "training": training(place).model_dump(mode="json"),
    }
