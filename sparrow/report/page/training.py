"""What a page shows of trainings: learning, the tail under the gate, KV that is read."""

import re
from collections.abc import Iterable, Sequence
from statistics import fmean

from sparrow.report.page.calibration import ramp
from sparrow.report.page.parts import Axis, Chart, Item, Level, Line, Remarks, Section
from sparrow.report.page.runs import Run

REWARD, LENGTH = "critic/score/mean", "response_length/mean"
P05, WORST, DENSITY = "sparse/accept_p05", "sparse/accept_p05_min", "sparse/density"
BIN = re.compile(r"sparse/accept_p05/bin_(\d+)$")
SMOOTHED_FROM = 30  # steps: shorter curves are drawn as they are
WINDOW = 15  # a smooth line is the mean of a fifteenth of the run
MOST_BINS = 8


def learning_section(runs: Sequence[Run]) -> Section | None:
    """Reward and accuracy on held-out rows, by step and by time."""
    if not runs:
        return None
    smooth = any(len(run.steps) >= SMOOTHED_FROM for run in runs)
    note = " Thin: each step; thick: a running mean." if smooth else ""
    items: list[Item] = []
    for by in ("step", "time"):
        items.append(
            _by(
                runs,
                by,
                "reward",
                f"Mean reward of the answers that were drawn for training.{note}",
            )
        )
    if any(run.held_out() for run in runs):
        held = "Rows that training never sees, with 95 % intervals over rows."
        items += [_by(runs, by, "accuracy", held) for by in ("step", "time")]
    say = (
        "Answers are drawn by the sparse actor and judged; the dense policy learns from them. If "
        "that works, the reward rises, and so does accuracy on rows it has not seen."
    )
    return Section(key="learning", title="Does it learn?", say=say, items=tuple(items))


def _by(runs: Sequence[Run], by: str, what: str, say: str) -> Chart:
    make = _reward_lines if what == "reward" else _accuracy_line
    lines = [line for run in runs for line in make(run, by)]
    names = {"reward": "mean reward", "accuracy": "accuracy on held-out rows"}
    axis = Axis(name="steps of training", form=".0f", low=0)
    if by == "time":
        axis = Axis(name="minutes of training", form=".1f", low=0)
    spread = [y for line in lines for _, y in line.points]
    unit = not spread or (min(spread) >= 0 and max(spread) <= 1)
    return Chart(
        key=f"{what}-by-{by}",
        title=f"{names[what].capitalize()} by {'step' if by == 'step' else 'time'}",
        x=axis,
        y=Axis(name=names[what], low=0 if unit else None, high=1 if unit else None, form=".2f"),
        lines=tuple(lines),
        say=say,
    )


def _reward_lines(run: Run, by: str) -> list[Line]:
    minutes = run.minutes()
    points = [
        (step + 1 if by == "step" else minutes[step + 1], value)
        for step, value in run.values(REWARD)
    ]
    if len(points) < SMOOTHED_FROM:
        return [Line(name=run.name, points=tuple(points), role=run.role, shape="dots")]
    raw = Line(name=run.name, points=tuple(points), role=run.role, faint=True)
    return [raw, Line(name=run.name, points=tuple(_running(points)), role=run.role)]


