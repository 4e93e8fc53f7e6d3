"""`sparrow calibrate`: how far sparse decoding strays from a model, by budget and length."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.flow import layers_of
from sparrow.cli.output import AsJson, console, measuring, notes, plain, progress_bar, report

if TYPE_CHECKING:
    from sparrow.calibrate.collecting import Progress
    from sparrow.calibrate.surface import Surface
    from sparrow.dataflow.prompts import Source
    from sparrow.models import Decoder
    from sparrow.sparse import Schedule

PARTS = (16, 12, 8, 6, 4, 3, 2)  # default budgets: these parts of the longest length
BINS = 8
FEW_PROMPTS = 8  # below, nothing can be planned
PAGE = 16


def calibrate(
    model: Annotated[str, typer.Argument(help="tiny, small, smollm2-135m, a folder, a hub name.")],
    task: Annotated[
        str | None,
        typer.Option("--task", help="Prompts: assignments, countdown, graph or gym/NAME."),
    ] = None,
    length: Annotated[
        int, typer.Option("--length", "-l", help="Of a task's chains, about, in tokens.")
    ] = 500,
    rows: Annotated[
        Path | None, typer.Option("--rows", help='Prompts: JSON lines or parquet with "prompt".')
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option("--texts", help="Forced mode: a folder of texts, or standard (ten texts)."),
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option("--ids", help='Forced mode: JSON lines with "ids" and "start".'),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=3, help="Of every text.")] = 2048,
    start: Annotated[int, typer.Option("--start", min=1, help="Where texts begin to count.")] = 1,
    flow: Annotated[
        list[str] | None,
        typer.Option("--flow", help="Flows: built-in names or FILE[:name]; several."),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            "--budget", "-b", help="Tokens kept; several. Default: 1/16 to 1/2 of the length."
        ),
    ] = None,
    dense_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--dense-layers",
            help="Layers that stay dense, as 0,1, or none; given twice, both are measured.",
        ),
    ] = None,
    target: Annotated[
        list[float] | None,
        typer.Option("--target", "-t", help="p05 to keep; samples go where it is in doubt."),
    ] = None,
    bins: Annotated[
        int | None,
        typer.Option("--bin", min=16, help="Width of a bin of lengths; default: an eighth of all."),
    ] = None,
    prompts: Annotated[
        int,
        typer.Option("--prompts", "-n", min=1, help="Prompts, at most, for every budget and flow."),
    ] = 96,
    first_round: Annotated[
        int, typer.Option("--first-round", min=1, help="Prompts before anything is decided.")
    ] = 24,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers to every prompt.")] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=2, help="Longest answer; default: 2.5 x length."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Of sampling; both sides have it.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random draws.")] = 0,
    skip: Annotated[
        int, typer.Option("--skip", min=0, help="First row: a check should take new ones.")
    ] = 0,
    layer_groups: Annotated[
        int, typer.Option("--layer-groups", min=0, help="Groups of layers sparse alone; 0: none.")
    ] = 6,
    by_layer: Annotated[
        bool, typer.Option(help="Also measure budgets shared out by what layers lose.")
    ] = True,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Check run: measure this file or preset.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run a schedule that was made for another model.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, bfloat16: that of training.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to go on in; default: runs/calibrate-MODEL."),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Also draw the surface.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure how far sparse decoding strays, by flow, budget and length, with intervals.

    Answers prompts with sparse attention and compares each token with the dense policy, exactly;
    or reads given texts (forced mode). More samples go where the plan is still in doubt.

    For example: sparrow calibrate tiny --task assignments --length 300 -n 48
    """
    from sparrow.calibrate.calibration import Settings
    from sparrow.calibrate.collecting import Sampling
    from sparrow.dataflow.calibrate import Request
    from sparrow.dataflow.calibrate import calibrate as measure
    from sparrow.models import load

    if schedule is not None and (budget or dense_layers):
        raise ValueError("--budget and --dense-layers do not go with --schedule, which has its own")
    given = [name for name, value in _sources(task, rows, texts, ids).items() if value]
    if len(given) != 1:
        raise ValueError(f"give one of --task, --rows, --texts and --ids, got {given or 'none'}")
    with measuring(f"loading {model}"):
        loaded = load(model, dtype=dtype, device=device, report=report)
    source = _source(loaded, task, length, rows, texts, ids, tokens, start, prompts, skip)
    most = max_tokens or (round(2.5 * length) if task else 1024)
    longest = _longest(source, loaded, most)
    checked = None if schedule is None else _schedule(schedule, loaded, flow or [], force, skip)
    request = Request(
        flows=tuple(flow or ["block_mean"]),
        dense_layers=tuple(layers_of(text) for text in dense_layers or ["none"]),
        schedule=checked,
        flow=flow[0] if flow else None,
    )
    settings = Settings(
        budgets=tuple(sorted(set(budget or _budgets(longest)))),
        edges=_edges(longest, bins),
        targets=tuple(target or [_promised(checked)]),
        first_round=first_round,
        more=first_round,
        layer_groups=min(layer_groups, loaded.spec.layers),
        by_layer=by_layer,
    )
    sampling = Sampling(samples=samples, max_tokens=most, temperature=temperature, seed=seed)
    if len(source.prompts) < FEW_PROMPTS:
        report(f"{len(source.prompts)} prompts: sparrow plan wants {FEW_PROMPTS} in a bin at least")
    folder = out or Path("runs") / f"calibrate-{Path(model).name}"
    with _going_on(folder), _progress() as progress:
        surface = measure(
            loaded, source, request, settings, sampling, folder, progress=progress, report=report
        )
    _show(surface, folder, request.schedule is not None, plots, as_json)


