"""`sparrow plan`: from a surface to the cheapest schedule that keeps a target."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparrow.cli.output import AsJson, console, notes, plain, report

if TYPE_CHECKING:
    from sparrow.calibrate.planning.files import Planned
    from sparrow.calibrate.planning.hardware import Hardware
    from sparrow.calibrate.planning.pricing import Ground
    from sparrow.calibrate.surface import Surface


def plan(
    surface: Annotated[Path, typer.Argument(help="What sparrow calibrate wrote: surface.json.")],
    target: Annotated[
        float, typer.Option("--target", "-t", help="p05 of acceptance to keep.")
    ] = 0.86,
    by: Annotated[
        str, typer.Option("--by", help="low: the interval's lower end reaches it; or p05 itself.")
    ] = "low",
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="Only these flows of the surface.")
    ] = None,
    allow_dense: Annotated[
        bool, typer.Option("--allow-dense", help="Bins that nothing reaches run dense.")
    ] = False,
    hardware: Annotated[
        str, typer.Option("--hardware", help="A known machine (h200) or a .json file of one.")
    ] = "h200",
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", help="Instead: bytes a second of a machine nobody measured."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", help="Bytes of it for weights, keys and values.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option("--flops", help="Its operations a second, for eFLOPs.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths", help="Workload: published, surface (as measured), or a file of lengths."
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Prompts of a rollout.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Answers to a prompt; 8 by default.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", min=1, help="Of a prompt; default: as measured, or 16."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Sequences at once, at most.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="A preset or a schedule file to set beside it.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Surface of a check run to show beside it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder; default: that of the surface.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Also draw the plan.")] = True,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest budgets that keep p05 at a target, and what they promise.

    Writes schedule.json, to use in rollouts, and plan.json. For example:
    sparrow plan runs/calibrate-tiny/surface.json --target 0.86. Exits 1 where the target cannot be
    reached, with the nearest one that can.
    """
    from sparrow.calibrate.planning import files as plan_files
    from sparrow.calibrate.planning.plan import Unreachable
    from sparrow.calibrate.surface import Surface
    from sparrow.sparse import named_schedule

    if by not in ("low", "p05"):
        raise ValueError(f"--by {by}: give low or p05")
    chosen: Literal["low", "p05"] = "low" if by == "low" else "p05"
    found = Surface.load(surface)
    ground = _ground(
        found,
        _machine(hardware, bandwidth, memory, flops),
        lengths,
        prompts,
        samples,
        batch,
        prompt_tokens,
    )
    try:
        planned = plan_files.make(
            ground,
            target,
            by=chosen,
            allow_dense=allow_dense,
            variants=variant or (),
            compare=None if compare is None else named_schedule(compare),
            check=None if check is None else Surface.load(check),
        )
    except Unreachable as error:
        notes.print(f"[bold red]not reached:[/] {plain(str(error))}")
        raise typer.Exit(1) from None
    folder = out or surface.parent
    files = plan_files.write(planned, folder)
    _show(planned, [*files, *(_draw(folder) if plots else ())], as_json)


def _ground(
    surface: "Surface",
    hardware: "Hardware",
    lengths: str | None,
    prompts: int | None,
    samples: int | None,
    batch: int | None,
    prompt_tokens: int | None,
) -> "Ground":
    from sparrow.calibrate.planning.plan import measured_to
    from sparrow.calibrate.planning.pricing import Ground
    from sparrow.calibrate.planning.workload import PROMPT, workload
    from sparrow.models.spec import spec_from_hf

    usual = "surface" if surface.mode == "generated" and surface.lengths else "published"
    if samples is not None and prompts is None:
        raise ValueError("--samples goes with --prompts: together they say how many sequences run")
    name = lengths or usual
    known = surface.prompt_tokens if name == "surface" else 0
    work = workload(
        name,
        measured=surface.lengths,
        prompts=prompts,
        samples=samples or 8,
        most=batch,
        cutoff=measured_to(surface),
        prompt=prompt_tokens or known or PROMPT,
    )
    spec = spec_from_hf(_shape(surface), "the surface's model")
    return Ground(surface=surface, spec=spec, hardware=hardware, workload=work)


def _shape(surface: "Surface") -> dict[str, Any]:
    try:
        shape = json.loads(surface.shape)
    except ValueError as error:
        raise ValueError(f"the surface's shape is no JSON: {error}") from error
    if not isinstance(shape, dict):
        raise ValueError(f"the surface's shape is no config.json of a model: {surface.shape:.60}")
    return shape


def _machine(
    name: str, bandwidth: float | None, memory: float | None, flops: float | None
) -> "Hardware":
    from sparrow.calibrate.planning.hardware import Hardware

    if bandwidth is None and memory is None and flops is None:
        return Hardware.load(name)
    if bandwidth is None or memory is None or flops is None:
        raise ValueError("--bandwidth, --memory and --flops go together")
    if not all(0 < figure < 1e30 for figure in (bandwidth, memory, flops)):
        raise ValueError("--bandwidth, --memory and --flops: allowed are numbers above 0")
    return Hardware.plain(
        "a machine by its bytes",
        bytes_per_s=bandwidth,
        flops_per_s=flops,
        memory=int(memory),
        reserve=0,
    )


def _show(planned: "Planned", files: list[Path], as_json: bool) -> None:
    from sparrow.calibrate.planning import files as plan_files
    from sparrow.calibrate.planning import tables as plan_tables

    if as_json:
        print(json.dumps(plan_files.as_json(planned), indent=2))
        return
    for table in plan_tables.tables(planned):
        console.print(table)
    for text in planned.best.notes:
        notes.print(f"[yellow]note:[/] {plain(text)}")
    report(f"written: {', '.join(map(str, files))}")
    report(
        f"check it on new prompts: the options of the calibration, with --schedule {files[0]} and "
        "--skip as many rows as it used"
    )


def _draw(folder: Path) -> list[Path]:
    from sparrow.report.plan_plots import write_plan

    return write_plan(folder / "plan.json", folder / "plots")
