"""The display of a training run: what stands in the panel, and plain lines elsewhere."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from sparrow.cli import training_display
from sparrow.cli.training_display import Display

METRICS = {
    "critic/score/mean": 0.25,
    "critic/acc/mean": 0.5,
    "response_length/mean": 812.4,
    "sparse/accept_p05_min": 0.871,
    "sparse/kv_budget": 512.0,
    "actor/pg_loss": -0.00123,
    "actor/grad_norm": 0.75,
    "timing_s/gen": 6.0,
    "timing_s/old_log_prob": 1.0,
    "timing_s/update_actor": 2.0,
    "timing_s/step": 10.0,
    "perf/throughput": 15234.0,
    "actor/entropy": 0.412,
    "actor/pg_clipfrac": 0.002,
    "response_length/clip_ratio": 0.03,
    "sparse/density": 0.18,
}


class Screen:
    """A display on a terminal of a given size, without its thread; what it shows as lines."""

    def __init__(self, *, width: int = 80, height: int = 24, colours: Any = None, first: int = 0):
        self.now = 0.0
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=width, height=height, color_system=colours
        )
        self.display = Display(
            self.console, steps=first + 10, first=first, header=[], target=0.86, clock=self.clock
        )

    def clock(self) -> float:
        return self.now

    def step(self, **more: float) -> None:
        self.now += 10
        self.display.step({**METRICS, **more})

    def lines(self) -> list[str]:
        with self.console.capture() as captured:
            self.console.print(self.display._panel())
        return captured.get().splitlines()


def words(line: str) -> str:
    """What stands in a line of the panel, without its borders and blanks."""
    return " ".join(line.strip("│").split())


@pytest.fixture(autouse=True)
def own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the terminal of whoever runs the tests is must not matter."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_plain_lines() -> None:
    file, now = io.StringIO(), [0.0]
    console = Console(file=file, force_terminal=False, width=40)  # lines are not wrapped
    header = ["tiny on countdown", "sparse rollout: preset [0.86]"]
    with Display(console, steps=9, first=3, header=header, clock=lambda: now[0]) as display:
        display.phase("rollout", 3, 8)
        display.step(METRICS)
        display.event("gate: budget \x1b[31mof bin 2\x1b[0m [bold]raised[/]\r to 768", "bold red")
        now[0] = 2.5
        display.step({"actor/grad_norm": math.nan, "response_length/mean": 20480.0})
        display.phase("update")
    assert file.getvalue().splitlines() == [
        "tiny on countdown",
        "sparse rollout: preset [0.86]",
        "  step   reward     acc   length     p05     kept       loss      grad   seconds",
        "     3    0.250   0.500      812   0.871      512   -0.00123      0.75      10.0",
        "gate: budget  [31mof bin 2 [0m [bold]raised[/]  to 768",
        "     4        -       -    20480       -        -          -       nan       2.5",
    ]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True), steps=1, first=0, header=[]) as display:
        display.step(METRICS)
    assert len(file.getvalue().splitlines()) == 2
    assert "\x1b" not in file.getvalue()


def test_the_panel_at_80_columns() -> None:
    screen = Screen()
    screen.display.phase("dense log-probs")
    assert words(screen.lines()[1]) == "0/10 steps dense log-probs for 0:00"
    for _ in range(3):
        screen.step()
    screen.display.phase("rollout", 34, 128)
    screen.now += 4
    lines = screen.lines()
    assert {len(line) for line in lines} == {80}
    left = "1:06 left, 10 s a step"  # 7 of 10 s, 4 s of them over
    assert words(lines[1]) == f"3/10 steps {left} rollout 34/128 for 0:04"
    assert words(lines[2]) == "step reward acc length p05 kept loss grad seconds"
    assert words(lines[5]) == "2 0.250 0.500 812 0.871 512 -0.00123 0.75 10.0"
    assert words(lines[6]) == (
        "tokens/s 15234 entropy 0.412 clipped 0.2% cut off 3.0% density 18.0%"
    )
    assert words(lines[7]) == "seconds of rollout 6.0 log-probs 1.0 update 2.0"


def test_the_last_ten_steps_are_shown_and_the_panel_fits() -> None:
    for width, height in ((80, 24), (80, 14), (40, 24), (200, 60)):
        screen = Screen(width=width, height=height, first=20)
        for _ in range(14):
            screen.step()
        screen.display.phase("a phase with a name much too long for a narrow terminal", 1, 2)
        lines = screen.lines()
        assert {len(line) for line in lines} == {min(width, 100)}
        assert len(lines) < height
    assert [line.split()[1] for line in lines[3:13]] == [str(step) for step in range(24, 34)]


def test_p05_is_coloured_by_its_target() -> None:
    for p05, code in ((0.85, "1;31"), (0.87, "33"), (0.88, "32"), (math.nan, "1;31")):
        screen = Screen(colours="standard")
        screen.step(**{"sparse/accept_p05_min": p05})
        assert f"\x1b[{code}m" in screen.lines()[3]


def test_any_metric_may_be_missing() -> None:
    screen = Screen()
    screen.now = 3.0
    screen.display.step({})
    assert words(screen.lines()[3]) == "0 - - - - - - - 3.0"
    for name in METRICS:
        screen.display.step({name: METRICS[name]})
        assert {len(line) for line in screen.lines()} == {80}


def test_events_and_the_last_panel_stay_and_the_cursor_comes_back() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    with Display(console, steps=2, first=0, header=["a [run]"]) as display:
        display.event("gate: bin 2048 runs dense")
        display.step(METRICS)
        display.phase("checkpoint")
    text = file.getvalue()
    assert text.startswith("a [run]\n")
    assert text.count("gate: bin 2048 runs dense") == 1
    assert text.rstrip().endswith("\x1b[?25h")
    last = text.split("sparrow train")[-1]
    assert "0.250" in last
    assert "checkpoint" not in last


def test_durations() -> None:
    known = {0: "0:00", 59.6: "1:00", 3599: "59:59", 3600: "1:00:00", 90_000: "25:00:00"}
    assert {seconds: training_display._duration(seconds) for seconds in known} == known
