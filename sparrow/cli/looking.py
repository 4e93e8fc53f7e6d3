"""`sparrow status` and `sparrow audit` on the terminal: a run as its files show it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparrow import api
from sparrow.cli.output import AsJson, alert, console, duration, measuring, plain, write_json
from sparrow.cli.training_display import COLUMNS, describe_policy
from sparrow.schema.asynchronous import (
    AsyncStatus,
    AuditConfig,
    AuditResult,
    PolicyStatus,
    RunStatus,
    StatusConfig,
    StepAccuracy,
    WorkerStatus,
)
from sparrow.schema.run_folder import VERSION

EVERY = 2.0  # seconds between two looks
SHOWN = 5  # evaluations, and actions of the gate: the last ones
STYLES = {"running": "green", "ended": "bold green", "stopped": "yellow", "stale": "bold red"}

Lines = list[tuple[str, str]]


def status(
    config: StatusConfig,
    *,
    watch: Annotated[bool, "Look again every two seconds, until the run ends."] = False,
    json: AsJson = False,
) -> int:
    if json and watch:
        raise ValueError("--watch shows text: leave out --json")
    found = api.status(config)
    if json:
        write_json(found)
    elif watch and found.state == "running":
        found = _watch(config, found)
    else:
        console.print(_status(found))
    return int(found.state in ("stopped", "stale"))


def _watch(config: StatusConfig, found: RunStatus) -> RunStatus:
    with Live(_status(found), console=console, auto_refresh=False) as live:
        while found.state == "running":
            time.sleep(EVERY)
            found = api.status(config)
            live.update(_status(found), refresh=True)
    return found


def _status(found: RunStatus) -> RenderableType:
    process = "" if found.process is None else f", process {found.process or 'unknown'}"
    title = Text.assemble(f"{found.run}: ", (found.state, STYLES[found.state]), process)
    notes = [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(title, _grid(_lines(found)), *notes)


def _grid(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(f"  {name}", style="dim"), Text(text))
    return grid


def _lines(found: RunStatus) -> Lines:
    earlier = len(found.actions) - SHOWN
    actions = [f"step {act.step}: {act.kind}: {act.reason}" for act in found.actions[-SHOWN:]]
    actions += [f"and {earlier} before"] if earlier > 0 else []
    wrote = "" if found.age is None else f"{duration(round(found.age))} ago"
    saved = "none" if found.checkpoint is None else f"after {found.checkpoint} steps"
    lines = [
        ("steps", _progress(found)),
        ("last step", _metrics(found.metrics)),
        ("held-out accuracy", _accuracy(found.accuracy)),
        *(line for policy in found.policies for line in _policy(policy)),
        ("gate", "\n".join(actions) or "no action"),
        ("checkpoint", saved),
        ("last written", wrote),
        *([] if found.live is None else _live(found.live, running=found.state == "running")),
    ]
    return [(name, text) for name, text in lines if text]


def _progress(found: RunStatus) -> str:
    parts = [f"{found.step} taken" if found.steps is None else f"{found.step} of {found.steps}"]
    if found.seconds_per_step is not None:
        parts.append(f"{duration(found.seconds_per_step)} each")
    if found.seconds_left is not None:
        parts.append(f"{duration(found.seconds_left)} left")
    return ", ".join(parts)


def _accuracy(measured: Sequence[StepAccuracy]) -> str:
    last = measured[-SHOWN:]
    return ", ".join(f"{h.value:.2f} [{h.low:.2f}, {h.high:.2f}] after {h.step}" for h in last)


def _policy(policy: PolicyStatus) -> Lines:
    """One of several policies: its clock, its last update, its accuracy."""
    values = policy.metrics
    if VERSION not in values:
        return [(f"policy {policy.name}", "frozen")]
    stale = values.get("staleness_mean")
    where = describe_policy("", values).removeprefix(": ")
    where += "" if stale is None else f", staleness {stale:.2f}"
    own = {key: value for key, value in values.items() if not key.startswith("timing_s/")}
    accuracy = _accuracy(policy.accuracy)
    lines = [where, _metrics(own), f"held-out accuracy {accuracy}" if accuracy else ""]
    return [(f"policy {policy.name}", "\n".join(line for line in lines if line))]


def _metrics(values: Mapping[str, float | None]) -> str:
    pairs = [(column, values.get(column.metric)) for column in COLUMNS]
    return ", ".join(f"{c.title} {value:{c.form}}" for c, value in pairs if value is not None)


def _live(live: AsyncStatus, *, running: bool) -> Lines:
    """What the run's process has written; of its workers only while there are any."""
    idle = [
        f"{side} {share:.0%}"
        for side, share in (("rollout", live.rollout_idle), ("learner", live.learner_idle))
        if share is not None
    ]
    worker = "none" if live.worker_pid is None else f"process {live.worker_pid}"
    ready = f"{live.under_way} prompts under way, {live.buffer} groups ready, {live.batch} a step"
    waiting = f"; evaluations waiting: {live.evaluations_waiting}"
    workers = [
        ("worker", f"{worker}; restarts: {live.worker_restarts}"),
        ("workers", "\n".join(map(_worker, live.workers))),
        ("connect", f"sparrow worker --connect {live.address}" if live.address else ""),
    ]
    return [
        ("phase", live.phase + waiting * bool(live.evaluations_waiting)),
        ("weights", f"version {live.version}, staleness at most {live.staleness}"),
        ("rollout", ready),
        ("idle", ", ".join(idle)),
        ("advice", live.advice),
        ("dropped", f"{_reasons(live.dropped)}; {live.again} dispatched again"),
        *(workers if running else ()),
    ]


def _worker(worker: WorkerStatus) -> str:
    version = "loading weights" if worker.version is None else f"version {worker.version}"
    own = "".join(f", {text}" for text in (worker.dtype, worker.attention) if text)
    place = " (another machine)" if worker.remote else ""
    heard = f"heard {duration(round(worker.heard))} ago"
    return f"{worker.name}{place}: {version}{own}, {worker.under_way} prompts under way, {heard}"


def _reasons(counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"{sum(counts.values())} ({listed})" if counts else "none"


# `sparrow audit`.


def audit(config: AuditConfig, *, json: AsJson = False) -> int:
    with measuring(f"reading {config.run}"):
        result = api.audit(config)
    if json:
        write_json(result)
    else:
        _show_audit(result)
    return int(not result.proven)


def _show_audit(result: AuditResult) -> None:
    begun = ", and one begun" if result.begun else ""
    alive = "; it is running" if result.running else ""
    console.print(f"{result.run}: {result.steps} steps taken{begun}{alive}", highlight=False)
    oldest = "" if result.oldest is None else f"; oldest token: {result.oldest} versions"
    lines = [
        ("prompts", str(result.prompts)),
        ("used", str(result.used)),
        ("dropped", _reasons(result.dropped)),
        ("dispatched again", _reasons(result.again)),
        ("open", f"{result.open}: under way, or not used yet"),
        ("waiting", f"{result.waiting}: to be dispatched again"),
        ("rollouts", f"of {result.compared} steps compared{oldest}"),
        *([("trees of agents", str(result.trees))] if result.trees else []),
    ]
    console.print(_grid(lines), highlight=False)
    for note in result.notes:
        alert("note:", note, "yellow")
    for problem in result.problems:
        console.print(f"[bold red]problem:[/] {plain(problem)}", markup=True, soft_wrap=True)
    if result.proven:
        what = "prompt and every agent" if result.trees else "prompt"
        proven = f"[bold green]proven[/]: every {what} ended once, or has not ended yet"
        console.print(proven, markup=True, highlight=False)
