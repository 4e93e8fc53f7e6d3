"""`sparrow train`, `sparrow replay` and `sparrow push` on the terminal."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from sparrow import api
from sparrow.cli.output import (
    STOPPED,
    AsJson,
    alert,
    console,
    duration,
    notes,
    plain,
    report,
    write,
    write_json,
)
from sparrow.schema.asynchronous import WorkerConfig
from sparrow.schema.common import PushConfig, ReplayConfig
from sparrow.schema.train import TrainConfig

if TYPE_CHECKING:
    from sparrow.dataflow.preview import (
        EngineMemory,
        LengthCase,
        Overlap,
        PoliciesPreview,
        PolicyPreview,
        Preview,
    )
    from sparrow.dataflow.stopping import GracefulShutdown

GATED, DIVERGED, UNJUDGED = 3, 4, 5  # exit codes of a run that has not ended

Lines = list[tuple[str, str]]
GIB = 2**30
RESUME = "the same command resumes from it"


def train(
    config: TrainConfig,
    *,
    dry_run: Annotated[
        bool, "Only predict memory, batch, schedule and time; nothing is run."
    ] = False,
    json: AsJson = False,
) -> int | None:
    if json and not dry_run:
        raise ValueError("--json needs --dry-run; a run writes metrics.jsonl")
    if dry_run:
        return _preview(config, json)
    from sparrow.dataflow.local.run import current_rank
    from sparrow.dataflow.stopping import GracefulShutdown

    with GracefulShutdown() as stopping, _named_rank():
        run = run_training if config.run.ray is None else _run_on_ray
        folder = run(config, stopping)
        if not current_rank():
            write(str(folder))
    return None


def worker(config: WorkerConfig) -> int:
    """Answer prompts of a training run on another machine, which listens by dispatch.listen.

    It calls the run and needs no open port. The run's key comes from SPARROW_WORKER_KEY, its
    configuration from the run; the model must be here. While the line is cut it tries again, when
    the run ends it ends too; Ctrl-C gives its prompts back (docs/asynchronous.md).

    For example:

      sparrow worker --connect https://run.example.org
      sparrow worker --connect http://127.0.0.1:7777 --dtype bfloat16 --budget 512
    """
    import asyncio

    try:
        from sparrow.dataflow.asynchronous.worker_client import answer_prompts
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed"
        raise ValueError(f"{missing}: pip install 'sparrow-rl[client]'") from error
    return 0 if asyncio.run(answer_prompts(config, report)) else STOPPED


def _preview(config: TrainConfig, json: bool) -> int:
    preview = api.preview(config)
    if json:
        write_json(preview)
    else:
        show_preview(preview, console)
    return int(not preview.fits)


def run_training(config: TrainConfig, stopping: "GracefulShutdown", *, brief: bool = False) -> Path:
    """Run a training and show it on the terminal; exit the program if it stops early.

    brief: without the header.
    """
    from sparrow.cli.training_display import Display
    from sparrow.dataflow.local.loop import open_training
    from sparrow.dataflow.local.loop import train as train_run
    from sparrow.dataflow.local.messages import Diverged, EpisodeFailed, GateStop, Unjudged
    from sparrow.dataflow.local.run import current_rank
    from sparrow.dataflow.stopping import Stopped

    quiet = bool(current_rank())  # of several ranks only the first prints
    with nullcontext() if quiet else notes.status("opening the run"):
        run = open_training(config, stopping=stopping, report=None if quiet else report)
    try:
        with run:
            run.callbacks = display = Display(
                Console(quiet=True) if quiet else console,
                steps=config.run.steps,
                first=run.step,
                header=() if brief else run.header(),
                target=config.gate.target,
                targets={name: config.policy(name).gate.target for name in config.policies},
            )
            with display:
                return train_run(run)
    except (Stopped, GateStop, Diverged, Unjudged, EpisodeFailed) as error:
        if run.world.is_first:
            _print_end(error, f"after {run.step} steps; ")
        if isinstance(error, EpisodeFailed) and error.__cause__ is not None:
            raise  # the author of the episode needs the traceback
        sys.exit(_exit_code(error))


def _run_on_ray(config: TrainConfig, stopping: "GracefulShutdown") -> Path:
    """Run a training on a Ray cluster, shown as one on this machine is."""
    from sparrow.cli.training_display import Display
    from sparrow.dataflow.local.messages import Diverged, EpisodeFailed, GateStop, Unjudged
    from sparrow.dataflow.stopping import Stopped

    train_on_ray = api.import_ray()
    steps, target = config.run.steps, config.gate.target
    try:
        with Display(console, steps=steps, first=0, header=(), target=target) as display:
            return train_on_ray(config, callbacks=display, stopping=stopping, report=report)
    except (Stopped, GateStop, Diverged, Unjudged, EpisodeFailed) as error:
        _print_end(error)
        sys.exit(_exit_code(error))


def _exit_code(error: Exception) -> int:
    from sparrow.dataflow.local.messages import Diverged, GateStop, Unjudged
    from sparrow.dataflow.stopping import Stopped

    codes = {Stopped: STOPPED, GateStop: GATED, Diverged: DIVERGED, Unjudged: UNJUDGED}
    return codes.get(type(error), 1)


def _print_end(error: Exception, when: str = "") -> None:
    from sparrow.dataflow.local.messages import GateStop

    why, how = str(error) or "stopped", RESUME
    if isinstance(error, GateStop):
        why = f"the gate stopped the run: {error}"
        how = "it resumes with other settings of the gate (gate.mode=warn, gate.target)"
    saved = f"{when}a checkpoint is saved, and {how}"
    notes.print(f"[bold yellow]{plain(why)}[/]\n{plain(saved)}", markup=True)


@contextmanager
def _named_rank() -> Iterator[None]:
    """Name the rank in an error message, if there are several.

    At once, while signals are handled: torchrun ends the others as soon as one has ended.
    """
    from sparrow.dataflow.local.run import current_rank

    try:
        yield
    except (ValueError, OSError) as error:
        rank = current_rank()
        if rank is None:
            raise
        alert("error:", f"rank {rank}: {error}")
        sys.exit(2)


def replay(config: ReplayConfig, *, json: AsJson = False) -> None:
    with notes.status(plain(f"{config.part} of {config.run}")):
        result = api.replay(config, report=report)
    if json:
        write_json(result)
        return
    for name, value in result.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        console.print(f"{name:32} {shown}", highlight=False)


def push(config: PushConfig) -> None:
    with notes.status(plain(f"pushing {config.run}")):
        address = api.push(config, report=report)
    write(address)


# `sparrow train --dry-run`.


def show_preview(preview: "Preview | PoliciesPreview", console: Console) -> None:
    """Print the prediction: what runs, memory, batch, schedule, time; then notes."""
    from sparrow.dataflow.preview import Preview

    table = Table(title="dry run: nothing was started", show_header=False)
    if isinstance(preview, Preview):
        sections = preview_sections(preview)
    else:
        sections = policy_sections(preview)
    for section in sections:
        table.add_section()
        for name, text in section:
            table.add_row(name, text)
    console.print(table)
    for note in preview.notes:
        console.print(f"[yellow]note:[/] {plain(note)}", markup=True)
    if not preview.fits:
        console.print("[bold red]it does not fit[/]: see memory above", markup=True)


def _engine_lines(preview: "Preview") -> Lines:
    engine = preview.engine
    if engine is None:
        return [("engine", "none here: servers answer")]
    held = preview.rollout_bytes - engine.total
    holds = f"{engine.tokens} tokens, {engine.tokens / engine.context:.3g} of {engine.context}"
    return [
        ("engine", f"{_gib(engine.total)}; of the trainer stay {_gib(held)}"),
        ("  weights", _gib(engine.weights)),
        ("  keys and values", holds),
    ]


def preview_sections(preview: "Preview") -> list[Lines]:
    machine, trainer = preview.machine, preview.trainer
    state = trainer.weights + trainer.gradients + trainer.moments
    verdict = "fits" if preview.fits else "DOES NOT FIT"
    sleeps = "asleep meanwhile" if preview.sleeps else "awake meanwhile"
    beside = f"; the engine is {sleeps}" if preview.engine else ""
    kept = ", ".join(f"{kept.kept:.0f} of {kept.length}" for kept in preview.kept)
    updates = f"{preview.updates} updates, each of"
    return [
        [
            *preview.words.items(),
            ("tokens kept", kept or "all"),
            ("weights", f"{preview.parameters / 1e6:.1f} M"),
            ("machine", f"{machine.name}, {_gib(machine.memory)}"),
        ],
        [
            ("trainer", f"{_gib(trainer.total)}{beside}"),
            ("  weights, gradients, moments", _gib(state)),
            *([("  reference model", _gib(trainer.reference))] if trainer.reference else []),
            ("  copies of weights", _gib(trainer.copies)),
            ("  activations of a micro-batch", _gib(trainer.activations)),
            ("  logits by chunks", _gib(trainer.logits)),
            *_engine_lines(preview),
            ("at most", f"{_gib(max(preview.rollout_bytes, preview.update_bytes))}: {verdict}"),
        ],
        [
            ("answers", f"{preview.sequences} a step, {preview.steps} steps"),
            *(
                (case.name, f"{case.tokens} tokens; {updates} {case.micro_batches} micro-batches")
                for case in preview.cases
            ),
        ],
        _time(preview),
    ]


def policy_sections(preview: "PoliciesPreview") -> list[Lines]:
    """A section for each policy, between what they share."""
    shared, machine = preview.shared, preview.machine
    engine = [] if shared is None else _own_engine("shared engine", shared, preview.adapters)
    verdict = "fits" if preview.fits else "DOES NOT FIT"
    return [
        [*preview.words.items(), ("machine", f"{machine.name}, {_gib(machine.memory)}")],
        *([engine] if engine else []),
        *map(_policy, preview.policies),
        [
            ("held all the time", _gib(preview.held)),
            ("at most", f"{_gib(preview.peak)}: {verdict}"),
            ("rounds", f"{preview.steps}, of {preview.prompts * preview.samples} episodes"),
            ("time of a round", f"not predicted: {preview.untimed}"),
        ],
    ]


def _policy(policy: "PolicyPreview") -> Lines:
    trainer, engine = policy.trainer, policy.engine
    kept = ", ".join(f"{kept.kept:.0f} of {kept.length}" for kept in policy.kept)
    lines = [(f"policy {policy.name}", policy.words["learns"])]
    lines += [(f"  {name}", text) for name, text in policy.words.items() if name != "learns"]
    lines += [("  tokens kept", kept)] if kept else []
    if trainer is not None:
        update = trainer.total - trainer.resident
        lines += [
            ("  weights that are its own", _gib(trainer.weights)),
            ("  moments", _gib(trainer.moments)),
            ("  gradients, copies, activations", f"{_gib(update)} while it learns"),
        ]
    return lines if engine is None else [*lines, *_own_engine("  engine", engine)]


def _own_engine(name: str, engine: "EngineMemory", adapters: int = 0) -> Lines:
    room = f"{engine.tokens} tokens of keys and values"
    parts = f"weights {_gib(engine.weights)}, {room}"
    parts += f", adapters {_gib(adapters)}" if adapters else ""
    return [(name, f"{_gib(engine.total + adapters)}: {parts}")]


def _time(preview: "Preview") -> Lines:
    timed = [case for case in preview.cases if case.seconds]
    if not timed:
        return [("time of a step", f"not predicted: {preview.untimed}")]
    lines = [line for case in timed for line in _case_time(case, sparse=bool(preview.kept))]
    last = timed[-1]
    return [*lines, ("the run", f"{duration(last.step * preview.steps)}, {last.name}")]


def _case_time(case: "LengthCase", *, sparse: bool) -> Lines:
    alone = [(f"a step, {case.name}", _step(case.seconds, sparse=sparse))]
    return alone if case.overlap is None else [*alone, ("  overlapped", _overlapped(case.overlap))]


def _overlapped(overlap: "Overlap") -> str:
    turns, whole = duration(overlap.rollout + overlap.learning), duration(overlap.step)
    sides = f"rollout {duration(overlap.rollout)}, learning {duration(overlap.learning)}"
    waits = f"the {overlap.waits} waits {duration(overlap.idle)} of it"
    return f"{whole} instead of {turns} ({sides}); {waits}, {overlap.idle / overlap.step:.0%}"


def _step(time: Mapping[str, float], *, sparse: bool) -> str:
    named = [name for name in time if name not in ("step", "dense rollout")]
    parts = " + ".join(f"{name} {duration(time[name])}" for name in named)
    whole, dense = time["step"], time["dense rollout"]
    slower = (dense + time["log-probs"] + time["update"]) / whole
    compared = f"; with dense rollout ({duration(dense)}) {slower:.2f}x as long" if sparse else ""
    return f"{duration(whole)} = {parts}{compared}"


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
