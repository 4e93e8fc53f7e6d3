"""Verbs of the command line: each calls its API function and prints the result.

The first parameter is the configuration; further ones are options of the command line alone.
"""

import json as jsons
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature, unwrap
from pathlib import Path
from typing import Annotated, Any, get_args

from rich.table import Table
from rich.text import Text

from sparrow import api
from sparrow.calibration.tables import (
    campaign_table,
    check_table,
    distill_tables,
    drafts_table,
    figures,
    flow_check_tables,
    flow_score_table,
    layers_table,
    misses_tables,
    plan_tables,
    tails_tables,
)
from sparrow.cli.output import (
    AsJson,
    alert,
    console,
    counting,
    measuring,
    notes,
    plain,
    resumable,
    write,
    write_json,
)
from sparrow.cli.output import report as note
from sparrow.files import printable
from sparrow.schema.base import to_dict
from sparrow.schema.calibrate import CalibrateConfig, PlanConfig
from sparrow.schema.campaign import (
    CAMPAIGN,
    FRONT,
    Campaign,
    FlowLanguageConfig,
    FlowLoopConfig,
    FlowPublishConfig,
)
from sparrow.schema.common import (
    DoctorConfig,
    FetchConfig,
    GenerateConfig,
    PresetsConfig,
    PuzzleConfig,
    ReportConfig,
)
from sparrow.schema.distill import DistillConfig
from sparrow.schema.doctor import Advice, Examination
from sparrow.schema.evaluation import Estimate, EvalConfig, Evaluation, Outcome
from sparrow.schema.flow import FlowCheckConfig, FlowScoreConfig, FlowTextsConfig
from sparrow.schema.serve import ServeConfig
from sparrow.schema.sft import SFT, SftConfig
from sparrow.schema.simulation import SimulateConfig
from sparrow.schema.surface import Surface

Plots = Annotated[bool, "Also draw what is printed."]
GIB = 2**30
SECTIONS = {
    "devices": ("cores", "gpus", "driver"),
    "models": ("models",),
    "memory": ("fits",),
    "checks": ("self_test", "kernels", "broken"),
}


def fetch(config: FetchConfig) -> None:
    with notes.status(plain(f"fetching {config.name}")):
        folder = api.fetch(config, report=note)
    write(str(folder))


def presets(config: PresetsConfig) -> None:
    schedules = api.presets(config)
    if config.name is not None:
        write_json(schedules[0])
        return
    kept = {f"keeps_at_{at // 1024}K": at for at in (2048, 8192, 16384, 32768)}
    rows = [
        dict(schedule) | {name: schedule.budget(at) for name, at in kept.items()}
        for schedule in schedules
    ]
    console.print(figures("", rows, " ".join(["name", "model", "family", *kept])))


def calibrate(config: CalibrateConfig, *, plots: Plots = True, json: AsJson = False) -> None:
    from sparrow.dataflow.calibrate import CHECK, SURFACE

    check = config.schedule is not None
    with resumable(config.folder), counting(f"loading {config.model}") as progress:
        surface = api.calibrate(config, progress=progress, report=note)
    files = [config.folder / (CHECK if check else SURFACE)]
    if plots:
        from sparrow.reporting.calibration import surface_figures
        from sparrow.reporting.render import write_figures

        place = config.folder / ("check-plots" if check else "plots")
        files += write_figures(surface_figures(surface), place)
    undecided = surface.undecided
    warning = f"the plan still depends on {len(undecided)} cells: {'; '.join(undecided[:3])}"
    warnings = (*surface.warnings, *([warning] if undecided else []))
    if json:
        write_json(surface)
        return
    _show_files(_surface_tables(surface, check), "warning:", warnings, files)
    if not check:
        from sparrow.calibration.planning.advice import advise

        answer, next_step = advise(surface, config.folder)
        console.print(Text(f"\n{answer}\nnext: {next_step}", style="bold"), soft_wrap=True)


