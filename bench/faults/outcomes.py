"""The outcomes of the fault campaign, and their table."""

import faulthandler
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

HANG = 30.0  # seconds after which a try in process is called hanging
PASSED = ("refused", "same", "right", "resumed", "ran")
FAILED = ("traceback", "hang", "orphan", "silent change", "wrong verdict", "differs")
UNPROTECTED = "changed, no digest"  # counted and printed, no failure


class Try(NamedTuple):
    """part: kills, files, settings or rewards; kind: what was tried; outcome: one of the above."""

    part: str
    kind: str
    outcome: str
    detail: str = ""


def written_out(text: str | list[tuple[str, int]]) -> str:
    """A text of a TOML file: as it is, or in parts with how often each is repeated."""
    return text if isinstance(text, str) else "".join(part * count for part, count in text)


class _Hang(BaseException):
    """Raised by the alarm, past everything that catches exceptions."""


def attempt(act: Callable[[], Any], seconds: float = HANG) -> tuple[str, Any]:
    """("value", result), ("refused", message) for an error that a user is shown, or what failed."""

    def alarm(*_: object) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, alarm)
    faulthandler.dump_traceback_later(4 * seconds, exit=True)  # stuck where no alarm is heard
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return "value", act()
    except (ValueError, OSError) as error:
        return "refused", str(error)
    except _Hang:
        return "hang", f"longer than {seconds:g} s"
    except BaseException as error:  # what is looked for
        return "traceback", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def failures(tries: Iterable[Try]) -> list[Try]:
    return [one for one in tries if one.outcome in FAILED]


def table(tries: Sequence[Try]) -> str:
    """Markdown: a row for every part and kind, its failures by kind."""
    rows = ["| part | kind | tries | passed | failed | outcomes |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Try]] = {}
    for one in tries:
        groups.setdefault((one.part, one.kind), []).append(one)
    for (part, kind), members in groups.items():
        rows.append(_row(part, kind, members))
    return "\n".join([*rows, _row("**all**", "", tries)])


def _row(part: str, kind: str, tries: Sequence[Try]) -> str:
    counts = Counter(one.outcome for one in tries)
    failed = sum(counts[outcome] for outcome in FAILED)
    passed = sum(counts[outcome] for outcome in PASSED)
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"| {part} | {kind} | {len(tries)} | {passed} | {failed} | {shown} |"


class Progress:
    """Prints a line at intervals, and every failure at once."""

    def __init__(self, part: str, total: int, every: int = 20) -> None:
        self.part, self.total, self.every = part, total, every
        self.tries: list[Try] = []
        self._begun = time.monotonic()

    def add(self, kind: str, outcome: str, detail: str = "") -> None:
        self.tries.append(Try(self.part, kind, outcome, detail))
        if outcome in FAILED:
            print(f"FAILED {self.part}, {kind}: {outcome}: {detail}", flush=True)
        if len(self.tries) % self.every == 0:
            seconds = time.monotonic() - self._begun
            print(f"{self.part}: {len(self.tries)} of {self.total}, {seconds:.0f} s", flush=True)
