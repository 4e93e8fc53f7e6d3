"""`sparrow demo`: calibrate, plan, train and report with a shipped model, in minutes on a laptop.

Small enough for two cores and five minutes, real in every part. The settings were tuned: at this
length and with so few tokens to answer, `tiny` solves about six puzzles of ten at first, so there
is something to learn in a dozen steps. Layer 3 stays dense, the best choice in docs/calibrate.md.
Every stage resumes from its files.
"""

import shutil
import sys
import time
import tomllib
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from sparrow import __version__, api, files
from sparrow.cli.output import console, counting, plain, resumable, write
from sparrow.schema.base import Record
from sparrow.schema.bench import Speed
from sparrow.schema.options import option
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import MODEL as MODEL_FOLDER
from sparrow.schema.surface import Surface
from sparrow.schema.train import TrainConfig
from sparrow.schema.types import Directory
from sparrow.tasks import PUZZLES

MODEL, TASK = "tiny", "assignments"
TARGET = 0.86
LENGTH, MAX_TOKENS, MAX_PROMPT = 150, 192, 64
BUDGETS = (64, 80, 96, 112, 128, 160)
DENSE_LAYERS = (3,)
BIN = 48  # width of a bin of lengths, in tokens
PROMPTS = 48  # that every budget answers
STEPS = 12
GROUPS, SAMPLES = 4, 8  # prompts of a step, answers to each
HELD_OUT = 48  # puzzles of the validation, two answers each
LONG, LONG_BUDGET, LONG_ROWS = 8192, 1024, 16  # of the timed decode steps
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NUMBERS = 3  # of the page that are also printed
_say = partial(console.print, highlight=False)


class DemoConfig(Record):
    """`sparrow demo`."""

    out: Directory = option(Path("runs/demo"), "Folder for all results.")
    fresh: bool = option(False, "Start again; otherwise it resumes.")


class Place:
    """The paths of the demo."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calibration, self.train = folder, folder / "calibration", folder / "train"
        self.surface = self.calibration / "surface.json"
        self.schedule = self.calibration / "schedule.json"
        self.plan = self.calibration / "plan.json"
        self.speed, self.page = folder / "speed.json", folder / "report.html"
        self.about = folder / "demo.json"


def demo(
    config: DemoConfig, *, open: Annotated[bool, "Open the page in a browser at the end."] = False
) -> None:
    """See it work in minutes, on a CPU: calibrate, plan, train, evaluate, one page.

    A shipped model learns puzzles with sparse-attention rollouts. Nothing is downloaded. Stopped by
    Ctrl-C and started again, it resumes.

    For example:

      sparrow demo --open
    """
    place, begun = Place(config.out), time.monotonic()
    with closing(open_folder(place, fresh=config.fresh)), resumable(config.out):
        _think()
        _calibrate(place)
        _plan(place)
        _train(place)
        _time(place)
    api.report(place.folder, title="Sparrow, the first five minutes", out=place.page)
    _finish(place, time.monotonic() - begun)
    if open:
        webbrowser.open(place.page.resolve().as_uri())


def training(place: Place) -> TrainConfig:
    """RL under the planned schedule and the gate; a checkpoint every step, to resume anywhere."""
    run = {"name": "demo", "out": place.train, "steps": STEPS, "save_every": 1, "keep": 1}
    tables = {
        "model": {"name": MODEL, "device": "cpu"},
        "data": {"task": TASK, "length": LENGTH, "first": 10_000},
        "rollout": {
            "prompts": GROUPS,
            "samples": SAMPLES,
            "max_tokens": MAX_TOKENS,
            "max_prompt": MAX_PROMPT,
            "attention": {"schedule": str(place.schedule)},
        },
        # As in the published results of the demo; the default cap is 10 (bench/demo_caps.py).
        "algorithm": {"corrections": [{"use": "token-tis", "settings": {"cap": 2.0}}]},
        "batch": {"recompute": False},
        "optimiser": {"rate": 3e-4},
        "gate": {"target": TARGET},
        "validation": {"every": STEPS, "prompts": HELD_OUT, "samples": 2, "first": 1000},
        "run": {**run, "tensorboard": False},
    }
    return TrainConfig.model_validate(tables)


def describe() -> dict[str, Any]:
    """All settings that the demo's results depend on."""
    calibration = [TASK, LENGTH, MAX_TOKENS, list(BUDGETS), list(DENSE_LAYERS), BIN, PROMPTS]
    return {
        "sparrow": __version__,
        "calibration": calibration,
        "long": [LONG, LONG_BUDGET, LONG_ROWS],
        "training": training(Place(Path("."))).model_dump(mode="json"),
    }


def open_folder(place: Place, *, fresh: bool = False) -> files.FolderLock:
    """Open or create the folder of the demo, locked for this process.

    A folder of another version is refused.
    """
    if place.folder.exists() and not place.folder.is_dir():
        raise ValueError(f"{place.folder} is not a folder; choose another with --out")
    outputs = (place.calibration, place.train, place.speed, place.page)
    if not place.about.exists() and any(path.exists() for path in outputs):
        raise ValueError(f"{place.folder} holds other runs; choose another folder with --out")
    place.folder.mkdir(parents=True, exist_ok=True)
    files.refuse_links(outputs)
    with ExitStack() as on_failure:
        lock = on_failure.enter_context(closing(files.FolderLock(place.folder, setting="--out")))
        _prepare(place, fresh=fresh)
        on_failure.pop_all()
    return lock


def _prepare(place: Place, *, fresh: bool) -> None:
    """Delete leftovers of killed processes, or with `fresh` everything; check the version."""
    files.remove_unfinished(place.folder)
    if fresh:
        for folder in (place.calibration, place.train):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (place.speed, place.page, place.about):
            file.unlink(missing_ok=True)
    if not place.about.exists():
        files.write_document(place.about, describe())
    with _or_fresh():
        if files.read_document(place.about) != describe():
            raise ValueError(f"{place.folder} belongs to another version of the demo")


