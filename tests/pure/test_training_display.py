"""The display of a training run: a line a step, and what is going on."""

import io
import math
from typing import Any

import pytest
from rich.console import Console
from support.run_folders import team_step

from sparrow.cli.training_display import Display

METRICS = {
    "critic/score/mean": 0.25,
    "critic/acc/mean": 0.5,
    "response_length/mean": 812.4,
    "sparse/accept_p05_min": 0.871,
    "sparse/kv_budget": 512.0,
    "timing_s/gen": 6.0,
    "actor/grad_norm": 0.75,
    "timing_s/step": 10.0,
}


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
        display.step({"response_length/mean": 2.5e9})
        display.phase("update")
    assert file.getvalue().splitlines() == [
        "tiny on countdown",
        "sparse rollout: preset [0.86]",
        "  step   reward     acc   length     p05     kept   rollout      grad   seconds",
        "     3    0.250   0.500      812   0.871      512       6.0      0.75      10.0",
        "gate: budget  [31mof bin 2 [0m [bold]raised[/]  to 768",
        "     4        -       -    20480       -        -         -       nan       2.5",
        "p05 -: no token was measured (gate.mode, gate.sample)",
        "     5        -       -  2.5e+09       -        -         -         -       0.0",
    ]


def test_p05_is_pooled_while_no_bin_has_enough_tokens() -> None:
    """With how many tokens it is of, said once."""
    file = io.StringIO()
    pooled = {"sparse/accept_p05": 0.9123, "sparse/accept_tokens": 312.0}
    short = {name: value for name, value in METRICS.items() if name != "sparse/accept_p05_min"}
    with Display(Console(file=file, width=40), steps=3, first=0, header=[]) as display:
        display.step(short | pooled)
        display.step(short | pooled)
        display.step(METRICS | pooled)
    _, first, note, second, third = file.getvalue().splitlines()
    assert first.split()[4] == second.split()[4] == "~0.912"
    assert "n = 312" in note
    assert third.split()[4] == "0.871"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True), steps=1, first=0, header=[]) as display:
        display.step(METRICS)
    assert len(file.getvalue().splitlines()) == 2
    assert "\x1b" not in file.getvalue()


def test_p05_is_coloured_by_its_target() -> None:
    for p05, code in ((0.85, "1;31"), (0.87, "33"), (0.88, "32"), (math.nan, "1;31")):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=80, color_system="standard")
        with Display(console, steps=1, first=0, header=[], target=0.86) as display:
            display.step({"sparse/accept_p05_min": p05})
        assert f"\x1b[{code}m" in file.getvalue()


def test_on_a_terminal_lines_stay_and_the_cursor_comes_back() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    with Display(console, steps=2, first=0, header=["a [run]"]) as display:
        display.event("gate: bin 2048 runs dense")
        display.step(METRICS)
        display.phase("rollout", 34, 128)
        display._bar.refresh()
    text = file.getvalue()
    assert "rollout 34/128" in text
    assert "1/2" in text
    assert text.startswith("a [run]\n")
    assert text.count("gate: bin 2048 runs dense") == text.count("0.871") == 1
    assert "\x1b[?25h" in text


def test_several_policies_have_a_line_each() -> None:
    """One that has not learnt has no figures; a frozen one has no line."""
    file = io.StringIO()
    with Display(Console(file=file), steps=8, first=0, header=[]) as display:
        display.step(team_step(0))
        display.step(team_step(1))
    _, first, waits, second, learns, note = file.getvalue().splitlines()
    assert first.split()[:2] == ["0", "0.500"]
    assert "solver: version 1" in first
    assert waits.strip() == "checker: version 0, 1 groups pending"
    assert second.split()[:2] == ["1", "0.520"]
    assert learns.split()[0] == "0.100"
    assert "checker: version 1" in learns
    assert "no token was measured" in note  # of the checker, whose gate measured nothing


def test_p05_of_a_policy_is_coloured_by_its_own_target() -> None:
    for targets, code in (({"solver": 0.95}, "1;31"), ({"checker": 0.95}, "32")):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=120, color_system="standard")
        settings: Any = {"steps": 8, "first": 0, "header": [], "target": 0.5, "targets": targets}
        with Display(console, **settings) as display:
            display.step(team_step(0))
        assert f"\x1b[{code}m 0.900" in file.getvalue()
