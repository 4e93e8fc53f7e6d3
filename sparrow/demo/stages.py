"""What the demo does, stage by stage. Each finds what is there already and does the rest."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparrow import api
from sparrow.bench import dense_sparse
from sparrow.calibrate.collecting import Progress
from sparrow.dataflow.prompts import of_task
from sparrow.demo import recipe
from sparrow.demo.recipe import Place
from sparrow.engine.answer import Session
from sparrow.files import (
    FolderLock,
    Json,
    read_document,
    read_lines,
    refuse_links,
    remove_unfinished,
    write_document,
    write_whole,
)
from sparrow.models import load
from sparrow.schema.base import to_dict
from sparrow.schema.common import GenerateConfig, GenerateSampling, ModelConfig
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.tasks import PUZZLES


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
    mine = recipe.describe()
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
    config = GenerateConfig(model=ModelConfig(name=recipe.MODEL, device="cpu"), sampling=sampling)
    session = Session.open(config)
    puzzle = PUZZLES[recipe.TASK]
    row = puzzle.row(0, recipe.LENGTH)
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
        load(recipe.MODEL, device="cpu"),
        place.calibration,
        task=recipe.TASK,
        length=recipe.LENGTH,
        max_tokens=recipe.MAX_TOKENS,
        budgets=recipe.BUDGETS,
        dense_layers=[recipe.DENSE_LAYERS],
        bin=recipe.BIN,
        prompts=recipe.PROMPTS,
        first_round=recipe.PROMPTS,
        layer_groups=0,
        by_layer=False,
        progress=progress,
    )


def plan(place: Place) -> None:
    """The schedule. Lengths that no budget covers run dense.

    What a training began with does not change under it: the same surface gives the same plan.
    """
    if not place.train.exists() or not place.plan.exists():
        api.plan(place.surface, recipe.TARGET, allow_dense=True, folder=place.calibration)


def gate_stopped(place: Place) -> bool:
    """Whether the gate has ended the training, which then does not go on."""
    actions = place.train / "actions.jsonl"
    lines = read_lines(actions, growing=True) if actions.exists() else []
    return any(line.get("kind") == "stop" for line in lines)


def time(place: Place, progress: Progress | None = None) -> dict[str, Any]:
    """Dense against sparse, at the demo's length and at a long one."""
    if place.speed.exists():
        known = _read(place.speed)
        if not known.get("cases"):
            raise ValueError(f"{place.speed} is broken (no cases); --fresh begins anew")
        return known
    model = load(recipe.MODEL, device="cpu")
    source = of_task(model, recipe.TASK, length=recipe.LENGTH, count=recipe.GROUPS)
    found = dense_sparse.run(
        model,
        Schedule.load(place.schedule),
        [prompt.ids for prompt in source.prompts],
        samples=recipe.SAMPLES,
        tokens=recipe.MAX_TOKENS,
        context=recipe.LONG,
        budget=recipe.LONG_BUDGET,
        batch=recipe.LONG_ROWS,
        progress=progress,
    )
    found.save(place.speed)
    return to_dict(found)


def page(place: Place) -> Path:
    """The page, made anew from the files."""
    text = api.report(place.folder, title="Sparrow, the first five minutes")
    write_whole(place.page, [text])
    return place.page
