"""`sparrow train --dry-run`, for a terminal."""

from typing import TYPE_CHECKING

from sparrow.cli.output import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.table import Table

    from sparrow.dataflow.preview import Preview

Lines = list[tuple[str, str]]
GIB = 2**30


def show(preview: "Preview", console: "Console") -> None:
    """The whole plan: what runs, memory, batch, schedule, time; then what to keep in mind."""
    from rich.table import Table

    table = Table(title="the plan, nothing was run", show_header=False)
    for section in sections(preview):
        table.add_section()
        for name, text in section:
            table.add_row(name, text)
    console.print(table)
    if preview.kept:
        console.print(_kept_table(preview))
    for note in preview.notes:
        console.print(f"[yellow]note:[/] {plain(note)}", markup=True)
    if not preview.fits:
        console.print("[bold red]it does not fit[/]: see memory above", markup=True)


def lines(preview: "Preview") -> Lines:
    """Everything that is shown in pairs of a name and a text."""
    return [line for section in sections(preview) for line in section]


def sections(preview: "Preview") -> list[Lines]:
    machine = f"{preview.machine.name}, {_gib(preview.machine.memory)}"
    words = [*preview.words.items(), ("weights", f"{preview.parameters / 1e6:.1f} M")]
    return [[*words, ("machine", machine)], _memory(preview), _batch(preview), _time(preview)]


def _memory(preview: "Preview") -> Lines:
    trainer, engine = preview.trainer, preview.engine
    state = trainer.weights + trainer.gradients + trainer.moments
    verdict = "fits" if preview.fits else "DOES NOT FIT"
    sleeps = "asleep meanwhile" if preview.sleeps else "awake meanwhile"
    sequences = f"{engine.tokens / engine.context:.3g} sequences of {engine.context}"
    held = preview.rollout_bytes - engine.total
    return [
        ("trainer", f"{_gib(trainer.total)}; the engine is {sleeps}"),
        ("  weights, gradients, moments", _gib(state)),
        ("  copies of weights", _gib(trainer.copies)),
        ("  activations of a micro-batch", _gib(trainer.activations)),
        ("  logits by chunks", _gib(trainer.logits)),
        ("engine", f"{_gib(engine.total)}; of the trainer stay {_gib(held)}"),
        ("  weights", _gib(engine.weights)),
        ("  keys and values", f"{engine.tokens} tokens, {sequences}"),
        ("at most", f"{_gib(max(preview.rollout_bytes, preview.update_bytes))}: {verdict}"),
    ]


def _batch(preview: "Preview") -> Lines:
    total = preview.sequences * preview.steps
    updates = f"{preview.updates}, each of"
    return [
        ("answers of a step", f"{preview.sequences}, of the run {total}"),
        *(
            (one.name, f"{one.tokens} tokens; updates: {updates} {one.micro_batches} micro-batches")
            for one in preview.cases
        ),
        ("steps", str(preview.steps)),
    ]


def _time(preview: "Preview") -> Lines:
    timed = [(one.name, one.seconds) for one in preview.cases if one.seconds]
    if not timed:
        return [("time of a step", f"not predicted: {preview.untimed}")]
    lines = [(f"a step, {name}", _step(time, sparse=bool(preview.kept))) for name, time in timed]
    name, last = timed[-1]
    return [*lines, ("the run", f"{_duration(last['step'] * preview.steps)}, {name}")]


def _step(time: "Mapping[str, float]", *, sparse: bool) -> str:
    parts = " + ".join(f"{n} {_duration(time[n])}" for n in ("rollout", "log-probs", "update"))
    whole, dense = time["step"], time["dense rollout"]
    slower = (whole - time["rollout"] + dense) / whole
    compared = f"; with dense rollout ({_duration(dense)}) {slower:.2f}x as long" if sparse else ""
    return f"{_duration(whole)} = {parts}{compared}"


def _kept_table(preview: "Preview") -> "Table":
    from rich.table import Table

    table = Table(title="tokens kept")
    for heading in ("total length", "budget", "kept, all layers", "share"):
        table.add_column(heading, justify="right")
    for each in preview.kept:
        budget = "all" if each.budget is None else str(each.budget)
        share = f"{each.kept / each.length:.0%}"
        table.add_row(str(each.length), budget, f"{each.kept:.0f}", share)
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