def _sources(task: Any, rows: Any, texts: Any, ids: Any) -> dict[str, Any]:
    return {"--task": task, "--rows": rows, "--texts": texts, "--ids": ids}


def _source(
    model: "Decoder",
    task: str | None,
    length: int,
    rows: Path | None,
    texts: str | None,
    ids: Path | None,
    tokens: int,
    start: int,
    count: int,
    skip: int,
) -> "Source":
    from sparrow.calibrate.flows import texts as known
    from sparrow.dataflow import prompts

    if task is not None:
        return prompts.of_task(model, task, length=length, count=count, skip=skip)
    if rows is not None:
        return prompts.of_rows(model, rows, count=count, skip=skip)
    if texts is not None:
        found = known.standard(report) if texts == "standard" else known.from_folder(texts)
        return prompts.of_texts(model, found[skip : skip + count], tokens=tokens, start=start)
    assert ids is not None
    return prompts.of_ids(model, ids, count=count, skip=skip)


def _longest(source: "Source", model: "Decoder", most: int) -> int:
    """The greatest total length at which a token may be drawn."""
    own = max(len(prompt.ids) for prompt in source.prompts)
    return min(own + (most if source.mode == "generated" else 0), model.spec.max_positions)


def _budgets(longest: int) -> list[int]:
    """Whole pages, from the least that keeps a choice to half of the longest length."""
    return [max(4 * PAGE, longest // part // PAGE * PAGE) for part in PARTS]


def _edges(longest: int, width: int | None) -> tuple[int, ...]:
    wide = width or max(64, -(-longest // BINS // 64) * 64)
    return tuple(range(0, longest + wide, wide))


def _schedule(
    name: str, model: "Decoder", flows: Sequence[str], force: bool, skip: int
) -> "Schedule":
    """The schedule to check; one of another model is refused unless forced, which it then says."""
    from sparrow.sparse import named_schedule
    from sparrow.sparse.flows.loading import flow_of
    from sparrow.sparse.rule import Rule

    made, family = named_schedule(name), model.spec.family
    flow = flow_of(made, flows[0] if flows else None)
    if force:
        made = made.forced_onto(family=family, flow=flow.name)
    Rule.like(made, flow).check(made, page=made.page, family=family)
    report(f"checking {made.describe()}")
    if not skip:
        report("on the first prompts, which may be those that chose it: --skip takes others")
    return made


def _promised(schedule: "Schedule | None") -> float:
    """The target that a schedule was planned for, where its provenance says; else 0.86."""
    notes = {} if schedule is None else {note.key: note.text for note in schedule.provenance}
    found = re.search(r"acceptance at (0\.\d+)", notes.get("target", ""))
    return float(found[1]) if found else 0.86


@contextmanager
def _going_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        notes.print(f"stopped; the same command goes on from {plain(str(folder))}")
        raise typer.Exit(130) from None


@contextmanager
def _progress() -> "Iterator[Progress]":
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=None)
        shown = [""]

        def progress(done: int, total: int, what: str) -> None:
            if what.split(":")[0] != shown[0]:
                bar.reset(task)
                shown[0] = what.split(":")[0]
            bar.update(task, completed=done, total=total, description=plain(what))

        yield progress


def _show(surface: "Surface", folder: Path, check: bool, plots: bool, as_json: bool) -> None:
    from sparrow.calibrate import surface_tables
    from sparrow.dataflow.calibrate import CHECK, SURFACE
    from sparrow.records import to_dict

    file = folder / (CHECK if check else SURFACE)
    files = [file, *(_draw(file, folder / ("check-plots" if check else "plots")) if plots else ())]
    if as_json:
        print(json.dumps(to_dict(surface), indent=2))
        return
    if check:
        console.print(surface_tables.checked(surface, surface.targets[0]))
    else:
        for variant in surface.variants:
            console.print(surface_tables.tails(surface, variant.name))
        console.print(surface_tables.details(surface, surface.variants[0].name))
        if surface.layers:
            shares = next((v.shares for v in surface.variants if v.shares), ())
            console.print(surface_tables.layers(surface.layers, shares))
    for text in (*surface.warnings, *_doubts(surface.undecided)):
        notes.print(f"[yellow]warning:[/] {plain(text)}")
    report(f"written: {', '.join(map(str, files))}")
    if not check:
        report(f"next: sparrow plan {file}")


def _doubts(undecided: Sequence[str]) -> list[str]:
    if not undecided:
        return []
    return [f"the plan still depends on {len(undecided)} cells: {'; '.join(undecided[:3])}"]


def _draw(file: Path, folder: Path) -> list[Path]:
    from sparrow.report.surface_plots import write_surface

    return write_surface(file, folder)
