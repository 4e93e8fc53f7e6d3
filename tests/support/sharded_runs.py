"""Whole runs on ranks, one after the other in the same processes."""

import os
from pathlib import Path
from typing import Any

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.local.run import open_run
from sparrow.dataflow.stopping import GracefulShutdown, Stopped
from sparrow.schema.train import TrainConfig
from sparrow.training.world import World
from support.training import SPARSE, config, settings

STEPS = 3


def changes(**run: Any) -> dict[str, dict[str, Any]]:
    """Three prompts, so that two ranks have unequally much to do; acceptance is watched."""
    return {
        "rollout": {"prompts": 3, "attention": SPARSE, "episode": "support.rank_faults:episode"},
        "validation": {"every": 2, "rows": 2},
        "run": {"steps": STEPS, "save_every": 1, "keep": 9, **run},
    }


def plain(model: Path, folder: Path) -> dict[str, Any]:
    chosen, base = changes(), settings(model, folder)
    return {name: {**base.get(name, {}), **chosen.get(name, {})} for name in {*base, *chosen}}


def of(model: Path, folder: Path, **run: Any) -> TrainConfig:
    return config(model, folder, **changes(**run))


def several(world: World, folder: Path) -> dict[str, Any]:
    """What each rank hears; the folders tell the rest."""
    model = folder / "model"
    return {
        "resumed": ended(of(model, folder / "resumed")),
        "raise": ended(of(model, folder / "raise"), fault="raise"),
        "stop": ended(of(model, folder / "stop", save_every=9), fault="stop"),
        "stopped": ended(of(model, folder / "stop", save_every=9)),
        "idle": ended(config(model, folder / "idle", rollout={"prompts": 1})),
        **{
            teacher: ended(distilled(model, folder / f"distilled-{teacher}", teacher))
            for teacher in ("new", "old")
        },
    }


def distilled(model: Path, folder: Path, teacher: str) -> TrainConfig:
    """Two steps in which an adapter of the actor is distilled."""
    settings = {"rank": 2, "rate": 1e-3, "teacher": teacher}
    rollout = {"prompts": 3, "attention": SPARSE, "max_tokens": 80, "distill": settings}
    return config(model, folder, rollout=rollout, run={"steps": 2})


def served(world: World, folder: Path) -> tuple[str, int]:
    """A run by the servers that a file names."""
    urls = (folder / "urls.txt").read_text().split()
    episode = "support.rank_faults:episode"
    rollout = {"prompts": 3, "attention": SPARSE, "episode": episode, "url": urls}
    return ended(config(folder / "model", folder / "run", rollout=rollout, run={"steps": STEPS}))


def ended(chosen: TrainConfig, fault: str = "") -> tuple[str, int]:
    """How a run ended, after how many steps."""
    os.environ["SPARROW_RANK_FAULT"] = fault
    step = -1
    try:
        with GracefulShutdown() as stopping:
            run = open_run(chosen, stopping=stopping)
            try:
                return str(train(run)), run.step
            finally:
                step = run.step
                run.close()
    except (Stopped, EpisodeFailed, ValueError) as error:
        return f"{type(error).__name__}: {error}", step
