"""Sections of training runs: learning, p05 of acceptance and the gate, KV read, and time."""

import math
import re
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from sparrow.reporting import calibration, page
from sparrow.reporting.calibration import ACCEPTANCE, run_role
from sparrow.schema.bench import Speed, SpeedCase
from sparrow.schema.run_folder import VERSION, RunFolder, split_policies

REWARD, LENGTH = "critic/score/mean", "response_length/mean"
DENSITY, CUT_OFF, STEP_SECONDS = "sparse/density", "response_length/clip_ratio", "timing_s/step"
TOKENS_PER_ROUND, BY_POSITION = "spec/tokens_per_round", "spec/acceptance_by_position/"
P05, P0_1, HARD_MISSES = "sparse/accept_p05", "sparse/accept_p0_1", "sparse/hard_misses"
ENTROPY, KL, OUTCOME = "actor/entropy", "actor/kl_new_old", "critic/outcome/"
STALENESS, PENDING = "staleness_mean", "pending"
SAMPLED, LEARNT = "tokens_sampled", "tokens_learnt"
BIN = re.compile(r"sparse/accept_p05/bin_(\d+)$")
MOST_BINS = 8
SMOOTHED_FROM = 30  # steps: shorter curves are drawn as they are
WINDOW = 15  # a smooth line is the mean of a fifteenth of the run
PARTS = {
    "rollout": "timing_s/gen",
    "dense log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "KL of the update": "timing_s/kl",
}
EQUAL = 0.02  # speed-ups nearer to 1 than this count as equal
STEP = page.Axis(name="steps of training", form=".0f", low=0)
ROWS = "Rows that training never sees, with 95 % intervals over rows."
CUT = "Cut off: stopped by the token limit, not right."
OUTCOMES = {  # of held-out answers: the name of a chart, its sentence, a label, a colour
    "right": ("accuracy on held-out rows", ROWS, "right", "run-0"),
    "cut_off": ("held-out answers cut off", CUT, "cut off", "run-4"),
    "wrong": ("held-out answers wrong", "Wrong: ended in time, not right.", "wrong", "run-1"),
}