def _surface_tables(surface: Surface, check: bool) -> list[Table]:
    drafts = [drafts_table(surface.drafts)] if surface.drafts else []
    if check:
        return [check_table(surface, surface.targets[0]), *drafts]
    variants, shown = [variant.name for variant in surface.variants], (tails_tables, misses_tables)
    tables = [table for show in shown for name in variants for table in show(surface, name)]
    if surface.layers:
        shares = next((variant.shares for variant in surface.variants if variant.shares), ())
        tables.append(layers_table(surface.layers, shares))
    return tables + drafts


def distill(config: DistillConfig, *, json: AsJson = False) -> None:
    from sparrow.dataflow.distill import RESULT

    with resumable(config.folder), counting(f"loading {config.model}") as progress:
        result = api.distill(config, progress=progress, report=note)
    if json:
        write_json(result)
        return
    for table in distill_tables(result):
        console.print(table)
    files = (config.folder / "actor", config.folder / RESULT)
    write(f"written: {', '.join(map(str, files))}")
    task = f"--task {config.task} --length {config.length}" if config.task else "..."
    command = f"sparrow calibrate {config.model} {task} --adapter {config.folder}"
    console.print(Text(f"next: {command}", style="bold"), soft_wrap=True)


def sft(config: SftConfig, *, json: AsJson = False) -> None:
    with resumable(config.folder), counting(f"loading {config.model}") as progress:
        result = api.sft(config, progress=progress, report=note)
    if json:
        write_json(result)
        return
    shown = min(5, max(1, len(result.losses) // 2))
    ends = (result.losses[:shown], result.losses[-shown:])
    first, last = (sum(part) / len(part) for part in ends)
    write(f"loss {first:.3f} -> {last:.3f} in {len(result.losses)} steps; {result.rows} rows")
    if last > first:
        alert("warning:", "the loss rose: the rate is probably too high (--rate)")
    write(f"written: {result.model}, {config.folder / SFT}")
    command = f"sparrow train --model {result.model} ..."
    console.print(Text(f"next: {command}", style="bold"), soft_wrap=True)


def plan(config: PlanConfig, *, plots: Plots = True, json: AsJson = False) -> int | None:
    from sparrow.calibration.planning.plan import PLAN, SCHEDULE, Unreachable

    try:
        planned = api.plan(config)
    except Unreachable as error:
        alert("not reached:", str(error))
        return 1
    folder = config.folder
    files = [folder / SCHEDULE, folder / PLAN]
    if plots:
        from sparrow.reporting.calibration import plan_figures
        from sparrow.reporting.render import write_figures

        files += write_figures(plan_figures(planned), folder / "plots")
    if json:
        write_json(planned)
    else:
        options = f"the options of the calibration, with --schedule {files[0]}"
        hint = f"check it on new prompts: {options} and --skip as many rows as it used"
        _show_files(plan_tables(planned), "note:", planned.notes, files)
        note(hint)
    return None


def simulate(config: SimulateConfig, *, json: AsJson = False) -> None:
    with measuring() as say:
        result = api.simulate(config, report=say)
    columns = "staleness steps seconds_a_step speed_up learner_idle rollout_idle age oldest wasted"
    table = figures(
        f"{result.workers} workers, {result.hours:g} simulated hours",
        result.rows,
        f"{columns} dropped again",
        caption="age: of used tokens in versions, mean; wasted: share of the generated tokens",
        seconds_a_step=lambda run: run.seconds_per_step and round(run.seconds_per_step, 1),
        age=lambda run: run.token_staleness,
        dropped=lambda run: ", ".join(f"{n} {why}" for why, n in run.dropped.items()) or "none",
    )
    _show_result(result, [table, *result.advice], json)


def _show_files(
    tables: Sequence[Table], mark: str, warnings: Sequence[str], files: Sequence[Path]
) -> None:
    """Print tables, warnings and the files that were written."""
    for table in tables:
        console.print(table)
    for text in warnings:
        alert(mark, text, "yellow")
    note(f"written: {', '.join(map(str, files))}")


def evaluate(config: EvalConfig, *, json: AsJson = False) -> None:
    with counting(f"loading {config.model}") as progress:
        evaluation = api.evaluate(config, progress=progress, report=note, warn=note)
    _show_result(evaluation, [_accuracies(evaluation)], json)


def _accuracies(evaluation: Evaluation) -> Table:
    rows = [
        {
            "task": cell.source if cell.length is None else f"{cell.source} {cell.length}",
            "rows": cell.rows,
            f"mean@{evaluation.samples}": _interval(cell.mean),
            **{f"pass@{at.k}": f"{at.estimate.value:.2f}" for at in cell.passes if at.k > 1},
            "tokens": round(cell.tokens),
            "entropy": cell.entropy,
            **{name: _share(getattr(cell, name)) for name in get_args(Outcome)},
            "most_frequent": cell.reasons[0].text,
        }
        for cell in evaluation.cells
    ]
    return figures(
        f"{evaluation.model} | attention: {evaluation.attention}",
        rows,
        " ".join(rows[0]),
        caption=f"temperature {evaluation.temperature:g}, answers to a row: {evaluation.samples}, "
        "95 % intervals over rows",
    )


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def report(
    config: ReportConfig, *, open: Annotated[bool, "Open the page in a browser."] = False
) -> None:
    # A comparison does not overwrite the page of a run.
    page = config.runs[0] / ("report.html" if len(config.runs) == 1 else "comparison.html")
    place = config.out or (Path("-") if config.format == "md" else page)
    terminal = str(place) == "-"
    if terminal and open:
        raise ValueError("--open needs a file: give --out")
    text = api.report(config.replace(out=place))
    if terminal:
        write(text)
        return
    note(f"{len(text) / 1024:.0f} KiB")
    write(str(place))
    if open:
        webbrowser.open(place.resolve().as_uri())


def generate(config: GenerateConfig, *, json: AsJson = False) -> None:
    if not config.prompts and not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        config = config.replace(prompts=(text,) if text else ())
    stream = len(config.prompts) * config.sampling.n == 1 and not json
    with notes.status(plain(f"loading {config.model.name}")) as status:

        def loaded(text: str) -> None:
            note(text)
            if stream:  # the text itself shows the progress
                status.stop()
            status.update("generating")

        completions = api.generate(config, on_text=_write_piece if stream else None, report=loaded)
    for number, completion in enumerate(completions):
        if json:
            print(jsons.dumps(to_dict(completion)))
        elif stream:
            print()
        else:
            console.rule(
                f"{number}: {len(completion.token_ids)} tokens, {completion.finish_reason}"
            )
            write(completion.text or "")
    failed = [completion.error for completion in completions if completion.error is not None]
    if failed:
        raise ValueError(f"{len(failed)} of {len(completions)} completions failed: {failed[0]}")


def _write_piece(_: int, piece: str) -> None:
    write(piece, end="")


def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API: dense, sparse or exact decoding.

    Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health, /ready, /metrics. Clients
    choose the decoding by the key `sparrow` of a request, and can get token ids and log-probs as
    drawn (docs/serve.md). It listens on this machine only, unless --host says otherwise: then a key
    is required. SIGTERM lets running requests end.

    For example:

      sparrow serve tiny --port 8000
      sparrow serve smollm2-135m --budget 512
    """
    try:
        from sparrow.serve.server import serve as run
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed"
        raise ValueError(f"{missing}: pip install 'sparrow-rl[serve]'") from error
    run(config, report=note)


def flow_check(config: FlowCheckConfig, *, json: AsJson = False) -> int:
    with measuring("comparing"):
        result = api.flow_check(config)
    _show_result(result, flow_check_tables(result), json)
    return int(not result.passed)


def flow_score(config: FlowScoreConfig, *, json: AsJson = False) -> None:
    with counting(f"loading {config.model}") as progress:
        result = api.flow_score(config, progress=progress, report=note)
    _show_result(result, [flow_score_table(result)], json)


def flow_texts(config: FlowTextsConfig) -> None:
    write(str(api.flow_texts(config, report=note)))


def flow_language(config: FlowLanguageConfig) -> None:
    write_json(api.flow_language(config))


def flow_loop(config: FlowLoopConfig, *, json: AsJson = False) -> None:
    with resumable(config.out), counting(f"loading {config.model}") as progress:
        result = api.flow_loop(config, progress=progress, report=note)
    _show_result(result, [campaign_table(result)], json)
    note(f"written: {config.out / CAMPAIGN}, {config.out / FRONT}")


def flow_publish(config: FlowPublishConfig, *, json: AsJson = False) -> None:
    with measuring("measuring on the held-out texts"):
        candidate = api.flow_publish(config, report=note)
    campaign = Campaign.load(config.out / CAMPAIGN)
    _show_result(candidate, [campaign_table(campaign)], json)


def measured(name: str) -> Callable[..., None]:
    """Make the verb that runs a benchmark of the API and prints its table."""
    measure = getattr(api, name)

    def show(config: Any, *, json: AsJson = False) -> None:
        with measuring() as say:
            result = measure(config, report=say)
        from sparrow.benchmarks.timing import table

        _show_result(result, [table(result)], json)

    show.__name__ = name
    show.__annotations__["config"] = signature(unwrap(measure)).parameters["config"].annotation
    return show


def _show_result(result: Any, tables: Sequence[Any], json: bool) -> None:
    if json:
        write_json(result)
    else:
        for table in tables:
            console.print(table)


def puzzle(config: PuzzleConfig) -> int | None:
    puzzle = api.puzzle(config)
    if puzzle.verdict is not None:
        score, accuracy, reason = puzzle.verdict.score, puzzle.verdict.acc, puzzle.verdict.reason
        print(printable(f"score {score:g}, accuracy {accuracy:g}: {reason}"))
        return int(accuracy < 1)
    print(puzzle.prompt)
    if puzzle.chain is not None:
        print(puzzle.chain)
    return None


# `sparrow doctor`.


def doctor(config: DoctorConfig, *, json: AsJson = False) -> int:
    with measuring("checking; kernels are compiled on first use"):
        examination = api.doctor(config)
    if json:
        write_json(examination)
    else:
        _show_machine(examination)
    return int(not examination.ready)


def _show_machine(examination: Examination) -> None:
    """Print one screen: sections of lines, the verdict last."""
    grid, values = Table.grid(padding=(0, 2)), to_dict(examination)
    sections = {"packages": [*_packages(examination)]} | {
        title: [line for key in keys for line in _lines(key.replace("_", "-"), values[key])]
        for title, keys in SECTIONS.items()
    }
    for title, lines in sections.items():
        for number, line in enumerate(lines):
            grid.add_row("" if number else Text(title, style="bold"), line)
    console.print(grid, highlight=False)
    _verdict(examination)


def _packages(examination: Examination) -> Iterator[str]:
    yield f"sparrow {examination.sparrow}, Python {examination.python}, {examination.platform}"
    states = {"ok": "", "old": " (too old)", "missing": "missing"}
    for title, optional in (("", False), ("optional: ", True)):
        packages = [p for p in examination.packages if (p.extra is not None) == optional]
        yield title + ", ".join(f"{p.name} {p.version or ''}{states[p.state]}" for p in packages)


def _lines(name: str, value: Any) -> Iterator[str]:
    """Yield a line for a value, or for each value of a list; none where it is unknown."""
    if isinstance(value, list):
        for item in value:
            yield from _lines(name, item)
    elif isinstance(value, Mapping) and any(isinstance(item, list) for item in value.values()):
        for key, item in value.items():
            yield from _lines(f"{name} {key}", item)
    elif value not in (None, {}, ""):
        yield f"{name}: {_text(value)}"


def _text(value: Any) -> str:
    """Format plain data in one line, sizes in GiB."""
    if isinstance(value, Mapping):
        texts = {name.replace("_", " "): _text(inner) for name, inner in value.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items() if text)
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "NO"}[value]
    if isinstance(value, int) and value >= GIB // 8:
        return f"{value / GIB:.3g} GiB"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _verdict(examination: Examination) -> None:
    if examination.ready:
        ready = f"\n[bold green]ready[/] on {' and '.join(examination.devices)}"
        console.print(ready, highlight=False, markup=True)
    else:
        console.print("\n[bold red]not ready.[/] To fix:", highlight=False, markup=True)
        _advise(examination.problems)
    if examination.missing:
        console.print("optional, not installed:", style="bold", highlight=False)
        _advise(examination.missing)


def _advise(advice: Sequence[Advice]) -> None:
    for item in advice:
        console.print(f"  {item.what}\n      {item.how}", highlight=False)
