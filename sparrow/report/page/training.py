"""What a page shows of trainings: how they learn, and how much of the KV cache is read."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from sparrow.report.page.parts import Axis, Chart, Item, Line, Section
from sparrow.report.page.runs import Run
from sparrow.report.page.thinning import thinned

REWARD, LENGTH = "critic/score/mean", "response_length/mean"
DENSITY, CUT_OFF = "sparse/density", "response_length/clip_ratio"
SMOOTHED_FROM = 30  # steps: shorter curves are drawn as they are
WINDOW = 15  # a smooth line is the mean of a fifteenth of the run


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
        f"{_who_draws(runs)} the dense policy learns from them. If that works, the reward rises, "
        "and so does accuracy on rows it has not seen."
    )
    return Section(key="learning", title="Does it learn?", say=say, items=tuple(items))


def _who_draws(runs: Sequence[Run]) -> str:
    if all(run.dense for run in runs):
        return "Answers are drawn by the model itself, densely, and judged;"
    if any(run.dense for run in runs):
        return "Answers are drawn by the sparse actor (in a dense run, densely) and judged;"
    return "Answers are drawn by the sparse actor and judged;"


def _by(runs: Sequence[Run], by: str, what: str, say: str) -> Chart:
    make = _reward_lines if what == "reward" else _accuracy_line
    lines = [line for run in runs for line in make(run, by)]
    names = {"reward": "mean reward", "accuracy": "accuracy on held-out rows"}
    axis = Axis(name="steps of training", form=".0f", low=0)
    if by == "time":
        axis = Axis(name="minutes of training", form=".1f", low=0)
    spread = [y for line in lines for _, y in line.points]
    unit = not spread or (min(spread) >= 0 and max(spread) <= 1)
    chart = Chart(
        key=f"{what}-by-{by}",
        title=f"{names[what].capitalize()} by {by}",
        x=axis,
        y=Axis(name=names[what], low=0 if unit else None, high=1 if unit else None, form=".2f"),
        lines=tuple(lines),
        say=say,
    )
    return thinned(chart)


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


def kept_section(runs: Sequence[Run]) -> Section | None:
    """The share of keys and values that decoding read, step by step; and how long answers were."""
    if not any(run.values(DENSITY) for run in runs):
        return None
    density = _by_step(runs, DENSITY, "kept-kv", "Keys and values that decoding read")
    lengths = _by_step(runs, LENGTH, "answer-length", "Tokens of an answer")
    share = Axis(name="share of what dense attention reads", low=0, high=1, form=".0%")
    tokens = Axis(name="mean tokens", low=0, form=".0f")
    means = "Mean over all sampled tokens and layers; dense rollout reads 100 %."
    longer = "Longer answers leave more to save: a budget is a smaller share of them."
    say = (
        "Decoding a long text is mostly reading the memory of it, so what is not read is time "
        "saved, once texts are long enough for that memory to dominate."
    )
    items = (
        thinned(replace(density, y=share, say=means)),
        thinned(replace(lengths, y=tokens, say=longer)),
    )
    return Section(key="kept", title="How much memory is read?", say=say, items=items)


def _by_step(runs: Sequence[Run], metric: str, key: str, title: str) -> Chart:
    lines = [
        Line(
            name=run.name,
            points=tuple((step + 1.0, value) for step, value in run.values(metric)),
            role=run.role,
        )
        for run in runs
        if run.values(metric)
    ]
    axis = Axis(name="steps of training", form=".0f", low=0)
    return Chart(key=key, title=title, x=axis, y=Axis(name=metric), lines=tuple(lines))
