"""`sparrow eval`: how right a model is, on any task or file, dense or sparse."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparrow.cli.output import (
    MOST,
    MOST_ROW,
    MOST_TOKENS,
    OUTPUT,
    OutputJson,
    console,
    measuring,
    progress_bar,
    refuse_answers,
    report,
)
from sparrow.files import expanded

if TYPE_CHECKING:
    from rich.table import Table

    from sparrow.dataflow.evaluation import Answered, Part
    from sparrow.models import Decoder
    from sparrow.schema.evaluation import Estimate, Evaluation

LENGTHS = (200, 500, 1000)  # of puzzles, where none is given
GYM_TOKENS = 512  # of an answer to reasoning-gym
FILE_TOKENS = 4096  # of an answer to a row of a file
ROWS = 32
MODEL = "model"  # what a run leaves in its directory
CHOOSE = "name a task by --task, such as gym/leg_counting, or rows by --file"
WIDE = 75  # columns of a table in which reasons have room
FEW = 5  # skipped rows that are named


_asked = partial(typer.Option, rich_help_panel="What is asked")
_answered = partial(typer.Option, rich_help_panel="How it is answered")
_sparse = partial(typer.Option, rich_help_panel="Sparse attention (without these it is dense)")
_output = partial(typer.Option, rich_help_panel=OUTPUT)


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="tiny, small, smollm2-135m, a folder, owner/name, or the run directory of a "
            "`sparrow train` or `warmup` that has ended.",
        ),
    ],
    task: Annotated[
        list[str] | None,
        _asked(
            "--task",
            "-t",
            metavar="NAME",
            help="assignments, countdown, graph or gym/NAME; can be given several times. Default: "
            "the first three.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        _asked(
            "--file",
            metavar="FILE",
            help="Rows of a file instead: .parquet or .jsonl in verl's schema, or a dataset of the "
            "hub (owner/name).",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        _asked("--reward", metavar="NAME", help="Who judges a file: math, or module:function."),
    ] = None,
    length: Annotated[
        list[int] | None,
        _asked(
            "--length",
            "-l",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="About how long a puzzle's answer is (default: 200, 500 and 1000), or the most "
            "for gym (default: 512); can be given several times.",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        _asked(
            "--rows",
            "-n",
            min=1,
            max=MOST,
            metavar="N",
            help=f"Rows of each task and length (default: {ROWS}), or of a file (default: all).",
        ),
    ] = None,
    skip: Annotated[
        int,
        _asked("--skip", min=0, max=MOST_ROW, metavar="N", help="Rows to leave out at the start."),
    ] = 0,
    samples: Annotated[
        int,
        _answered(
            "--samples", "-k", min=1, max=MOST, metavar="N", help="Answers to every row: the k."
        ),
    ] = 1,
    temperature: Annotated[
        float,
        _answered("--temperature", metavar="T", help="1 is the model's own, 0 is greedy."),
    ] = 1.0,
    max_tokens: Annotated[
        int | None,
        _answered(
            "--max-tokens",
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help="Longest answer. Default: 2.5 x a puzzle's length, "
            f"{FILE_TOKENS} for rows of a file.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        _sparse(
            "--schedule",
            metavar="NAME",
            help="Budgets by length: a file, or a name of `sparrow presets`.",
        ),
    ] = None,
    budget: Annotated[
        int | None,
        _sparse(
            "--budget",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="Tokens kept at every length, 48 at least, in all layers.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        _sparse(
            "--window",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="For comparison: only the last tokens are seen; a multiple of 16.",
        ),
    ] = None,
    flow: Annotated[
        str | None,
        _sparse(
            "--flow",
            metavar="FLOW",
            help="What chooses the tokens to keep: a built-in name or FILE[:name].",
        ),
    ] = None,
    force: Annotated[
        bool, _sparse("--force", help="Use a schedule that was made for another model.")
    ] = False,
    seed: Annotated[
        int, _answered("--seed", min=0, max=MOST_ROW, metavar="N", help="Of the random draws.")
    ] = 0,
    device: Annotated[
        str,
        _answered("--device", metavar="NAME", help="auto (a GPU where there is one), cpu, cuda."),
    ] = "auto",
    dtype: Annotated[
        str, _answered("--dtype", metavar="NAME", help="auto, float32 or bfloat16.")
    ] = "auto",
    out: Annotated[
        Path | None,
        _output("--out", "-o", metavar="FILE", help="Also write every answer, a JSON line each."),
    ] = None,
    as_json: OutputJson = False,
) -> None:
    """Ask a model questions with known answers, and say how often it is right.

    mean@k is the share of right answers, pass@k the share of rows with a right one among k, with
    95 % intervals over rows. With a budget or schedule it answers under sparse attention.

    For example:

      sparrow eval tiny
      sparrow eval tiny -t assignments -l 500 -k 4 --budget 256
      sparrow eval runs/train/tiny -t assignments -l 200 --samples 4
    """
    from sparrow.dataflow.evaluation import attending
    from sparrow.dataflow.evaluation import evaluate as measure
    from sparrow.dataflow.language import language_of, speaks_puzzles
    from sparrow.schema.base import to_dict
    from sparrow.schema.sampling import SamplingParams

    _refuse_contradictions(task, file, reward, length, samples, temperature, out)
    refuse_answers(rows or ROWS, samples)
    with ExitStack() as judges:
        parts, left_out = _parts(task, file, reward, length, rows, skip, max_tokens, judges)
        with measuring(f"loading {model}"):
            loaded = _load(model, dtype, device)
            puzzles = speaks_puzzles(loaded)
            if not (task or file or puzzles):
                raise ValueError(f"{model} does not speak the language of puzzles: {CHOOSE}")
            engine, chosen = attending(
                loaded, budget=budget, window=window, schedule=schedule, flow=flow, force=force
            )
        params = SamplingParams(
            n=samples, temperature=temperature, max_tokens=engine.max_context, seed=seed
        )
        with progress_bar() as bar:
            total = samples * sum(len(part.examples) for part in parts)
            going = bar.add_task(f"answers on {loaded.device}", total=total)
            found = measure(
                engine,
                parts,
                language_of(loaded, puzzles),
                params,
                model=model,
                schedule=chosen,
                left_out=left_out,
                on_answer=lambda: bar.advance(going),
            )
    if out is not None:
        _write(out, [one for own in found.answers for one in own])
    _tell_skipped(found.evaluation)
    if as_json:
        print(json.dumps(to_dict(found.evaluation), indent=2))
    else:
        _show(found.evaluation, loaded)


def _refuse_contradictions(
    task: list[str] | None,
    file: str | None,
    reward: str | None,
    length: list[int] | None,
    samples: int,
    temperature: float,
    out: Path | None,
) -> None:
    """Before anything is loaded."""
    if file is not None and (task or length):
        raise ValueError("--file goes without --task and --length: give one or the other")
    if file is None and reward is not None:
        raise ValueError("--reward is for rows of a --file; tasks judge their own")
    if samples > 1 and temperature == 0:
        raise ValueError(f"--temperature 0 gives {samples} equal answers: --samples 1 says as much")
    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        given = "exists" if out.exists() else "is in a folder that does not exist"
        raise ValueError(f"--out {out} {given}: name a new file")


def _parts(
    task: list[str] | None,
    file: str | None,
    reward: str | None,
    length: list[int] | None,
    rows: int | None,
    skip: int,
    max_tokens: int | None,
    judges: ExitStack,
) -> "tuple[list[Part], tuple[str, ...]]":
    """What is evaluated, and which rows of a file cannot be used."""
    from sparrow.dataflow.evaluation import file_parts, task_parts
    from sparrow.tasks import PUZZLES

    if file is not None:
        most = max_tokens or FILE_TOKENS
        return file_parts(
            file, reward=reward, rows=rows, first=skip, max_tokens=most, open_judges=judges
        )
    found = []
    for name in dict.fromkeys(task or PUZZLES):
        lengths = length or (LENGTHS if name in PUZZLES else (GYM_TOKENS,))
        found += task_parts(
            name,
            list(dict.fromkeys(lengths)),
            rows=rows or ROWS,
            first=skip,
            max_tokens=max_tokens,
            open_judges=judges,
        )
    return found, ()


def _load(model: str, dtype: str, device: str) -> "Decoder":
    """A model, or the one that a run directory has when the run has ended."""
    from sparrow.models import load

    folder, made = expanded(model), expanded(model) / MODEL
    if folder.is_dir() and not made.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{folder} is no model, and no run that has ended: there is no {made}")
    return load(made if made.is_dir() else model, dtype=dtype, device=device, report=report)


def _write(out: Path, answers: "Sequence[Answered]") -> None:
    with out.open("x", encoding="utf-8") as lines:
        for one in answers:
            lines.write(json.dumps(one.plain(), ensure_ascii=False) + "\n")
    report(f"{out}: {len(answers)} answers")


def _tell_skipped(evaluation: "Evaluation") -> None:
    own = [told for cell in evaluation.cells for told in cell.skipped]
    for what, told in (("cannot be used", evaluation.left_out), ("are too long", own)):
        if told:
            named = "; ".join(told[:FEW]) + ("; ..." if told[FEW:] else "")
            report(f"{len(told)} rows {what} and are left out: {named}")


def _show(evaluation: "Evaluation", model: "Decoder") -> None:
    kind = str(model.dtype).removeprefix("torch.")
    rows = sorted({cell.rows for cell in evaluation.cells})
    said = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
    console.print(
        f"{evaluation.model} | {kind} on {model.device} | attention: {evaluation.attention} | "
        f"temperature {evaluation.temperature:g} | {said} rows of each, answers to a row: "
        f"{evaluation.samples} | [95 % intervals over rows]",
        highlight=False,
    )
    console.print(_table(evaluation))
    if any(cell.rows == 1 for cell in evaluation.cells):
        report("one row says nothing about others: no interval")


def _table(evaluation: "Evaluation") -> "Table":
    from rich.table import Table

    passes = [f"pass@{one.k}" for one in evaluation.cells[0].passes if one.k > 1]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task", no_wrap=True)
    for name in (f"mean@{evaluation.samples}", *passes, "tokens", "entropy", "cut off"):
        table.add_column(name, justify="right", no_wrap=True)
    room = console.width >= WIDE + 7 * len(passes)
    if room:
        table.add_column("most frequent")
    for cell in evaluation.cells:
        table.add_row(
            cell.source if cell.length is None else f"{cell.source} {cell.length}",
            _said(cell.mean),
            *(f"{one.estimate.value:.2f}" for one in cell.passes if one.k > 1),
            f"{cell.tokens:.0f}",
            "" if cell.entropy is None else f"{cell.entropy:.3f}",
            f"{cell.cut_off:.0%}",
            *([cell.reasons[0].text] if room else []),
        )
    return table


def _said(estimate: "Estimate") -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
