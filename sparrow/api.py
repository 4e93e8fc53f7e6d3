"""Sparrow from Python: what the verbs do, as functions with their defaults.

    from sparrow import api

    surface = api.calibrate("tiny", "runs/mine", task="assignments", length=150)
    planned = api.plan(surface, target=0.86, folder="runs/mine")
    trained = api.train("configs/train/tiny.toml", "--run.steps=12")
    page = api.report("runs/mine", trained.parent)

Each leaves files behind and goes on from those it finds, as the verbs do.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from sparrow.calibrate.calibration import Settings
from sparrow.calibrate.collecting import Progress, Sampling
from sparrow.calibrate.planning import plan as planning
from sparrow.calibrate.planning.context import PlanningContext
from sparrow.calibrate.planning.hardware import Hardware
from sparrow.dataflow import prompts as sources
from sparrow.dataflow.calibrate import Request, budgets_for, edges_for, longest_of
from sparrow.dataflow.calibrate import calibrate as measure
from sparrow.dataflow.local.loop import train as train_run
from sparrow.dataflow.local.opening import close_run, open_run
from sparrow.dataflow.local.watching import Watcher
from sparrow.models import Decoder, load
from sparrow.report.page.html import html
from sparrow.report.page.markdown import markdown
from sparrow.report.page.story import page_of
from sparrow.schema.loading import load_config
from sparrow.schema.plan import By, PlanFile
from sparrow.schema.surface import Surface
from sparrow.schema.train import TrainConfig

ROOM = 2.5  # longest answer to a puzzle: so many times its length


def calibrate(
    model: Decoder | str,
    folder: str | Path,
    *,
    task: str | None = None,
    length: int = 500,
    rows: str | Path | None = None,
    budgets: Sequence[int] = (),
    flows: Sequence[str] = ("block_mean",),
    dense_layers: Sequence[Sequence[int]] = ((),),
    target: float = 0.86,
    bin: int | None = None,
    prompts: int = 96,
    first_round: int = 24,
    skip: int = 0,
    samples: int = 1,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    layer_groups: int = 6,
    by_layer: bool = True,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    report: Callable[[str], None] | None = None,
) -> Surface:
    """Measure acceptance by flow, budget and length on prompts of a task or of a file of rows.

    Options mean what they mean in `sparrow calibrate` and have its defaults; device and dtype are
    for a model by its name. The verb can also read texts or ids, take several targets, check a
    schedule and draw. The surface is also in folder/surface.json.
    """
    if (task is None) == (rows is None):
        raise ValueError(f"calibrate: got task {task!r} and rows {rows!r}, allowed: one of them")
    loaded = _model(model, device=device, dtype=dtype, report=report)
    if task is not None:
        source = sources.of_task(loaded, task, length=length, count=prompts, skip=skip)
    else:
        assert rows is not None
        source = sources.of_rows(loaded, rows, count=prompts, skip=skip)
    most = max_tokens or (round(ROOM * length) if task else 1024)
    longest = longest_of(source, loaded, most)
    request = Request(flows=tuple(flows), dense_layers=tuple(map(tuple, dense_layers)))
    settings = Settings(
        budgets=tuple(sorted(set(budgets or budgets_for(longest)))),
        edges=edges_for(longest, bin),
        targets=(target,),
        first_round=first_round,
        more=first_round,
        layer_groups=min(layer_groups, loaded.spec.layers),
        by_layer=by_layer,
    )
    sampling = Sampling(samples=samples, max_tokens=most, temperature=temperature, seed=seed)
    return measure(
        loaded, source, request, settings, sampling, folder, progress=progress, report=report
    )


def _model(
    model: Decoder | str, *, device: str, dtype: str, report: Callable[[str], None] | None
) -> Decoder:
    if isinstance(model, str):
        return load(model, device=device, dtype=dtype, report=report)
    if (device, dtype) != ("auto", "auto"):
        raise ValueError(
            f"calibrate: got device {device!r} and dtype {dtype!r} for a loaded model, allowed: "
            "with a model by its name"
        )
    return model


def plan(
    surface: Surface | str | Path,
    target: float = 0.86,
    *,
    by: By = "low",
    allow_dense: bool = False,
    hardware: str = "h200",
    folder: str | Path | None = None,
) -> PlanFile:
    """The cheapest schedule that keeps the target: `planned.schedule`.

    Options as in `sparrow plan`, which can also choose among variants, price other machines and
    workloads, and set other schedules beside it. With a folder, schedule.json and plan.json are
    written there; the verb writes them beside the surface. Raises Unreachable where no measured
    budget keeps the target.
    """
    found = surface if isinstance(surface, Surface) else Surface.load(surface)
    context = PlanningContext.of(found, Hardware.load(hardware))
    planned = planning.plan(context, target, by=by, allow_dense=allow_dense)
    if folder is not None:
        planning.write(planned, folder)
    return planned


def train(
    config: TrainConfig | str | Path,
    *settings: str,
    watch: Watcher | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Train, or go on, and give the folder of the trained model.

    Settings are as on the command line, such as "--run.steps=50".
    """
    if isinstance(config, TrainConfig):
        if settings:
            raise ValueError(
                f"train: got settings {settings} for a made configuration, allowed: none"
            )
        loaded = config
    else:
        loaded = load_config(TrainConfig, [Path(config)], settings)
    run = open_run(loaded, watch=watch, report=report)
    try:
        return train_run(run)
    finally:
        close_run(run)


def report(
    *runs: str | Path, format: Literal["html", "md"] = "html", title: str | None = None
) -> str:
    """The page of some run directories as one text."""
    page = page_of(runs, title=title)
    if format not in ("html", "md"):
        raise ValueError(f"report: got format {format!r}, allowed: html or md")
    return html(page) if format == "html" else markdown(page)