@contextmanager
def _or_fresh() -> Iterator[None]:
    """Add to an error about a file how to start again."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; --fresh starts again") from error


# The stages.


def _stage(title: str, **values: object) -> None:
    stages = TEXTS["stages"]
    number = list(stages).index(title) + 1
    console.rule(Text(f"{number} of {len(stages)} · {title}", style="bold"), align="left")
    _say(stages[title].format(**values))


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    seconds = time.monotonic() - begun
    _say(f"{what}, {seconds:.0f} s\n", style="dim")


def _think() -> None:
    """Stream the answer to a puzzle, and print the verdict."""
    console.rule(Text(f"Meet {MODEL}", style="bold"), align="left")
    _say("So small that it is part of the package. It thinks in a language of puzzles:")
    puzzle = PUZZLES[TASK]
    row = puzzle.row(0, LENGTH)
    _say(row.prompt, style="bold")
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 400, "seed": 3}
    (answer,) = api.generate(
        row.prompt,
        model={"name": MODEL, "device": "cpu"},
        sampling=sampling,
        on_text=lambda _, piece: write(piece, end=""),
    )
    verdict = puzzle.reward(row, answer.text or "").reason
    _say(f"\nthe verifier says: {verdict}\n", style="dim")


def _calibrate(place: Place) -> None:
    """Measure the surface; every measured token is saved, so it resumes."""
    _stage("calibrate", PROMPTS=PROMPTS, least=BUDGETS[0], most=BUDGETS[-1])
    with _timed("measured"), counting("measuring") as progress:
        if place.plan.exists():  # then the surface is complete
            surface = Surface.load(place.surface)
        else:
            surface = api.calibrate(
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
    last = max(cell.start for cell in surface.cells)
    for cell in sorted(surface.cells, key=lambda cell: cell.budget or 0):
        if cell.start == last:
            shown = f"{cell.mean:.3f}, but only {cell.p05:.3f} is reached by 95 % of the tokens"
            _say(f"  {cell.budget:4} tokens kept: mean {shown}")
    mean = f"acceptance (1: the same) at lengths {last} and more: the mean hides the tail"
    _say(f"  {mean}", style="dim")


def _plan(place: Place) -> None:
    """Plan the schedule; lengths without enough budget run dense.

    A training keeps its schedule: the same surface gives the same plan.
    """
    from sparrow.reporting.calibration import plan_table
    from sparrow.reporting.markdown import rich_table

    _stage("plan", TARGET=TARGET)
    with _timed("planned"):
        if not place.train.exists() or not place.plan.exists():
            api.plan(place.surface, target=TARGET, allow_dense=True)
        console.print(rich_table(plan_table(PlanFile.load(place.plan))))


def _train(place: Place) -> None:
    from sparrow.cli.train import GATED, run_training
    from sparrow.dataflow.stopping import GracefulShutdown

    _stage("train and evaluate", STEPS=STEPS)
    if (place.train / MODEL_FOLDER).exists() or gate_stopped(place):
        console.print("done before\n", style="dim")
        return
    with _timed("trained"), GracefulShutdown() as stopping:
        try:
            run_training(training(place), stopping, brief=True)
        except SystemExit as end:
            if end.code != GATED:
                raise
            console.print("That is what the gate is for; the page shows it.", style="yellow")


def gate_stopped(place: Place) -> bool:
    """Whether the gate has stopped the training."""
    actions = place.train / "actions.jsonl"
    lines = files.read_lines(actions, growing=True) if actions.exists() else []
    return any(line.get("kind") == "stop" for line in lines)


def _time(place: Place) -> None:
    """Dense against sparse, at the demo's length and at a long one."""
    from sparrow.reporting.training import describe_case, verdict
    from sparrow_recipes import dense_sparse

    _stage("time", LONG=LONG)
    with _timed("timed"), counting("measuring") as progress:
        if not place.speed.exists():
            workload = dense_sparse.Workload(
                *(TASK, LENGTH, GROUPS, SAMPLES, MAX_TOKENS, LONG, LONG_BUDGET, LONG_ROWS)
            )
            dense_sparse.run(MODEL, place.schedule, workload, progress).save(place.speed)
        with _or_fresh():
            speed = Speed.load(place.speed)
    for case in speed.cases:
        _say(f"  [bold]{verdict(case.speed_up)}[/]. {plain(describe_case(case))}", markup=True)


def _finish(place: Place, seconds: float) -> None:
    from sparrow.reporting.run_page import numbers
    from sparrow.schema.run_folder import read_run

    _stage("report")
    _say(f"  {place.page}\n", style="bold green", soft_wrap=True)
    for number in numbers(read_run(place.folder))[:NUMBERS]:
        value, name = plain(f"{number.value:>10}"), plain(f"{number.name} ({number.say})")
        _say(f"  [bold]{value}[/]  {name}", markup=True)
    minutes, left = divmod(round(seconds), 60)
    console.print(f"\n[dim]{minutes} min {left} s this time[/]\n\nWhat to try next:", markup=True)
    for words, why in TEXTS["next"].items():
        line = f"{_command()} {words.format(train=place.train)}"
        _say(f"  {plain(line)}\n      [dim]{plain(why)}[/]", soft_wrap=True, markup=True)


def _command() -> str:
    """The command to type: `make demo` runs a program that is not on the PATH."""
    program = Path(sys.argv[0])
    on_path = shutil.which("sparrow") is not None
    return str(program) if program.name == "sparrow" and not on_path else "sparrow"
