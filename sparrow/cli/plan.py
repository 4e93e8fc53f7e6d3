"""`sparrow plan`: from a surface to the cheapest schedule that keeps a target."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparrow.cli.output import MOST, MOST_TOKENS, OUTPUT, OutputJson, alert, console, report

if TYPE_CHECKING:
    from sparrow.calibrate.planning.hardware import Hardware
    from sparrow.schema.plan import PlanFile


_target = partial(typer.Option, rich_help_panel="What to keep")
_hardware = partial(typer.Option, rich_help_panel="The machine of the rollouts")
_work = partial(typer.Option, rich_help_panel="The workload whose time is predicted")
_output = partial(typer.Option, rich_help_panel=OUTPUT)


def plan(
    surface: Annotated[
        Path, typer.Argument(metavar="SURFACE", help="surface.json of `sparrow calibrate`.")
    ],
    target: Annotated[
        float,
        _target(
            "--target",
            "-t",
            metavar="P05",
            help="The p05 of acceptance to keep at every length, 0 to 1.",
        ),
    ] = 0.86,
    by: Annotated[
        str,
        _target(
            "--by",
            metavar="low|p05",
            help="What must reach the target: low, the lower end of p05's 95 % interval, or p05 "
            "itself.",
        ),
    ] = "low",
    variant: Annotated[
        list[str] | None,
        _target(
            "--variant",
            metavar="NAME",
            help="Choose among these variants of the surface alone; can be given several times.",
        ),
    ] = None,
    allow_dense: Annotated[
        bool, _target("--allow-dense", help="Go dense at lengths where no budget is enough.")
    ] = False,
    hardware: Annotated[
        str, _hardware("--hardware", metavar="NAME", help="A measured machine: h200, or a .json.")
    ] = "h200",
    bandwidth: Annotated[
        float | None,
        _hardware(
            "--bandwidth",
            metavar="BYTES",
            help="For any other machine: bytes of memory that it reads in a second, such as "
            "2e12; with --memory and --flops.",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        _hardware("--memory", metavar="BYTES", help="Its memory for weights, keys and values."),
    ] = None,
    flops: Annotated[
        float | None,
        _hardware("--flops", metavar="FLOPS", help="Its operations in a second, such as 3e14."),
    ] = None,
    lengths: Annotated[
        str | None,
        _work(
            "--lengths",
            metavar="NAME",
            help="Lengths of the answers: surface (as measured; the default where answers were), "
            "published, or a file.",
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        _work("--prompts", min=1, max=MOST, metavar="N", help="Prompts of one rollout."),
    ] = None,
    samples: Annotated[
        int | None,
        _work(
            "--samples",
            min=1,
            max=MOST,
            metavar="N",
            help="Answers to each, with --prompts. Default: 8.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        _work(
            "--prompt-tokens",
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help="Length of a prompt. Default: as measured, or 16.",
        ),
    ] = None,
    batch: Annotated[
        int | None, _work("--batch", min=1, max=MOST, metavar="N", help="Most sequences at once.")
    ] = None,
    compare: Annotated[
        str | None,
        _output("--compare", metavar="NAME", help="A preset or schedule file to set beside it."),
    ] = None,
    check: Annotated[
        Path | None,
        _output("--check", metavar="FILE", help="check.json of a check run to set beside it."),
    ] = None,
    out: Annotated[
        Path | None,
        _output("--out", "-o", metavar="FOLDER", help="Default: the folder of the surface."),
    ] = None,
    plots: Annotated[bool, _output(help="Also draw the plan.")] = True,
    as_json: OutputJson = False,
) -> None:
    """Find the cheapest budgets that keep acceptance at a target, and what they promise.

    From the surface of `sparrow calibrate` it takes, at every length, budgets whose p05 reaches the
    target, and of those the set that costs the least time on a machine. Writes schedule.json, which
    generate, eval and train take, and plan.json.

    For example:

      sparrow plan runs/calibrate-tiny/surface.json --target 0.86
      sparrow plan runs/calibrate-tiny/surface.json --compare qwen3-1.7b-0.86

    Exit codes: 0 planned, 1 the target cannot be kept (the nearest one that can is said), 2 a
    mistake in the options.
    """
    from sparrow.calibrate.planning import plan as planning
    from sparrow.calibrate.planning.context import PlanningContext
    from sparrow.schema.surface import Surface
    from sparrow.sparse import named_schedule

    if by not in ("low", "p05"):
        raise ValueError(f"--by {by}: give low or p05")
    chosen: Literal["low", "p05"] = "low" if by == "low" else "p05"
    found = Surface.load(surface)
    if samples is not None and prompts is None:
        raise ValueError("--samples goes with --prompts: together they say how many sequences run")
    context = PlanningContext.of(
        found,
        _priced_by(hardware, bandwidth, memory, flops),
        lengths=lengths,
        prompts=prompts,
        samples=samples or 8,
        batch=batch,
        prompt_tokens=prompt_tokens,
    )
    try:
        planned = planning.plan(
            context,
            target,
            by=chosen,
            allow_dense=allow_dense,
            variants=variant or (),
            compare=None if compare is None else named_schedule(compare),
            check=None if check is None else Surface.load(check),
        )
    except planning.Unreachable as error:
        alert("not reached:", str(error))
        raise typer.Exit(1) from None
    folder = out or surface.parent
    files = planning.write(planned, folder)
    _show(planned, [*files, *(_draw(folder) if plots else ())], as_json)


def _priced_by(
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


def _show(planned: "PlanFile", files: list[Path], as_json: bool) -> None:
    from sparrow.calibrate import tables
    from sparrow.schema.base import to_dict

    if as_json:
        print(json.dumps(to_dict(planned), indent=2))
        return
    for table in tables.plan_tables(planned):
        console.print(table)
    for text in planned.notes:
        alert("note:", text, "yellow")
    report(f"written: {', '.join(map(str, files))}")
    report(
        f"check it on new prompts: the options of the calibration, with --schedule {files[0]} and "
        "--skip as many rows as it used"
    )


def _draw(folder: Path) -> list[Path]:
    from sparrow.report.plan_plots import write_plan

    return write_plan(folder / "plan.json", folder / "plots")