def _running(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of the last few values at every point."""
    window = max(2, len(points) // WINDOW)
    return [
        (x, fmean(y for _, y in points[max(0, i + 1 - window) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def _accuracy_line(run: Run, by: str) -> list[Line]:
    minutes = run.minutes()
    known = [point for point in run.held_out() if point.step in minutes]
    at = [float(p.step) if by == "step" else minutes[p.step] for p in known]
    return [
        Line(
            name=run.name,
            points=tuple((x, p.value) for x, p in zip(at, known, strict=True)),
            spans=tuple((x, p.low, p.high) for x, p in zip(at, known, strict=True)),
            role=run.role,
            shape="dots",
        )
    ]


def tail_section(runs: Sequence[Run]) -> Section | None:
    """p05 by bin against the target, step by step, and what the gate did."""
    watched = [run for run in runs if run.values(P05) or run.values(WORST)]
    if not watched:
        return None
    items: list[Item] = []
    for run in watched:
        items += [_bins_chart(run, len(runs) > 1), _gate_remarks(run, len(runs) > 1)]
    if len([run for run in runs if run.values(WORST)]) > 1:
        items.append(_worst_chart(runs))
    say = (
        "At every step the gate compares sparse actor and dense policy on real answers. Above the "
        "target, nearly all tokens are such as the policy itself would have drawn; where a line "
        "falls below, the gate lets the actor read more at these lengths."
    )
    return Section(
        key="tail", title="Is the tail kept while training?", say=say, items=tuple(items)
    )


def bins_of(run: Run) -> list[int]:
    """Starts of the bins of length that were watched."""
    keys = {key for line in run.steps for key in line}
    return sorted(int(found[1]) for key in keys if (found := BIN.match(key)))


def _bins_chart(run: Run, named: bool) -> Chart:
    starts = bins_of(run)
    shown = starts[:: -(-len(starts) // MOST_BINS)] if starts else []
    lines = [_bin_line(run, start, starts, ramp(i, len(shown))) for i, start in enumerate(shown)]
    if not shown:
        lines = [_metric_line(run, P05, "all lengths", run.role)]
    left_out = (
        f" {len(starts) - len(shown)} bins between are not drawn."
        if len(shown) < len(starts)
        else ""
    )
    window = run.settings.get("gate", {}).get("window")
    over = f"over the last {window} steps" if window else "over a window of steps"
    return Chart(
        key=f"tail-{run.number}",
        title=f"{run.name}: p05 by length while training"
        if named
        else "p05 by length while training",
        x=Axis(name="steps of training", form=".0f", low=0),
        y=Axis(name="p05 of acceptance", high=1, form=".2f"),
        lines=tuple(lines),
        levels=_levels([run]),
        say=f"A line for each bin of lengths, {over}; bands: 95 % intervals.{left_out}",
    )


def _bin_line(run: Run, start: int, starts: Sequence[int], role: str) -> Line:
    later = [other for other in starts if other > start]
    name = f"{start} to {later[0]} tokens" if later else f"from {start} tokens"
    return _metric_line(run, f"{P05}/bin_{start}", name, role, interval=f"bin_{start}")


def _metric_line(run: Run, metric: str, name: str, role: str, interval: str = "") -> Line:
    points = tuple((step + 1.0, value) for step, value in run.values(metric))
    spans: list[tuple[float, float, float]] = []
    if interval:
        low, high = (dict(run.values(f"{P05}_{end}/{interval}")) for end in ("low", "high"))
        spans = [(step + 1.0, low[step], high[step]) for step in low if step in high]
    return Line(name=name, points=points, role=role, spans=tuple(spans))


def _worst_chart(runs: Sequence[Run]) -> Chart:
    lines = [_metric_line(run, WORST, run.name, run.role) for run in runs if run.values(WORST)]
    return Chart(
        key="tail-worst",
        title="p05 of the worst bin",
        x=Axis(name="steps of training", form=".0f", low=0),
        y=Axis(name="p05 of acceptance", high=1, form=".2f"),
        lines=tuple(lines),
        levels=_levels(runs),
        say="The lowest of all bins of lengths that have enough tokens to be judged.",
    )


def _levels(runs: Sequence[Run]) -> tuple[Level, ...]:
    found = sorted({run.target for run in runs if run.target is not None})
    return tuple(Level(y=target, name=f"target {target:g}") for target in found)


def gate_actions(run: Run) -> list[str]:
    """What the gate did, in its own words; changed settings are not its doing."""
    return [
        f"Step {action['step']}: {action.get('kind')}: {action.get('reason', '')}"
        for action in run.actions
        if action.get("kind") != "changed"
    ]


def _gate_remarks(run: Run, named: bool) -> Remarks:
    whose = f"What the gate did: {run.name}" if named else "What the gate did"
    lines = gate_actions(run) or [_silence(run)]
    return Remarks(key=f"gate-{run.number}", title=whose, lines=tuple(lines))


def _silence(run: Run) -> str:
    """Why a gate has done nothing."""
    gate = run.settings.get("gate", {})
    if gate.get("mode") == "off":
        return "It was switched off."
    looks = [value for _, value in run.values(WORST)]
    below = sum(value < run.target for value in looks) if run.target is not None else 0
    if not below:
        return "It watched and had no reason to act."
    return (
        f"It watched and did not act: at {below} of {len(looks)} looks p05 of the worst length was "
        f"below the target, but never surely (by its interval), nor in one bin at "
        f"{gate.get('patience', 'several')} looks in a row."
    )


def kept_section(runs: Sequence[Run]) -> Section | None:
    """The share of keys and values that decoding read, step by step; and how long answers were."""
    if not any(run.values(DENSITY) for run in runs):
        return None
    lines = _each(runs, DENSITY)
    lengths = Chart(
        key="answer-length",
        title="Tokens of an answer",
        x=Axis(name="steps of training", form=".0f", low=0),
        y=Axis(name="mean tokens", low=0, form=".0f"),
        lines=tuple(_each(runs, LENGTH)),
        say="Longer answers leave more to save: a budget is a smaller share of them.",
    )
    density = Chart(
        key="kept-kv",
        title="Keys and values that decoding read",
        x=Axis(name="steps of training", form=".0f", low=0),
        y=Axis(name="share of what dense attention reads", low=0, high=1, form=".0%"),
        lines=tuple(lines),
        say="Mean over all sampled tokens and layers; dense rollout reads 100 %.",
    )
    say = (
        "Decoding a long text is mostly reading the memory of it, so what is not read is time "
        "saved, once texts are long enough for that memory to dominate."
    )
    return Section(key="kept", title="How much memory is read?", say=say, items=(density, lengths))


def _each(runs: Iterable[Run], metric: str) -> list[Line]:
    return [_metric_line(run, metric, run.name, run.role) for run in runs if run.values(metric)]
