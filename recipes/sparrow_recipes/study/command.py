"""`sparrow study`: the command line of a control study."""

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

from rich.table import Table

from sparrow.cli.output import STOPPED, alert, console, counting, notes, plain, write
from sparrow.cli.output import report as note
from sparrow.schema.run_folder import flat_settings
from sparrow_recipes.study.config import AnalysisConfig, ArmConfig, StudyConfig
from sparrow_recipes.study.design import Study, describe

SHOWN = ("optimiser.rate", "algorithm.corrections")  # settings with a column of their own


def study(
    config: StudyConfig,
    *,
    dry_run: Annotated[bool, "Only show arms, seeds, their state, and the power."] = False,
    plan: Annotated[bool, "Only evaluate the start model, and plan the schedules."] = False,
    cell: Annotated[
        str | None,
        "Only this run, in this process: to spread a study over machines that share the folder. "
        "Plan first.",
    ] = None,
    report: Annotated[bool, "Only write the report of the runs so far."] = False,
) -> None:
    """Compare kinds of rollout in training: arms that differ in one thing, with several seeds.

    The start model is evaluated first: a study does not begin where the token limit cuts off many
    dense answers. Every arm and seed is a training run in its own process, and only runs of one
    study are compared. The same command resumes a stopped study. docs/study.md describes designs,
    recipes/sparrow_recipes/study/config.py lists every setting. Prints the report's file.

    For example:

      sparrow study tiny --dry-run
      sparrow study control-2b --parallel 9

    Exit codes: 0 all runs have ended, 1 one failed or no rate was found, 2 a mistake in the
    settings, 130 stopped by Ctrl-C.
    """
    from sparrow.processes.supervisor import die_with_parent

    die_with_parent()
    parts = {"--plan": plan, "--cell": cell, "--report": report, "--dry-run": dry_run}
    chosen = [name for name, value in parts.items() if value]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)}: give only one of them")
    command, planned = shlex.join(["sparrow", *sys.argv[1:]]), Study(config)
    if dry_run:
        _show(planned)
    elif plan:
        _plan(planned, command)
    elif cell is not None:
        _cell(planned, cell, command)
    else:
        if not report:
            _conduct(config, command)
        _write(planned)


def _show(study: Study) -> None:
    from sparrow_recipes.study.stages import rate_of, state_of

    states, rate, config, train = state_of(study), rate_of(study), study.config, study.config.train
    table = Table("arm", "rollout", "role", "rate", "corrections", "other settings", "seeds: state")
    for arm in config.arms:
        cells = [cell for cell in study.cells if cell.arm == arm]
        run = study.training(cells[0], rate)
        own = dict(flat_settings(arm.train))
        others = [f"{key} = {value}" for key, value in own.items() if key not in SHOWN]
        table.add_row(
            *(arm.name, _rollout(arm), arm.role, f"{run.optimiser.rate:g}"),
            *(describe(run.algorithm.corrections), ", ".join(others)),
            ", ".join(f"{cell.seed}: {states[cell.name]}" for cell in cells),
        )
    console.print(table)
    if config.analysis is not None:
        console.print(_power(config, config.analysis))
    console.print(
        f"{len(study.cells)} runs of {train.run.steps} steps, {train.rollout.prompts} prompts x "
        f"{train.rollout.samples} answers <= {train.rollout.max_tokens} tokens; evaluated every "
        f"{train.validation.every} steps on {train.validation.prompts} rows; rates tried in turn: "
        f"{', '.join(f'{rate:g}' for rate in config.rates)}; folder {study.folder}",
        highlight=False,
    )


def _power(config: StudyConfig, analysis: AnalysisConfig) -> Table:
    """What the comparisons can show with so many seeds."""
    from sparrow_recipes.study.analysis import planned_power

    noun = f"half of the {analysis.confidence:.0%} interval"
    margin = config.outcome.tolerance
    test = f"power of non-inferiority at {margin:g}"
    table = Table("comparisons", "seeds", "assumed sd", noun, test, "detectable, power 80 %")
    seeds = {arm.name: len(config.seeds_of(arm)) for arm in config.arms}
    for row in planned_power(analysis, margin, seeds):
        figures = (row.sd, row.half, row.non_inferior, row.detectable)
        numbers = ("-" if figure is None else f"{figure:.3f}" for figure in figures)
        table.add_row(", ".join(row.comparisons), "{} / {}".format(*row.seeds), *numbers)
    return table


