"""The display of a training run: what stands in the panel, and plain lines elsewhere."""

import io
import math
from typing import Any

import pytest

pytest.importorskip("rich")

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


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """A display on a terminal of a given size, without its thread; what it shows as lines."""

    def __init__(
        self,
        *,
        width: int = 80,
        height: int = 24,
        colours: Any = None,
        encoding: str = "utf-8",
        steps: int = 10,
        first: int = 0,
        target: float | None = 0.86,
    ) -> None:
        self.bytes = io.BytesIO()
        self.file = io.TextIOWrapper(self.bytes, encoding=encoding, newline="\n")
        self.clock = Clock()
        self.console = Console(
            file=self.file, force_terminal=True, width=width, height=height, color_system=colours
        )
        self.display = Display(
            self.console, steps=steps, first=first, header=[], target=target, clock=self.clock
        )

    def step(self, seconds: float = 10.0, **more: float) -> None:
        self.clock.now += seconds
        self.display.step({**METRICS, **more})

    def lines(self) -> list[str]:
        with self.console.capture() as captured:
            self.console.print(self.display._panel())
        return captured.get().splitlines()

    def line(self, word: str) -> str:
        (found,) = [line for line in self.lines() if word in line]
        return found


def words(line: str) -> str:
    """What stands in a line of the panel, without its borders and blanks."""
    return " ".join(line.strip("│").split())


@pytest.fixture(autouse=True)
def own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the terminal of whoever runs the tests is must not matter."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def plain(width: int = 80) -> tuple[Display, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=False, width=width)
    header = ["tiny on countdown", "sparse rollout: preset [0.86]"]
    return Display(console, steps=9, first=3, header=header, clock=clock), file, clock


def test_plain_lines() -> None:
    display, file, clock = plain(width=40)  # lines are not wrapped
    with display:
        display.phase("rollout", 3, 8)
        display.step(METRICS)
        display.event("gate: budget of bin 2 raised to 768", "bold red")
        clock.now = 2.5
        display.step({"actor/grad_norm": math.nan, "response_length/mean": 20480.0})
        display.phase("update")
    assert file.getvalue().splitlines() == [
        "tiny on countdown",
        "sparse rollout: preset [0.86]",
        "  step   reward     acc   length     p05     kept       loss      grad   seconds",
        "     3    0.250   0.500      812   0.871      512   -0.00123      0.75      10.0",
        "gate: budget of bin 2 raised to 768",
        "     4        -       -    20480       -        -          -       nan       2.5",
    ]


def test_plain_text_has_no_escape_codes() -> None:
    display, file, _ = plain()
    with display:
        display.event("verifier said \x1b[31mno\x1b[0m [bold]x[/]\r", "red")
        display.step(METRICS)
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()
    assert "[bold]x[/]" in file.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True), steps=1, first=0, header=[]) as display:
        display.step(METRICS)
    assert len(file.getvalue().splitlines()) == 2
    assert "\x1b" not in file.getvalue()


def test_the_panel_at_80_columns() -> None:
    screen = Screen()
    for _ in range(3):
        screen.step()
    screen.display.phase("rollout", 34, 128)
    screen.clock.now += 4
    lines = screen.lines()
    assert {len(line) for line in lines} == {80}
    assert lines[1].startswith("│ 3/10 steps  ━")
    assert lines[1].endswith("  1:06 left, 10 s a step │")  # 7 of 10 s, 4 s of them over
    assert lines[2].startswith("│ rollout 34/128 for 0:04 ")
    assert words(lines[3]) == "step reward acc length p05 kept loss grad seconds"
    assert words(lines[6]) == "2 0.250 0.500 812 0.871 512 -0.00123 0.75 10.0"
    assert lines[9] == (
        "│ tokens/s 15234   entropy 0.412   clipped 0.2%   cut off 3.0%   density 18.0% │"
    )


def test_before_the_first_step() -> None:
    screen = Screen()
    screen.display.phase("dense log-probs")
    assert [len(line) for line in screen.lines()] == [80] * 4
    assert "left" not in screen.lines()[1]
    assert "dense log-probs for 0:00" in screen.lines()[2]


