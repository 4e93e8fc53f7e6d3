"""`sparrow demo`: the whole idea on a laptop, in minutes, with a model that ships.

Small enough for two cores and five minutes, real in every part. The settings were chosen after
looking: at this length and with these few tokens to answer, `tiny` solves about six puzzles of ten
at first, so there is something to learn in a dozen steps. Layer 3 stays dense, as the calibration
of `tiny` in docs/calibrate.md found best. Each stage finds what is there already and does the rest.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparrow import __version__, api
from sparrow.dataflow.prompts import of_task
from sparrow.engine.answer import Session
from sparrow.files import (
    FolderLock,
    Json,
    read_document,
    read_lines,
    refuse_links,
    remove_unfinished,
    write_document,
)
from sparrow.models import load
from sparrow.schema.bench import Speed
from sparrow.schema.common import AttentionConfig, GenerateConfig, GenerateSampling, ModelConfig
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
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
from sparrow.schema.types import Progress
from sparrow.tasks import PUZZLES
from sparrow_recipes import dense_sparse

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


class Place:
    """Where the demo leaves what."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calibration, self.train = folder, folder / "calibration", folder / "train"
        self.surface = self.calibration / "surface.json"
        self.schedule = self.calibration / "schedule.json"
        self.plan = self.calibration / "plan.json"
        self.model = self.train / "model"
        self.speed, self.page = folder / "speed.json", folder / "report.html"
        self.about = folder / "demo.json"


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
    calibration = [TASK, LENGTH, MAX_TOKENS, list(BUDGETS), list(DENSE_LAYERS), BIN, PROMPTS]
    return {
        "sparrow": __version__,
        "calibration": calibration,
        "long": [LONG, LONG_BUDGET, LONG_ROWS],
        "training": training(Place(Path("."))).model_dump(mode="json"),
    }


def open_folder(place: Place, *, fresh: bool = False) -> FolderLock:
    """See to it that the folder is this demo's, and this process's until the lock is closed.

    One of another version is not gone on with.
    """
    if place.folder.exists() and not place.folder.is_dir():
        raise ValueError(f"{place.folder} is no folder; name another one with --out")
    made = (place.calibration, place.train, place.speed, place.page)
    if not place.about.exists() and any(one.exists() for one in made):
        raise ValueError(f"{place.folder} holds other runs; name another folder with --out")
    place.folder.mkdir(parents=True, exist_ok=True)
    refuse_links(made)
    lock = FolderLock(place.folder, setting="--out")
    remove_unfinished(place.folder)
    if fresh:
        for folder in (place.calibration, place.train):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (place.speed, place.page, place.about):
            file.unlink(missing_ok=True)
    mine = describe()
    if not place.about.exists():
        write_document(place.about, mine)
    elif _read(place.about) != mine:
        raise ValueError(f"{place.folder} is of another version of the demo; --fresh begins anew")
    return lock


def _read(file: Path) -> Json:
    try:
        return read_document(file)
    except ValueError as error:
        raise ValueError(f"{error}; --fresh begins anew") from error


def think(on_text: Callable[[str], None], on_prompt: Callable[[str], None]) -> str:
    """A puzzle solved before one's eyes; what the verifier says."""
    sampling = GenerateSampling(temperature=1.0, top_p=1.0, max_tokens=400, seed=3)
    config = GenerateConfig(model=ModelConfig(name=MODEL, device="cpu"), sampling=sampling)
    session = Session.open(config)
    puzzle = PUZZLES[TASK]
    row = puzzle.row(0, LENGTH)
    on_prompt(row.prompt)
    (said,) = session.answer([row.prompt], on_text=lambda _, piece: on_text(piece))
    return puzzle.reward(row, said.text or "").reason


def calibrate(place: Place, progress: Progress | None = None) -> Surface:
    """The surface; every measured token is kept, so an interrupted one goes on.

    A plan says that the surface was whole.
    """
    if place.plan.exists():
        return Surface.load(place.surface)
    return api.calibrate(
        MODEL,
        device="cpu",
        out=place.calibration,
        task=TASK,
        length=LENGTH,
        max_tokens=MAX_TOKENS,
        budget=BUDGETS,
        dense_layers=[DENSE_LAYERS],
        bin=BIN,
        prompts=PROMPTS,
        first_round=PROMPTS,
        layer_groups=0,
        by_layer=False,
        progress=progress,
    )


def plan(place: Place) -> None:
    """The schedule. Lengths that no budget covers run dense.

    What a training began with does not change under it: the same surface gives the same plan.
    """
    if not place.train.exists() or not place.plan.exists():
        api.plan(place.surface, target=TARGET, allow_dense=True)


def gate_stopped(place: Place) -> bool:
    """Whether the gate has ended the training, which then does not go on."""
    actions = place.train / "actions.jsonl"
    lines = read_lines(actions, growing=True) if actions.exists() else []
    return any(line.get("kind") == "stop" for line in lines)


def time(place: Place, progress: Progress | None = None) -> Speed:
    """Dense against sparse, at the demo's length and at a long one."""
    if place.speed.exists():
        try:
            return Speed.load(place.speed)
        except ValueError as error:
            raise ValueError(f"{error}; --fresh begins anew") from error
    model = load(MODEL, device="cpu")
    source = of_task(model, TASK, length=LENGTH, count=GROUPS)
    found = dense_sparse.run(
        model,
        Schedule.load(place.schedule),
        [prompt.ids for prompt in source.prompts],
        samples=SAMPLES,
        tokens=MAX_TOKENS,
        context=LONG,
        budget=LONG_BUDGET,
        batch=LONG_ROWS,
        progress=progress,
    )
    found.save(place.speed)
    return found


def page(place: Place) -> Path:
    """The page, made anew from the files."""
    api.report(place.folder, title="Sparrow, the first five minutes", out=place.page)
    return place.page