def learning_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Reward, outcomes of held-out and of training answers by step; the first two by time too.

    Of several policies a line each; their training answers together.
    """
    if not runs:
        return None
    parts = split_policies(runs)
    items: list[page.Item] = [_reward_chart(parts), *_held_out_charts(parts)]
    items += _training_chart(runs)
    items += [_time_table(parts)] if any(run.values(STEP_SECONDS) for run in runs) else []
    return page.Section.named("learning", items)


def _reward_chart(runs: Sequence[RunFolder]) -> page.Chart:
    say = "Mean reward of the answers sampled for training."
    if any(len(run.steps) >= SMOOTHED_FROM for run in runs):
        say += " Thin: each step; thick: a running mean."
    lines = [line for run in runs for line in _reward_lines(run)]
    return _share_chart("reward", "mean reward", lines, say)


def _share_chart(key: str, name: str, lines: Sequence[page.Line], say: str) -> page.Chart:
    """Lines by step, those with points; from 0 to 1 where all of them are shares."""
    lines = [line for line in lines if line.points]
    shares = all(0 <= value <= 1 for line in lines for _, value in line.points)
    y = page.Axis(name=name, low=0 if shares else None, high=1 if shares else None, form=".2f")
    title = f"{name[:1].upper()}{name[1:]} by step"
    return page.thin_points(
        page.Chart(key=f"{key}-by-step", title=title, x=STEP, y=y, lines=lines, say=say)
    )


def _reward_lines(run: RunFolder) -> list[page.Line]:
    """The reward of every step; in long runs also a running mean."""
    points = _by_step(run, REWARD)
    if len(points) < SMOOTHED_FROM:
        return [page.Line(name=run.name, points=points, role=run_role(run), shape="dots")]
    window, values = max(2, len(points) // WINDOW), [y for _, y in points]
    ends = range(1, len(points) + 1)
    smooth = [(points[i - 1][0], fmean(values[max(0, i - window) : i])) for i in ends]
    raw = page.Line(name=run.name, points=points, role=run_role(run), faint=True)
    return [raw, page.Line(name=run.name, points=smooth, role=run_role(run))]


def _held_out_charts(runs: Sequence[RunFolder]) -> list[page.Chart]:
    """Right, cut off and wrong: three lines of one chart for one run, a chart each for several."""
    charts = []
    for outcome, (name, say, *_) in OUTCOMES.items():
        lines = [_outcome_line(run, outcome, run.name, run_role(run)) for run in runs]
        charts.append(_share_chart(outcome.replace("right", "accuracy"), name, lines, say))
    if len(runs) == 1:
        lines = [_outcome_line(runs[0], key, *text[2:]) for key, text in OUTCOMES.items()]
        say = " ".join(text[1] for text in OUTCOMES.values())
        charts = [_share_chart("accuracy", "share of held-out answers", lines, say)]
    return [chart for chart in charts if chart.lines]


def _training_chart(runs: Sequence[RunFolder]) -> list[page.Chart]:
    """Outcomes of the answers sampled for training, of one run; the share cut off of several."""
    tracks = [
        (label, role, _by_step(runs[0], f"{OUTCOME}{outcome}"))
        for outcome, (_, _, label, role) in OUTCOMES.items()
    ]
    if len(runs) > 1:
        tracks = [(run.name, run_role(run), _by_step(run, f"{OUTCOME}cut_off")) for run in runs]
    lines = [page.Line(name=name, points=points, role=role) for name, role, points in tracks]
    name = "share of training answers" if len(runs) == 1 else "training answers cut off"
    chart = _share_chart("outcomes", name, lines, f"Of the answers sampled for training. {CUT}")
    return [chart] if chart.lines else []


def _outcome_line(run: RunFolder, outcome: str, name: str, role: str) -> page.Line:
    """The share of held-out answers that are right (with its interval), cut off or wrong."""
    held_out = run.held_out()
    points = [(float(h.step), getattr(h.outcomes, outcome)) for h in held_out if h.outcomes]
    spans: list[page.Span] = []
    if outcome == "right":
        points = [(float(held.step), held.value) for held in held_out]
        spans = [(float(held.step), held.low, held.high) for held in held_out]
    return page.Line(name=name, points=points, spans=spans, role=role, shape="dots")


def _time_table(runs: Sequence[RunFolder]) -> page.Table:
    """The same curves by time: their values after each quarter of the longest run."""
    longest = max(max(run.minutes().values()) for run in runs)
    form = ".1f" if longest >= 4 else ".2f"
    rows = []
    for name, outcome in (("mean reward", None), ("accuracy on held-out rows", "right")):
        for minutes in (longest * quarter / 4 for quarter in range(1, 5)):
            values = [_value_after(run, minutes, outcome) for run in runs]
            if set(values) != {page.NOT_MEASURED}:
                rows.append([f"{name} after {minutes:{form}} minutes", *values])
    title, columns = "By time of training", ["", *(run.name for run in runs)]
    return page.Table(key="learning-by-time", title=title, columns=columns, rows=rows)


def _value_after(run: RunFolder, minutes: float, outcome: str | None) -> str:
    """The last reward or outcome that was measured by then, with its step."""
    line = _outcome_line(run, outcome, "", "quiet") if outcome else _reward_lines(run)[-1]
    passed, until = run.minutes(), minutes * (1 + 1e-9)
    measured = [point for point in line.points if passed.get(int(point[0]), math.inf) <= until]
    return "{1:.2f} at step {0:.0f}".format(*measured[-1]) if measured else page.NOT_MEASURED


class WorstBin(NamedTuple):
    """p05 of the worst measured bin after a step, with its interval where it is known."""

    p05: float
    low: float | None
    high: float | None
    step: int


def worst_bins(run: RunFolder) -> list[WorstBin]:
    """The worst bin of every step with a measured bin."""
    starts, worst = bin_starts(run), []
    for line in run.steps:
        measured = [
            (p05, start)
            for start in starts
            if (p05 := line.values.get(f"{P05}/bin_{start}")) is not None
        ]
        if measured:
            p05, start = min(measured)
            low, high = (line.values.get(f"{P05}_{end}/bin_{start}") for end in ("low", "high"))
            worst.append(WorstBin(p05, low, high, line.step))
    return worst


def bin_starts(run: RunFolder) -> list[int]:
    """Starts of the bins of length that were ever measured."""
    keys = {key for line in run.steps for key in line.values}
    return sorted(int(match[1]) for key in keys if (match := BIN.match(key)))


def tail_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """p05, p0.1 and hard misses by bin, step by step, and the actions of the gate."""
    watched = [run for run in runs if run.values(P05) or worst_bins(run)]
    if not watched:
        return None
    items: list[page.Item] = []
    for run in watched:
        title = "Actions of the gate" + f": {run.name}" * (len(runs) > 1)
        lines = gate_actions(run) or [_why_no_action(run)]
        items += [_bins_chart(run, len(runs) > 1, figure) for figure in _tail_figures(run)]
        items.append(page.Remarks(key=f"gate-{run.number}", title=title, lines=lines))
    items += [_worst_chart(watched)] if sum(bool(worst_bins(run)) for run in watched) > 1 else []
    return page.Section.named("tail", items)


class TailFigure(NamedTuple):
    """A figure of the tail by bin of lengths: its metric, and how it is drawn."""

    metric: str
    key: str
    name: str
    y: page.Axis
    levels: Sequence[page.Level]
    say: str = ""


def _tail_figures(run: RunFolder) -> list[TailFigure]:
    """p05, and what else was measured."""
    target, bound = run.target, run.settings.hard_misses
    targets = page.target_levels([] if target is None else [target])
    bounds = [] if bound is None else [page.Level(y=bound, name=f"bound {bound:g}")]
    far = page.Axis(name="p0.1 of acceptance", high=1, form=".2f")
    say = " " + page.TEXTS["tail"]["misses"]
    figures = [
        TailFigure(P05, "tail", "p05", ACCEPTANCE, targets),
        TailFigure(HARD_MISSES, "misses", "Hard misses", calibration.HARD_MISSES, bounds, say),
        TailFigure(P0_1, "far-tail", "p0.1", far, []),
    ]
    return [figure for figure in figures if figure.metric == P05 or run.values(figure.metric)]


def _bins_chart(run: RunFolder, several: bool, figure: TailFigure) -> page.Chart:
    starts = bin_starts(run)
    shown = starts[:: -(-len(starts) // MOST_BINS)] if starts else []
    lines = [
        _bin_line(run, start, page.ramp(i, len(shown)), figure.metric)
        for i, start in enumerate(shown)
    ]
    window = run.settings.window
    over = f"over the last {window} steps" if window else "over a window of steps"
    say = f"A line per bin of lengths, {over} with 95 % intervals over prompts."
    if not shown:
        points = _by_step(run, figure.metric)
        lines = [page.Line(name="all lengths", points=points, role=run_role(run))]
        say = f"Over all lengths, {over}; no bin of lengths was measured yet."
    if len(shown) < len(starts):
        say += f" {len(starts) - len(shown)} bins in between are not drawn."
    chart = page.Chart(
        key=f"{figure.key}-{run.number}",
        title=f"{run.name}: " * several + f"{figure.name} by length while training",
        x=STEP,
        y=figure.y,
        lines=[line for line in lines if line.points],
        levels=figure.levels,
        say=say + figure.say,
    )
    return page.thin_points(chart, lowest=figure.metric != HARD_MISSES)


def _worst_chart(runs: Sequence[RunFolder]) -> page.Chart:
    lines = _run_lines(runs, [[(w.step + 1.0, w.p05) for w in worst_bins(run)] for run in runs])
    say = "The lowest of all bins of lengths with enough tokens to be measured."
    levels = page.target_levels([run.target for run in runs if run.target is not None])
    title = "p05 of the worst length"
    chart = page.Chart(
        key="tail-worst", title=title, x=STEP, y=ACCEPTANCE, lines=lines, levels=levels, say=say
    )
    return page.thin_points(chart, lowest=True)


def policy_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Entropy of the policy, and KL(new || old) of its updates, by step."""
    bounds = {run.settings.max_kl for run in runs if run.settings.max_kl is not None}
    levels = [page.Level(y=bound, name=f"bound {bound:g}") for bound in sorted(bounds)]
    charts = []
    y = page.Axis(name="nats a token", low=0, form=".2g")
    for metric, key, title, drawn in (
        (ENTROPY, "entropy", "Entropy of the policy", []),
        (KL, "kl", "KL(new || old) of the updates of a step", levels),
    ):
        lines = _run_lines(runs, [_by_step(run, metric) for run in runs])
        say = page.TEXTS["policy"][key]
        chart = page.Chart(key=key, title=title, x=STEP, y=y, lines=lines, levels=drawn, say=say)
        charts += [page.thin_points(chart)] if lines else []
    return page.Section.named("policy", charts) if charts else None


