"""`sparrow calibrate`: how far sparse decoding strays from a model, by budget and length."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.flow import layers_of
from sparrow.cli.output import (
    MOST,
    MOST_ROW,
    MOST_TOKENS,
    OUTPUT,
    OutputJson,
    alert,
    console,
    measuring,
    notes,
    progress_bar,
    refuse_answers,
    report,
)

if TYPE_CHECKING:
    from sparrow.calibrate.collecting import Progress
    from sparrow.dataflow.prompts import Source
    from sparrow.models import Decoder
    from sparrow.schema.schedule import Schedule
    from sparrow.schema.surface import Surface

FEW_PROMPTS = 8  # below, nothing can be planned


_prompts = partial(typer.Option, rich_help_panel="Prompts: give one of task, rows, texts, ids")
_measured = partial(typer.Option, rich_help_panel="What is measured")
_layers = partial(typer.Option, rich_help_panel="Layers")
_amount = partial(typer.Option, rich_help_panel="How much")
_machine = partial(typer.Option, rich_help_panel="Machine")
_output = partial(typer.Option, rich_help_panel=OUTPUT)


def calibrate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="tiny, small, smollm2-135m, a folder, owner/name."),
    ],
    task: Annotated[
        str | None,
        _prompts("--task", metavar="NAME", help="assignments, countdown, graph or gym/NAME."),
    ] = None,
    length: Annotated[
        int,
        _prompts(
            "--length",
            "-l",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="About how long a task's answers are.",
        ),
    ] = 500,
    rows: Annotated[
        Path | None,
        _prompts("--rows", metavar="FILE", help='.jsonl or .parquet with a column "prompt".'),
    ] = None,
    texts: Annotated[
        str | None,
        _prompts(
            "--texts",
            metavar="FOLDER",
            help="Read texts instead of answering (forced mode): .txt, .py and .md files of a "
            "folder, or standard: ten known texts.",
        ),
    ] = None,
    ids: Annotated[
        Path | None,
        _prompts(
            "--ids",
            metavar="FILE",
            help='Read tokens instead of answering: JSON lines with "ids" and "start".',
        ),
    ] = None,
    tokens: Annotated[
        int,
        _prompts(
            "--tokens",
            min=3,
            max=MOST_TOKENS,
            metavar="N",
            help="With --texts: tokens of each text.",
        ),
    ] = 2048,
    start: Annotated[
        int,
        _prompts(
            "--start",
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help="With --texts: first tokens, not counted.",
        ),
    ] = 1,
    flow: Annotated[
        list[str] | None,
        _measured(
            "--flow",
            metavar="FLOW",
            help="What chooses the tokens to keep: a built-in name or FILE[:name]; can be given "
            "several times. Default: block_mean.",
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        _measured(
            "--budget",
            "-b",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="Tokens kept; can be given several times. Default: 1/16 to 1/2 of the longest.",
        ),
    ] = None,
    dense_layers: Annotated[
        list[str] | None,
        _layers(
            "--dense-layers",
            metavar="LAYERS",
            help="Layers that stay dense, such as 0,1, or none (the default). Given twice, both "
            "are measured.",
        ),
    ] = None,
    target: Annotated[
        list[float] | None,
        _measured(
            "--target",
            "-t",
            metavar="P05",
            help="The p05 of acceptance that you will plan for: more is measured near it. "
            "Default: 0.86.",
        ),
    ] = None,
    bins: Annotated[
        int | None,
        _measured(
            "--bin",
            min=16,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="Lengths are told apart in bins so wide. Default: an eighth of the longest.",
        ),
    ] = None,
    layer_groups: Annotated[
        int,
        _layers(
            "--layer-groups",
            min=0,
            max=MOST,
            metavar="N",
            help="Make so many groups of layers sparse one at a time, to see which lose most; "
            "0: none.",
        ),
    ] = 6,
    by_layer: Annotated[
        bool, _layers(help="Also measure larger budgets for the layers that lose most.")
    ] = True,
    schedule: Annotated[
        str | None,
        _measured(
            "--schedule",
            metavar="NAME",
            help="Check this schedule (a file or a preset) instead of measuring budgets.",
        ),
    ] = None,
    force: Annotated[
        bool, _measured("--force", help="Check a schedule that was made for another model.")
    ] = False,
    prompts: Annotated[
        int,
        _amount(
            "--prompts",
            "-n",
            min=1,
            max=MOST,
            metavar="N",
            help="Most prompts for a budget and flow.",
        ),
    ] = 96,
    first_round: Annotated[
        int,
        _amount(
            "--first-round",
            min=1,
            max=MOST,
            metavar="N",
            help="Prompts before more go where doubt is left.",
        ),
    ] = 24,
    skip: Annotated[
        int,
        _amount(
            "--skip",
            min=0,
            max=MOST_ROW,
            metavar="N",
            help="Leave out the first prompts: a check does.",
        ),
    ] = 0,
    samples: Annotated[
        int, _amount("--samples", min=1, max=MOST, metavar="N", help="Answers to each prompt.")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        _amount(
            "--max-tokens",
            min=2,
            max=MOST_TOKENS,
            metavar="N",
            help="Longest answer. Default: 2.5 x length for a task, else 1024.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        _amount("--temperature", metavar="T", help="Of sampling; acceptance is at the same one."),
    ] = 1.0,
    seed: Annotated[
        int, _amount("--seed", min=0, max=MOST_ROW, metavar="N", help="Of the random draws.")
    ] = 0,
    device: Annotated[
        str,
        _machine("--device", metavar="NAME", help="auto (a GPU where there is one), cpu, cuda."),
    ] = "auto",
    dtype: Annotated[
        str,
        _machine(
            "--dtype",
            metavar="NAME",
            help="auto, float32 or bfloat16: take the one that you train with.",
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        _output("--out", "-o", metavar="FOLDER", help="Default: runs/calibrate-MODEL."),
    ] = None,
    plots: Annotated[bool, _output(help="Also draw the surface.")] = True,
    as_json: OutputJson = False,
) -> None:
    """Measure how far sparse decoding strays from a model, by tokens kept and by length.

    The model answers prompts with sparse attention, and each token's distribution is compared with
    that of dense attention, exactly: acceptance is what the two share, 1 where they are equal. Its
    p05, the value that 5 % of tokens fall below, is printed for every budget and length, with
    intervals over prompts, and written to surface.json for `sparrow plan`. Minutes for tiny on a
    CPU. Stopped and started again, it goes on.

    For example:

      sparrow calibrate tiny --task assignments --length 300 -n 48
      sparrow plan runs/calibrate-tiny/surface.json --target 0.86

    Exit codes: 0 measured, 2 a mistake in the options, 130 stopped by Ctrl-C.
    """
    from sparrow.calibrate.calibration import Settings
    from sparrow.calibrate.collecting import Sampling
    from sparrow.dataflow.calibrate import Request, budgets_for, edges_for, longest_of
    from sparrow.dataflow.calibrate import calibrate as measure
    from sparrow.models import load

    refuse_answers(prompts, samples)
    if schedule is not None and (budget or dense_layers):
        raise ValueError("--budget and --dense-layers do not go with --schedule, which has its own")
    given = [name for name, value in _sources(task, rows, texts, ids).items() if value]
    if len(given) != 1:
        raise ValueError(f"give one of --task, --rows, --texts and --ids, got {given or 'none'}")
    with measuring(f"loading {model}"):
        loaded = load(model, dtype=dtype, device=device, report=report)
    source = _source(loaded, task, length, rows, texts, ids, tokens, start, prompts, skip)
    most = max_tokens or (round(2.5 * length) if task else 1024)
    longest = longest_of(source, loaded, most)
    checked = None if schedule is None else _schedule(schedule, loaded, flow or [], force, skip)
    request = Request(
        flows=tuple(flow or ["block_mean"]),
        dense_layers=tuple(layers_of(text) for text in dense_layers or ["none"]),
        schedule=checked,
        flow=flow[0] if flow else None,
    )
    settings = Settings(
        budgets=tuple(sorted(set(budget or budgets_for(longest)))),
        edges=edges_for(longest, bins),
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
    with _going_on(folder), progress_of() as progress:
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


def _schedule(
    name: str, model: "Decoder", flows: Sequence[str], force: bool, skip: int
) -> "Schedule":
    """The schedule to check; one of another model is refused unless forced, which it then says."""
    from sparrow.sparse import named_schedule
    from sparrow.sparse.flows.loading import resolve_flow
    from sparrow.sparse.rule import Rule

    made, family = named_schedule(name), model.spec.family
    flow = resolve_flow(made, flows[0] if flows else None, force=force)
    if force:
        made = made.forced_onto(family=family, flow=flow.name, flow_digest=flow.digest)
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
        notes.print(f"stopped; the same command goes on from {folder}")
        raise typer.Exit(130) from None


@contextmanager
def progress_of() -> "Iterator[Progress]":
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=None)
        shown = [""]

        def progress(done: int, total: int, what: str) -> None:
            if what.split(":")[0] != shown[0]:
                bar.reset(task)
                shown[0] = what.split(":")[0]
            bar.update(task, completed=done, total=total, description=what)

        yield progress


def _show(surface: "Surface", folder: Path, check: bool, plots: bool, as_json: bool) -> None:
    from sparrow.calibrate import tables
    from sparrow.dataflow.calibrate import CHECK, SURFACE
    from sparrow.schema.base import to_dict

    file = folder / (CHECK if check else SURFACE)
    files = [file, *(_draw(file, folder / ("check-plots" if check else "plots")) if plots else ())]
    if as_json:
        print(json.dumps(to_dict(surface), indent=2))
        return
    if check:
        console.print(tables.check_table(surface, surface.targets[0]))
    else:
        for variant in surface.variants:
            console.print(tables.tails_table(surface, variant.name))
        console.print(tables.details_table(surface, surface.variants[0].name))
        if surface.layers:
            shares = next((v.shares for v in surface.variants if v.shares), ())
            console.print(tables.layers_table(surface.layers, shares))
    for text in (*surface.warnings, *_doubts(surface.undecided)):
        alert("warning:", text, "yellow")
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