def _rollout(arm: ArmConfig) -> str:
    """Describe the attention of an arm."""
    return {
        "dense": "dense",
        "target": f"planned for p05 {arm.target}",
        "budget": f"{arm.budget} tokens kept",
        "schedule": f"schedule {arm.schedule}",
        "fixed": f"one budget, reads as much as {arm.like}",
    }[arm.kind]


def _plan(study: Study, command: str) -> None:
    from sparrow_recipes.study.plans import check_start, make_plans
    from sparrow_recipes.study.stages import prepare

    prepare(study, command)
    check_start(study, report=note)
    with counting("measuring") as progress:
        make_plans(study, progress=progress, report=note)
    write(str(study.plans))


def _cell(study: Study, name: str, command: str) -> None:
    from sparrow.dataflow.local.messages import EpisodeFailed, GateStop, Unjudged
    from sparrow.dataflow.stopping import GracefulShutdown, Stopped
    from sparrow_recipes.study.cell import run_cell
    from sparrow_recipes.study.stages import prepare, rate_of

    chosen = study.cell(name)
    needed = [study.start, *([] if chosen.arm.dense else [study.plan_of(chosen.arm)])]
    for file in needed:
        if not file.exists():
            raise ValueError(f"{file} does not exist: run with --plan first")
    if refusal := study.refusal():
        raise ValueError(refusal)
    prepare(study, command)
    with GracefulShutdown() as stopping:
        try:
            run_cell(study, chosen, rate_of(study), stopping=stopping, report=note)
        except Stopped:
            sys.exit(STOPPED)
        except (GateStop, Unjudged, EpisodeFailed) as error:
            alert(f"{name}:", str(error))
            sys.exit(1)
    write(str(study.folder_of(chosen)))


def _conduct(config: StudyConfig, command: str) -> None:
    """Run the remaining jobs, with a status line."""
    from sparrow.dataflow.stopping import GracefulShutdown
    from sparrow_recipes.study.running import JobFailed
    from sparrow_recipes.study.stages import NoRate, conduct, open_study, state_of

    study, lock = open_study(config)
    begun = time.monotonic()

    def event(text: str) -> None:
        line = f"[dim]{time.monotonic() - begun:6.0f} s[/] {plain(text)}"
        notes.print(line, highlight=False, markup=True)

    def show(running: Sequence[str]) -> None:
        states = state_of(study)
        done = sum(state in ("done", "diverged") for state in states.values())
        jobs = ", ".join(f"{name} ({states.get(name, 'measuring')})" for name in running)
        status.update(plain(f"{done} of {len(states)} runs done; {jobs}"))

    try:
        with closing(lock), GracefulShutdown() as stopping, notes.status("starting") as status:
            ended = conduct(study, command, stop=lambda: stopping.requested, event=event, show=show)
    except (JobFailed, NoRate) as error:
        resume = "\nonce this is fixed, the same command resumes"
        alert("error:", f"{error}{resume if isinstance(error, JobFailed) else ''}")
        sys.exit(1)
    if not ended:
        notes.print(f"stopped; the same command resumes from {study.folder}")
        sys.exit(STOPPED)


def _write(study: Study) -> None:
    from sparrow_recipes.study.files import read_study
    from sparrow_recipes.study.outcome import conclude
    from sparrow_recipes.study.page import write_study
    from sparrow_recipes.study.stages import refuse_other
    from sparrow_recipes.study.verdicts import with_verdicts

    refuse_other(study)
    folder = read_study(study.folder)
    results = with_verdicts(conclude(folder))
    results.save(study.folder / "results.json")
    write(str(write_study(study.folder, folder, results)))