def _run_lines(runs: Sequence[RunFolder], tracks: Sequence[list[page.Point]]) -> list[page.Line]:
    """A line for every run that has points."""
    pairs = [(run, points) for run, points in zip(runs, tracks, strict=True) if points]
    return [page.Line(name=run.name, points=points, role=run_role(run)) for run, points in pairs]


def _by_step(run: RunFolder, metric: str) -> list[page.Point]:
    """The points of a metric; x is the number of steps taken."""
    return [(step + 1.0, value) for step, value in run.values(metric)]


def _bin_line(run: RunFolder, start: int, role: str, metric: str) -> page.Line:
    """A figure of a bin by step; the bin ends at the next edge of the schedule, as in the gate."""
    edges = [] if run.schedule is None else run.schedule.lengths.tolist()
    later = [edge for edge in sorted({*edges, *bin_starts(run)}) if edge > start]
    name = f"{start} to {later[0]} tokens" if later else f"from {start} tokens"
    low, high = (dict(_by_step(run, f"{metric}_{end}/bin_{start}")) for end in ("low", "high"))
    spans = [(x, low[x], high[x]) for x in low if x in high]
    points = _by_step(run, f"{metric}/bin_{start}")
    return page.Line(name=name, points=points, role=role, spans=spans)


def gate_actions(run: RunFolder) -> list[str]:
    """Actions of the gate with their reasons; changed settings are left out."""
    return [
        f"Step {action.step}: {action.kind}: {action.reason}"
        for action in run.actions
        if action.kind != "changed"
    ]