def test_the_last_ten_steps_are_shown() -> None:
    screen = Screen(first=20, steps=100)
    for count in range(14):
        screen.step(**{"critic/score/mean": count / 100})
    table = [line.split()[1] for line in screen.lines()[4:14]]
    assert table == [str(step) for step in range(24, 34)]
    assert "34/100 steps" in screen.lines()[1]
    assert "11:00 left" in screen.lines()[1]


def test_the_panel_fits() -> None:
    for width, height in ((80, 24), (80, 14), (40, 24), (60, 20), (200, 60)):
        screen = Screen(width=width, height=height)
        for _ in range(12):
            screen.step()
        screen.display.phase("a phase with a name much too long for a narrow terminal", 1, 2)
        lines = screen.lines()
        assert {len(line) for line in lines} == {min(width, 100)}
        assert len(lines) < height
        assert "reward" in lines[3]
        assert "p05" in lines[3]
        assert ("loss" in lines[3]) == (width >= 80)


def test_the_time_split() -> None:
    screen = Screen()
    screen.step()
    assert screen.line("rollout").startswith(
        "│ █ rollout 60%   ▓ log-probs 10%   ▒ update 20%   ░ other 10% "
    )
    bar = screen.line("██")
    assert [bar.count(block) for block in "█▓▒░"] == [46, 7, 15, 8]  # of 76


def test_sparklines_rise_with_what_they_show() -> None:
    screen = Screen()
    for count in range(8):
        screen.step(
            **{
                "critic/score/mean": math.nan if count == 4 else count / 7,
                "sparse/accept_p05_min": 0.9,
            }
        )
    assert "│ reward ▁▂▃▄ ▆▇█ 1.000  p05 ▅▅▅▅▅▅▅▅ 0.900 " in "\n".join(screen.lines())


def test_long_sparklines_show_means() -> None:
    assert training_display._sparkline([0, 0, 3, 5, 8, 8], 3, "abc") == "abc"


def test_p05_is_coloured_by_its_target() -> None:
    for p05, code in ((0.85, "1;31"), (0.87, "33"), (0.88, "32"), (math.nan, "1;31")):
        screen = Screen(colours="standard")
        screen.step(**{"sparse/accept_p05_min": p05})
        assert f"\x1b[{code}m" in screen.lines()[4]


def test_any_metric_may_be_missing() -> None:
    screen = Screen(target=None)
    screen.clock.now = 3.0
    screen.display.step({})
    lines = screen.lines()
    assert words(lines[4]) == "0 - - - - - - - 3.0"
    assert len(lines) == 6
    for name in METRICS:
        screen.display.step({name: METRICS[name]})
        assert {len(line) for line in screen.lines()} == {80}


def test_terminals_that_know_ascii_alone() -> None:
    screen = Screen(encoding="ascii")
    screen.step()
    "".join(screen.lines()).encode("ascii")
    with screen.display:
        screen.step()
    screen.file.flush()
    assert b"# rollout 60%   = log-probs 10%" in screen.bytes.getvalue()


def test_events_and_the_last_panel_stay() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    with Display(console, steps=2, first=0, header=["a [run]"]) as display:
        display.event("gate: bin 2048 runs dense")
        display.step(METRICS)
        display.phase("checkpoint")
    text = file.getvalue()
    assert text.startswith("a [run]\n")
    assert text.count("gate: bin 2048 runs dense") == 1
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is there again
    last = text.split("sparrow train")[-1]
    assert "0.250" in last
    assert "checkpoint" not in last


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with (
        pytest.raises(KeyboardInterrupt),
        Display(console, steps=2, first=0, header=[]),
    ):
        raise KeyboardInterrupt
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


def test_durations() -> None:
    known = {0: "0:00", 59.6: "1:00", 3599: "59:59", 3600: "1:00:00", 90_000: "1 d 1 h"}
    assert {seconds: training_display._duration(seconds) for seconds in known} == known
