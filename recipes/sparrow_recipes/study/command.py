"""`sparrow study`: arms, seeds and controls around one question, run whole and told honestly."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sparrow.cli.output import STOPPED, alert, console, counting, notes, plain, write
from sparrow.cli.output import report as note
from sparrow_recipes.study.config import ArmConfig, StudyConfig

if TYPE_CHECKING:
    from sparrow_recipes.study.design import Study


def study(
    config: StudyConfig,
    *,
    dry_run: Annotated[bool, "Only show the arms, seeds and what is done already."] = False,
    plan: Annotated[bool, "Only calibrate, and plan the schedules of the arms."] = False,
    cell: Annotated[
        str | None,
        "Only this run, in this process: to spread a study over machines that share the folder. "
        "Plan first.",
    ] = None,
    report: Annotated[bool, "Only write the report of what is there."] = False,
) -> None:
    """Ask where sparse rollouts begin to hurt: train arms of different p05, with controls, and see.

    Schedules are planned for each target; dense is the baseline; a control that must collapse and
    one that must not move say whether the study can tell anything. Every arm and seed is a run of
    `sparrow train` in a process of its own. Stopped and started again, it goes on. tiny and
    small are shipped, sparrow/schema/study.py lists every setting. Prints the report's file.

    For example:

      sparrow study tiny --dry-run
      sparrow study small --parallel 6

    Exit codes: 0 all runs have ended, 1 one failed or no rate was found, 2 a mistake in the
    settings, 130 stopped by Ctrl-C.
    """
    from sparrow.processes.supervisor import die_with_parent

    die_with_parent()
    parts = {"--plan": plan, "--cell": cell, "--report": report, "--dry-run": dry_run}
    chosen = [name for name, given in parts.items() if given]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)}: give one of them")
    if dry_run:
        _show(config)
    elif plan:
        _plan(config)
    elif cell is not None:
        _cell(config, cell)
    elif report:
        write(str(_write(config)))
    else:
        _conduct(config)


def _show(config: StudyConfig) -> None:
    from rich.table import Table

    from sparrow_recipes.study.design import Study
    from sparrow_recipes.study.stages import rate_of, state_of

    found = Study(config=config)
    states, rate = state_of(found), rate_of(found)
    table = Table("arm", "rollout", "role", "rate", "corrections", "seeds: state")
    for arm in config.arms:
        own = [f"{cell.seed}: {states[cell.name]}" for cell in found.cells if cell.arm == arm]
        used = config.train.algorithm.corrections if arm.corrections is None else arm.corrections
        table.add_row(
            arm.name,
            _rollout(arm),
            arm.role,
            f"{rate if arm.rate is None else arm.rate:g}",
            ", ".join(one.use for one in used) or "none",
            ", ".join(own),
        )
    console.print(table)
    train = config.train
    console.print(
        f"{len(found.cells)} runs of {train.run.steps} steps, {train.rollout.prompts} prompts x "
        f"{train.rollout.samples} answers <= {train.rollout.max_tokens} tokens; evaluated every "
        f"{train.validation.every} steps on {train.validation.rows} rows; rates tried in turn: "
        f"{', '.join(f'{one:g}' for one in config.rates)}; folder {found.folder}",
        highlight=False,
    )


def _rollout(arm: ArmConfig) -> str:
    """How an arm attends, for people."""
    if arm.target is not None:
        return f"planned for p05 {arm.target}"
    if arm.budget is not None:
        return f"{arm.budget} tokens kept"
    return "dense" if arm.like is None else f"one budget, reads as much as {arm.like}"


def _plan(config: StudyConfig) -> None:
    from sparrow_recipes.study.design import Study
    from sparrow_recipes.study.plans import make_plans
    from sparrow_recipes.study.stages import prepare

    found = Study(config=config)
    prepare(found, shlex.join(["sparrow", *sys.argv[1:]]))
    with counting("measuring") as progress:
        make_plans(found, progress=progress, report=note)
    write(str(found.plans))


def _cell(config: StudyConfig, name: str) -> None:
    from sparrow.dataflow.local.run import EpisodeFailed, GateStop, Unjudged
    from sparrow.dataflow.stopping import Stopped, Stopping
    from sparrow_recipes.study.cell import run_cell
    from sparrow_recipes.study.design import Study
    from sparrow_recipes.study.stages import prepare, rate_of

    found = Study(config=config)
    chosen = found.cell(name)
    if not chosen.arm.dense and not found.plan_of(chosen.arm).exists():
        raise ValueError(f"{found.plan_of(chosen.arm)} is not there: run with --plan first")
    prepare(found, shlex.join(["sparrow", *sys.argv[1:]]))
    with Stopping() as stopping:
        try:
            run_cell(found, chosen, rate_of(found), stopping=stopping, report=note)
        except Stopped:
            sys.exit(STOPPED)
        except (GateStop, Unjudged, EpisodeFailed) as error:
            alert(f"{name}:", str(error))
            sys.exit(1)
    write(str(found.folder_of(chosen)))


def _conduct(config: StudyConfig) -> None:
    from sparrow.dataflow.stopping import Stopping
    from sparrow_recipes.study.running import JobFailed
    from sparrow_recipes.study.stages import NoRate, conduct, open_study

    found, lock = open_study(config)
    begun = time.monotonic()
    try:
        with Stopping() as stopping, _Status(found) as status:
            ended = conduct(
                found,
                command=shlex.join(["sparrow", *sys.argv[1:]]),
                parallel=config.parallel,
                stop=lambda: stopping.wanted,
                event=lambda text: notes.print(
                    f"[dim]{time.monotonic() - begun:6.0f} s[/] {plain(text)}",
                    highlight=False,
                    markup=True,
                ),
                look=status.look,
            )
    except (JobFailed, NoRate) as error:
        goes_on = "\nonce the reason is gone, the same command goes on"
        alert("error:", f"{error}{goes_on if isinstance(error, JobFailed) else ''}")
        sys.exit(1)
    finally:
        lock.close()
    if not ended:
        notes.print(f"stopped; the same command goes on from {found.folder}")
        sys.exit(STOPPED)
    write(str(_write(config)))


def _write(config: "StudyConfig") -> Path:
    from sparrow_recipes.study.design import Study
    from sparrow_recipes.study.files import read_study
    from sparrow_recipes.study.outcome import conclude
    from sparrow_recipes.study.page import write_study
    from sparrow_recipes.study.stages import refuse_other

    refuse_other(found := Study(config=config))
    folder = read_study(found.folder)
    results = conclude(folder)
    results.save(found.folder / "results.json")
    return write_study(found.folder, folder, results)


class _Status:
    """A line that says what runs and how far it is."""

    def __init__(self, study: "Study") -> None:
        self._study = study
        self._shown = notes.status("begins")

    def __enter__(self) -> "_Status":
        self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.stop()

    def look(self, running: Sequence[str]) -> None:
        from sparrow_recipes.study.stages import state_of

        states = state_of(self._study)
        done = sum(state in ("done", "diverged") for state in states.values())
        each = ", ".join(f"{name} ({states.get(name, 'measuring')})" for name in running)
        self._shown.update(plain(f"{done} of {len(states)} runs done; {each}"))