def _why_no_action(run: RunFolder) -> str:
    """Why a gate has not acted."""
    worst, target = worst_bins(run), run.target
    reason = "quiet" if worst else "nothing"
    if not run.settings.given or run.settings.gate == "off":
        reason = "off" if run.settings.given else "unset"
    below = sum(target is not None and bin.p05 < target for bin in worst)
    return str(page.TEXTS["tail"][reason].format(below=below, steps=len(worst)))


def policies_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Clocks and tokens of the policies of runs with several, a line each."""
    runs = [run for run in runs if run.policies]
    parts = split_policies(runs, frozen=True)
    charts = _episode_chart(runs, parts)
    for metric, name, form in (
        (VERSION, "updates so far", ".0f"),
        (PENDING, "groups that wait", ".0f"),
        (STALENESS, "versions of the weights", ".1f"),
        (SAMPLED, "tokens sampled a round", ".3g"),
        (LEARNT, "tokens learnt a round", ".3g"),
        (f"{HARD_MISSES}_max", "hard misses per 1000 tokens", ".1f"),
    ):
        lines = _run_lines(parts, [_by_step(part, metric) for part in parts])
        key = metric.rpartition("/")[2]
        title, say = page.TEXTS["policies"][key]
        y = page.Axis(name=name, low=0, form=form)
        chart = page.Chart(key=f"policies-{key}", title=title, x=STEP, y=y, lines=lines, say=say)
        charts += [page.thin_points(chart)] if lines else []
    return page.Section.named("policies", charts) if charts else None


def _episode_chart(runs: Sequence[RunFolder], parts: Sequence[RunFolder]) -> list[page.Chart]:
    """Accuracy of each policy in the episode on held-out rows, and the team's reward."""
    tracks = [(part.name, part.number, part.in_episode("acc")) for part in parts]
    tracks += [("team", len(parts), run.in_episode("team_reward")) for run in runs[:1]]
    lines = [
        page.Line(
            name=name,
            points=[(float(step), value) for step, value, *_ in points],
            spans=[(float(step), low, high) for step, _, low, high in points],
            role=f"run-{number % page.RUNS}",
            shape="dots",
        )
        for name, number, points in tracks
        if points
    ]
    title, say = page.TEXTS["policies"]["episode"]
    y = page.Axis(name="accuracy; the team: its reward", low=0, form=".2f")
    chart = page.Chart(key="policies-episode", title=title, x=STEP, y=y, lines=lines, say=say)
    return [chart] if lines else []


def kept_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """The share of keys and values that decoding reads, and the length of answers, by step."""
    if not any(run.values(DENSITY) for run in runs):
        return None
    share = page.Axis(name="share of what dense attention reads", low=0, high=1, form=".0%")
    tokens = page.Axis(name="mean tokens", low=0, form=".0f")
    charts = []
    for metric, key, title, y, say in (
        (DENSITY, "kept-kv", "Keys and values that decoding read", share, "share"),
        (LENGTH, "answer-length", "Tokens of an answer", tokens, "length"),
    ):
        lines, say = _run_lines(runs, [_by_step(r, metric) for r in runs]), page.TEXTS["kept"][say]
        charts.append(
            page.thin_points(page.Chart(key=key, title=title, x=STEP, y=y, lines=lines, say=say))
        )
    return page.Section.named("kept", charts)


