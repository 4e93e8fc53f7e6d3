"""The section of asynchronous runs: age of tokens, who waits, what is ready, what is dropped."""

from collections.abc import Sequence
from itertools import accumulate

from sparrow.reporting import page
from sparrow.reporting.training import STEP
from sparrow.schema.run_folder import RunFolder

STALENESS, IDLE = "async/staleness_mean", "async/rollout_idle"
DROPPED, AGAIN, WASTED = "async/dropped/", "async/again", "async/wasted_tokens"
VERSIONS = page.Axis(name="versions of the weights", low=0, form=".1f")
SHARE = page.Axis(name="share of the step", low=0, high=1, form=".0%")
PROMPTS = page.Axis(name="prompts", low=0, form=".0f")
CHARTS = (  # of metrics by step: key, title, axis, lines as name, metric and role
    (
        "staleness",
        "Age of the learnt tokens",
        VERSIONS,
        (("mean", STALENESS, "run-0"), ("oldest", "async/staleness_max", "run-1")),
    ),
    (
        "idle",
        "Idle time",
        SHARE,
        (("rollout", IDLE, "run-0"), ("learner", "async/learner_idle", "run-1")),
    ),
    (
        "buffer",
        "Groups that are ready, prompts under way",
        PROMPTS,
        (("ready", "async/buffer", "run-0"), ("under way", "async/under_way", "run-1")),
    ),
)


def asynchronous_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Charts of every asynchronous run; None without one."""
    overlapped = [run for run in runs if run.values(STALENESS) or run.values(IDLE)]
    if not overlapped:
        return None
    charts = [chart for run in overlapped for chart in _charts(run, several=len(runs) > 1)]
    return page.Section.named("asynchronous", charts)


def _charts(run: RunFolder, *, several: bool) -> list[page.Chart]:
    title, texts = f"{run.name}: " * several, page.TEXTS["asynchronous"]
    charts = []
    for key, name, y, tracks in CHARTS:
        lines = [_line(name, run.values(metric), role) for name, metric, role in tracks]
        charts.append((key, name, y, lines, texts[key]))
    wasted = sum(value for _, value in run.values(WASTED))
    say = texts["dropped"].format(wasted=f"{wasted:.0f}")
    charts.append(("dropped", "Prompts dropped so far", PROMPTS, _dropped(run), say))
    return [
        page.thin_points(
            page.Chart(
                key=f"{key}-{run.number}",
                title=f"{title}{name}",
                x=STEP,
                y=y,
                lines=[line for line in lines if line.points],
                say=say,
            )
        )
        for key, name, y, lines, say in charts
        if any(line.points for line in lines)
    ]


def _line(name: str, values: Sequence[tuple[int, float]], role: str) -> page.Line:
    return page.Line(name=name, points=[(step + 1.0, value) for step, value in values], role=role)


def _dropped(run: RunFolder) -> list[page.Line]:
    """Prompts so far: dropped for the most frequent reasons, and dispatched again."""
    names = {key for line in run.steps for key in line.values if key.startswith(DROPPED)}
    tracks = {name: _so_far(run, name) for name in sorted(names)}
    most = sorted(tracks, key=lambda name: -tracks[name][-1][1])[: page.RAMP]
    lines = [
        _line(_reason(name), tracks[name], page.ramp(number, len(most)))
        for number, name in enumerate(most)
    ]
    again = [_line("dispatched again", _so_far(run, AGAIN), "quiet")] if run.values(AGAIN) else []
    return lines + again


def _reason(metric: str) -> str:
    return metric.removeprefix(DROPPED).replace("_", " ")


def _so_far(run: RunFolder, metric: str) -> list[tuple[int, float]]:
    totals = accumulate(line.values.get(metric) or 0.0 for line in run.steps)
    return [(line.step, total) for line, total in zip(run.steps, totals, strict=True)]