def drafts_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Tokens of a round of exact decoding, by step, and acceptance by position in the last step."""
    exact = [run for run in runs if run.values(TOKENS_PER_ROUND)]
    if not exact:
        return None
    tokens = page.Axis(name="tokens a round", low=1, form=".2f")
    place = page.Axis(name="position in the round", low=1, form=".0f")
    share = page.Axis(name="share accepted", low=0, high=1, form=".2f")
    by_step = [_by_step(run, TOKENS_PER_ROUND) for run in exact]
    by_position = [_last_values(run, BY_POSITION) for run in exact]
    say = page.TEXTS["drafts"]
    charts = [
        page.Chart(key=key, title=title, x=x, y=y, lines=_run_lines(exact, lines), say=text)
        for key, title, x, y, lines, text in (
            ("draft-rounds", "Tokens of a round", STEP, tokens, by_step, say["rounds"]),
            ("draft-positions", "Accepted drafts", place, share, by_position, say["positions"]),
        )
    ]
    return page.Section.named("drafts", list(map(page.thin_points, charts)))


def _last_values(run: RunFolder, prefix: str) -> list[page.Point]:
    """The last values of numbered metrics: their numbers, and the values."""
    names = {name for line in run.steps for name in line.values if name.startswith(prefix)}
    points = ((name, run.values(name)) for name in names)
    return sorted((float(name.removeprefix(prefix)), values[-1][1]) for name, values in points)


def time_section(runs: Sequence[RunFolder]) -> page.Section | None:
    """Dense against sparse where it was timed, and medians of the parts of a step."""
    items: list[page.Item] = [_speed_bars(run.speed, run.number) for run in runs if run.speed]
    trained = [run for run in runs if run.values(STEP_SECONDS)]
    items += [_step_time_bars(trained)] if trained else []
    return page.Section.named("time", items) if items else None


def _speed_bars(speed: Speed, number: int) -> page.Bars:
    groups = []
    for case in speed.cases:
        pairs = [("dense", case.dense_ms), ("sparse", case.sparse_ms)]
        pairs += [] if case.exact_ms is None else [("exact", case.exact_ms)]
        bars = [
            page.Bar(
                name=role,
                value=median(taken),
                role=role if role != "exact" else "run-0",
                interval=(min(taken), max(taken)),
            )
            for role, taken in pairs
        ]
        groups.append(page.BarGroup(name=case.name, bars=bars, say=verdict(case.speed_up)))
    how = (
        f"{speed.note} {speed.machine.describe()}. Medians of {len(speed.cases[0].dense_ms)} "
        "alternating rounds; whiskers: fastest and slowest."
    )
    key, title = f"speed-{number}", "Dense, sparse and exact decoding on this machine"
    say = " ".join([*map(describe_case, speed.cases), how])
    return page.Bars(key=key, title=title, unit="ms per step", groups=groups, say=say)


def describe_case(case: SpeedCase) -> str:
    """A sentence on a timed case: what was timed, and why it came out so."""
    exact = ""
    if case.exact_ms is not None:
        ratio = median(case.dense_ms) / median(case.exact_ms)
        exact = f" Exact decoding, whose samples are the policy's own, is {format_speed_up(ratio)}."
    return f"{case.name} ({case.what}): {case.why}.{exact}"


def format_speed_up(ratio: float) -> str:
    """Format a speed-up briefly: "1.9x faster"."""
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def verdict(ratio: float) -> str:
    """Format a speed-up as a sentence."""
    if abs(ratio - 1) < EQUAL:
        return "Sparse and dense take the same time"
    return f"Sparse is {ratio:.2f}x faster" if ratio > 1 else f"Sparse is {1 / ratio:.2f}x slower"


def _step_time_bars(runs: Sequence[RunFolder]) -> page.Bars:
    groups = []
    for run in runs:
        bars = [
            page.Bar(name=name, value=median(y for _, y in seconds), role=f"ramp-{2 * number + 1}")
            for number, (name, metric) in enumerate(PARTS.items())
            if (seconds := run.values(metric))
        ]
        total = median(value for _, value in run.values(STEP_SECONDS))
        groups.append(page.BarGroup(name=run.name, bars=bars, say=f"{total:.1f} s per step"))
    say = "Medians over the steps. On large models with long answers the rollout is most of it."
    title = "Time of a training step"
    return page.Bars(key="step-parts", title=title, unit="s", form=".2f", groups=groups, say=say)
